"""com.microsoft: layers that carry a state instead of a cache — linear attention, gated delta nets, causal convolutions.

All recurrences run in float32, whatever the dtype of the tensors; only the outputs are rounded.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from transmuter_async.operators.context import Context
from transmuter_async.operators.contrib import rms_norm
from transmuter_async.operators.contrib_attention import default_scale
from transmuter_async.operators.numeric import narrow, sigmoid, widen
from transmuter_async.operators.registry import is_host, operator, xp

MICROSOFT = "com.microsoft"
RULES = ("linear", "gated", "delta", "gated_delta")


def _softplus(x: Any) -> Any:
    return xp(x).logaddexp(x, x.dtype.type(0))


def _scan(step: Any, state: Any, items: tuple[Any, ...], length: int) -> tuple[Any, tuple[Any, ...]]:
    """`lax.scan`, as a loop over numpy values where all are on the host. `items`: arrays with a leading time axis."""
    present = [item for item in items if item is not None]
    if not is_host(state, *present):
        items = tuple(None if item is None else jnp.asarray(item) for item in items)
        return lax.scan(step, jnp.asarray(state), items)
    outputs = []
    for now in range(length):
        state, output = step(state, tuple(None if item is None else item[now] for item in items))
        outputs.append(output)
    return state, tuple(np.stack(column) for column in zip(*outputs, strict=True)) if outputs else ()


def _transition(state: Any, key: Any, value: Any, decay: Any, beta: Any, rule: str) -> tuple[Any, Any]:
    """One step of the state `(..., dk, dv)`: the new state, and the row that the key writes.

    Args:
        key: `(..., dk)`.
        value: `(..., dv)`.
        decay: exp of the log decay, `(..., 1 or dk)`, where the rule has one.
        beta: `(...)`, where the rule has one.
    """
    m = xp(state, key)
    if rule in ("gated", "gated_delta"):
        state = state * decay[..., None]
    written = value
    if rule in ("delta", "gated_delta"):
        read = m.einsum("...kv,...k->...v", state, key)
        written = beta[..., None] * (value - read)
    return state + key[..., :, None] * written[..., None, :], written


@operator("LinearAttention", since_version=1, domain=MICROSOFT, loops=True)
def linear_attention_1(
    query: Any,
    key: Any,
    value: Any,
    past_state: Any = None,
    decay: Any = None,
    beta: Any = None,
    /,
    *,
    chunk_size: int = 64,
    kv_num_heads: int,
    q_num_heads: int,
    scale: float = 0.0,
    state_window: int = 0,
    update_rule: str = "gated_delta",
) -> tuple[Any, Any]:
    """Attention by a state `(B, heads, dk, dv)`: linear, gated, by the delta rule, or both.

    Query heads share the states of fewer key heads, or the other way round. With `state_window` the last states are
    kept on a leading axis, zeros for those before the first token. `chunk_size` is a hint for other kernels.
    """
    if update_rule not in RULES:
        raise ValueError(f"update_rule {update_rule!r} is none of {', '.join(RULES)}")
    m = xp(query, key, value, past_state, decay, beta)
    batch, length, _ = query.shape
    heads = max(q_num_heads, kv_num_heads)

    def split(x: Any, count: int) -> Any:
        if count < 1 or x.shape[2] % count:
            raise ValueError(f"a width of {x.shape[2]} does not fall into {count} heads")
        return m.swapaxes(widen(x).reshape(batch, length, count, x.shape[2] // count), 0, 1)

    q = split(query, q_num_heads)
    size = q.shape[3]
    if size < 1 or key.shape[2] % size:
        raise ValueError(f"the keys' width {key.shape[2]} is no multiple of the head size {size}")
    k = split(key, key.shape[2] // size)
    v = split(value, kv_num_heads)
    k = _repeat(k, kv_num_heads, 2)
    width = v.shape[3]
    if past_state is None:
        state = m.zeros((batch, kv_num_heads, size, width), np.float32)
    else:
        state = widen(past_state[-1] if state_window else past_state)
    g = b = None
    if update_rule in ("gated", "gated_delta"):
        if decay is None:
            raise ValueError(f"update_rule {update_rule!r} needs decay")
        g = m.exp(split(decay, kv_num_heads))
    if update_rule in ("delta", "gated_delta"):
        if beta is None:
            raise ValueError(f"update_rule {update_rule!r} needs beta")
        b = m.swapaxes(widen(beta), 0, 1)
        b = m.broadcast_to(b, (length, batch, kv_num_heads))
    q, factor = _repeat(q, heads, 2), default_scale(scale, size)

    def step(state: Any, item: Any) -> tuple[Any, Any]:
        q, k, v, g, b = item
        state, _ = _transition(state, k, v, g, b, update_rule)
        read = xp(state, q).einsum("bhkv,bhk->bhv", _repeat(state, heads, 1), q) * factor
        return state, (read, state) if state_window else (read,)

    state, outputs = _scan(step, state, (q, k, v, g, b), length)
    y = outputs[0] if outputs else m.zeros((0, batch, heads, width), np.float32)
    y = narrow(m.swapaxes(y, 0, 1).reshape(batch, length, heads * width), query.dtype)
    dtype = query.dtype if past_state is None else past_state.dtype
    if state_window:
        states = outputs[1] if outputs else m.zeros((0, *state.shape), state.dtype)
        before = m.zeros((max(0, state_window - length), *state.shape), state.dtype)
        state = m.concatenate([before, states[max(0, length - state_window) :]])
    return y, narrow(state, dtype)


def _repeat(x: Any, heads: int, axis: int) -> Any:
    """Each head, along `axis`, as often as it takes to have `heads`."""
    count = x.shape[axis]
    if count == heads:
        return x
    if count < 1 or heads % count:
        raise ValueError(f"{heads} heads are no multiple of {count}")
    return xp(x).repeat(x, heads // count, axis=axis)


@operator("LinearAttentionGate", since_version=1, domain=MICROSOFT)
def linear_attention_gate_1(a: Any, dt_bias: Any, decay_scale: Any, b: Any = None, /) -> tuple[Any, Any]:
    """`decay_scale * softplus(a + dt_bias)`, and the sigmoid of `b`."""
    decay = widen(decay_scale) * _softplus(widen(a) + widen(dt_bias))
    return narrow(decay, a.dtype), None if b is None else narrow(sigmoid(widen(b)), b.dtype)


@operator("GatedDeltaNet", since_version=1, domain=MICROSOFT, loops=True)
def gated_delta_net_1(
    query: Any,
    key: Any = None,
    value: Any = None,
    cu_seqlens: Any = None,
    decay: Any = None,
    beta: Any = None,
    initial_state: Any = None,
    a_log: Any = None,
    dt_bias: Any = None,
    capture_count: Any = None,
    state_update_active: Any = None,
    /,
    *,
    beta_activation: str = "none",
    chunk_size: int = 64,
    gate_activation: str = "none",
    gate_lower_bound: float = -5.0,
    qk_l2_norm: int = 0,
    scale: float = 0.0,
    state_update_capacity: int = 0,
    update_rule: str = "gated_delta",
) -> tuple[Any, Any, Any]:
    """Gated delta net over packed tokens of several requests: `(output, final_state, state_update)`.

    The state is `(requests, heads, dv, dk)`. `cu_seqlens` says where requests begin; without it they are equally long,
    and there are as many as there are initial states. `state_update` holds the factors of the first transitions of each
    request (decays, then keys, then written rows), so that a caller can replay some of them; slots that are not captured
    are 0.
    """
    if update_rule not in RULES:
        raise ValueError(f"update_rule {update_rule!r} is none of {', '.join(RULES)}")
    m = xp(query, key, value, cu_seqlens, decay, beta, initial_state, a_log, dt_bias, capture_count)
    shape = query.shape[:-2] if key is not None else query.shape[:-1]
    q, k, v = _delta_parts(query, key, value, initial_state)
    tokens, heads, size, width = q.shape[0], v.shape[1], q.shape[2], v.shape[2]
    if qk_l2_norm:  # Kimi's form has another epsilon; both are those of onnxruntime's kernel
        tiny = np.float32(1e-6 if gate_activation in ("sigmoid", "kda") else 1e-12)
        q, k = (x / m.sqrt((x * x).sum(-1, keepdims=True) + tiny) for x in (q, k))
    g = b = None
    if update_rule in ("gated", "gated_delta"):
        g = _decay(widen(decay), a_log, dt_bias, gate_activation, gate_lower_bound, tokens, heads)
        g = m.exp(g)
    if update_rule in ("delta", "gated_delta"):
        b = widen(beta).reshape(tokens, heads)
        if beta_activation == "sigmoid":
            b = sigmoid(b)
        elif beta_activation != "none":
            raise ValueError(f"beta_activation {beta_activation!r} is neither 'none' nor 'sigmoid'")
    requests = cu_seqlens.shape[0] - 1 if cu_seqlens is not None else 0
    if cu_seqlens is None:
        if initial_state is None and len(shape) == 1:
            raise ValueError("without cu_seqlens the number of requests is that of initial_state, which is left out")
        requests = shape[0] if len(shape) == 2 else initial_state.shape[0]
    if initial_state is None:
        state = m.zeros((requests, heads, size, width), np.float32)
    else:
        state = m.swapaxes(initial_state, 2, 3)
    token = np.arange(tokens)
    if cu_seqlens is None:
        owner: Any = token // max(1, tokens // max(1, requests))
        starts: Any = np.arange(requests) * (tokens // max(1, requests))
    else:
        edges = cu_seqlens.astype(np.int64)
        owner = (token[:, None] >= edges[1:]).sum(1)
        starts = edges[:-1]
    repeated_k, factor = _repeat(k, heads, 1), default_scale(scale, size)
    q = _repeat(q, heads, 1)
    at_host = is_host(state, q, repeated_k, v, owner, *(x for x in (g, b) if x is not None))

    def step(states: Any, item: Any) -> tuple[Any, Any]:
        q, k, v, g, b, owner = item
        new, written = _transition(states[owner], k, v, g, b, update_rule)
        if at_host:
            states = states.copy()
            states[owner] = new
        else:
            states = states.at[owner].set(new)
        return states, (xp(new, q).einsum("hkv,hk->hv", new, q) * factor, written)

    state, outputs = _scan(step, state, (q, repeated_k, v, g, b, owner), tokens)
    y, written = outputs if outputs else (m.zeros((0, heads, width), np.float32),) * 2
    update = None
    if state_update_capacity:
        update = _captured(g, k, written, starts, owner, capture_count, state_update_capacity, requests, tokens)
        if state_update_active is not None:
            update = m.where(state_update_active.reshape(()) != 0, update, m.zeros_like(update))
    return narrow(y.reshape(*shape, *y.shape[1:]), query.dtype), m.swapaxes(state, 2, 3), update


def _delta_parts(query: Any, key: Any, value: Any, initial_state: Any) -> tuple[Any, Any, Any]:
    """Wide `(tokens, heads, size)` of query, key and value."""
    if key is not None:
        return tuple(widen(x).reshape(-1, *x.shape[-2:]) for x in (query, key, value))
    if initial_state is None:
        raise ValueError("packed query, key and value need initial_state for their sizes")
    _, heads, width, size = initial_state.shape
    flat = widen(query).reshape(-1, query.shape[-1])
    ours = flat.shape[1] - heads * width
    if ours < 0 or ours % (2 * size):
        raise ValueError(f"a packed width of {flat.shape[1]} does not fit states of shape {initial_state.shape}")
    half = ours // 2
    q, k, v = flat[:, :half], flat[:, half : 2 * half], flat[:, 2 * half :]
    tokens, pairs = len(flat), half // size
    return q.reshape(tokens, pairs, size), k.reshape(tokens, pairs, size), v.reshape(tokens, heads, width)


def _decay(raw: Any, a_log: Any, dt_bias: Any, activation: str, bound: float, tokens: int, heads: int) -> Any:
    """The log decay `(tokens, heads, 1 or dk)`."""
    m = xp(raw, a_log, dt_bias)
    by_head = raw.ndim > 2 and raw.shape[-2] == heads
    raw = raw.reshape(tokens, heads, raw.shape[-1] if by_head else raw.shape[-1] // heads)
    if activation == "none":
        return raw
    shifted = raw if dt_bias is None else raw + dt_bias.reshape(heads, -1)
    rate = m.exp(a_log)[:, None]
    if activation in ("softplus", "qwen"):
        return -rate * _softplus(shifted)
    if activation in ("sigmoid", "kda"):
        return np.float32(bound) * sigmoid(rate * shifted)
    raise ValueError(f"gate_activation {activation!r} is none of none, softplus, sigmoid")


def _captured(
    decay: Any, key: Any, written: Any, starts: Any, owner: Any, count: Any, capacity: int, requests: int, tokens: int
) -> Any:
    """`(requests, capacity * (decays + keys + rows))`: what the first `count` tokens of each request did."""
    m = xp(decay, key, written, starts, count)
    if count is None:
        raise ValueError("state_update_capacity needs capture_count")
    place = starts[:, None] + np.arange(capacity)
    index = m.clip(place, 0, max(0, tokens - 1))
    mine = (place < tokens) & (m.take(owner, index, mode="clip") == np.arange(requests)[:, None])
    valid = mine & (np.arange(capacity) < count.astype(np.int64)[:, None])
    if decay is None:
        decay = m.ones((tokens, written.shape[1], 1), np.float32)
    parts = []
    for rows in (decay, key, written):
        width = int(np.prod(rows.shape[1:]))
        flat = m.zeros((requests, capacity, width), rows.dtype)
        if tokens:
            flat = m.where(valid[..., None], m.take(rows.reshape(tokens, width), index, axis=0, mode="clip"), flat)
        parts.append(flat.reshape(requests, capacity * width))
    return m.concatenate(parts, axis=1)


# --- causal convolutions ----------------------------------------------------------------------------------------------


def _activation(x: Any, name: str) -> Any:
    if name in ("silu", "swish"):
        return x * sigmoid(x)
    if name != "none":
        raise ValueError(f"activation {name!r} is none of none, silu, swish")
    return x


@operator("CausalConvWithState", since_version=1, domain=MICROSOFT)
def causal_conv_with_state_1(
    input: Any,
    weight: Any,
    bias: Any = None,
    past_state: Any = None,
    /,
    *,
    activation: str = "none",
    channels_last: int = 0,
    dilation: int = 1,
    input_channel_offset: int = 0,
    input_channels: int = 0,
    ndim: int = 1,
    state_channels_last: int = -1,
    state_length: int = 0,
    state_update_capacity: int = 0,
    state_window: int = 0,
    context: Context,
) -> tuple[Any, Any]:
    """Depthwise convolution that sees the past only, and the inputs that the next call will need.

    One spatial axis, as in onnxruntime's CPU kernel; what the schema marks as CUDA's own is refused.
    """
    if ndim != 1:
        raise context.error(f"ndim is {ndim}; only one spatial axis is supported")
    if input_channel_offset or input_channels or state_length or state_update_capacity or state_channels_last != -1:
        raise context.error("channel selection and the other extended attributes exist in CUDA kernels only")
    m = xp(input, weight, bias, past_state)
    inner = input.shape[2:] if channels_last else (input.shape[1],)
    channels = int(np.prod(inner, dtype=np.int64))
    batch, length = input.shape[0], input.shape[1] if channels_last else input.shape[2]
    if weight.shape[:2] != (channels, 1):
        raise context.error(f"weight has shape {tuple(weight.shape)}, but there are {channels} channels")
    taps = weight.shape[2]
    kept = (taps - 1) * dilation

    def rows(x: Any, count: int) -> Any:
        """`(B, count, C)`."""
        x = widen(x)
        return x.reshape(batch, count, channels) if channels_last else m.swapaxes(x, 1, 2)

    past = past_state
    if past is not None and state_window:
        past = past[-1]
    before = m.zeros((batch, kept, channels), np.float32) if past is None else rows(past, kept)
    padded = m.concatenate([before.astype(np.float32), rows(input, length).astype(np.float32)], axis=1)
    kernel = widen(weight)[:, 0].astype(np.float32)
    y = m.zeros((batch, length, channels), np.float32)
    for tap in range(taps):
        y = y + padded[:, tap * dilation : tap * dilation + length] * kernel[:, tap]
    y = _activation(y if bias is None else y + widen(bias), activation)

    def shaped(x: Any, count: int) -> Any:
        x = x.reshape(batch, count, *inner) if channels_last else m.swapaxes(x, 1, 2)
        return narrow(x, input.dtype)

    if not state_window:
        return shaped(y, length), shaped(padded[:, length : length + kept], kept)
    states = []
    for slot in range(state_window):
        seen = length - state_window + slot + 1  # tokens of this call before and including the slot's
        state = padded[:, seen : seen + kept] if seen > 0 else m.zeros((batch, kept, channels), np.float32)
        states.append(shaped(state, kept))
    return shaped(y, length), m.stack(states)


@operator("VarlenCausalConvWithState", since_version=1, domain=MICROSOFT)
def varlen_causal_conv_with_state_1(
    input: Any,
    weight: Any,
    cumulative_sequence_length: Any,
    bias: Any,
    initial_state: Any,
    capture_count: Any = None,
    kernel_delta: Any = None,
    previous_mask: Any = None,
    /,
    *,
    activation: str = "none",
    delta_offset: int = 0,
    dilation: int = 1,
    group_size: int = 1,
    state_update_capacity: int = 0,
    context: Context,
) -> tuple[Any, Any, Any]:
    """The same over packed tokens `(tokens, C)` of several requests, each with its own state `(C, (taps - 1) * dilation)`.

    The third output holds the first inputs of each request. The dynamic mode (`kernel_delta`) is CUDA's and refused.
    """
    if kernel_delta is not None or previous_mask is not None:
        raise context.error("kernel_delta and previous_mask exist in CUDA kernels only")
    m = xp(input, weight, cumulative_sequence_length, initial_state)
    x, state = widen(input), m.swapaxes(widen(initial_state), 1, 2)
    tokens, channels = x.shape
    requests, kept = state.shape[:2]
    if requests == 0 and tokens == 0:
        captured = m.zeros((0, state_update_capacity, channels), input.dtype) if state_update_capacity else None
        return m.zeros(x.shape, input.dtype), m.zeros(initial_state.shape, input.dtype), captured
    if tokens == 0:  # nothing is read of it, but an empty axis can't be taken from
        x = m.zeros((1, channels), x.dtype)
    taps = weight.shape[2]
    edges = cumulative_sequence_length.astype(np.int64)
    starts, ends = edges[:-1], edges[1:]
    token = np.arange(tokens)
    owner = m.clip((token[:, None] >= ends).sum(1), 0, max(0, requests - 1))

    def read(position: Any, request: Any) -> Any:
        """The value at a position of a request, negative ones out of its state."""
        live = m.take(
            x, m.clip(m.take(starts, request, mode="clip") + position, 0, max(0, tokens - 1)), axis=0, mode="clip"
        )
        if kept == 0:
            return live
        old = state[request, m.clip(kept + position, 0, kept - 1)]
        return m.where((position >= 0)[..., None], live, old)

    local = token - m.take(starts, owner, mode="clip")
    kernel = widen(weight)[:, 0]
    y = m.zeros((tokens, channels), x.dtype)
    for tap in range(taps):
        y = y + read(local - (taps - 1 - tap) * dilation, owner) * kernel[:, tap]
    y = narrow(_activation(y if bias is None else y + widen(bias), activation), input.dtype)
    lengths = ends - starts
    which = np.arange(requests)[:, None]
    final = read(lengths[:, None] - kept + np.arange(kept), m.broadcast_to(which, (requests, kept)))
    update = None
    if state_update_capacity:
        if capture_count is None:
            raise context.error("state_update_capacity needs capture_count")
        slot = m.broadcast_to(np.arange(state_update_capacity), (requests, state_update_capacity))
        taken = read(slot, m.broadcast_to(which, slot.shape))
        valid = (slot < capture_count.astype(np.int64)[:, None]) & (slot < lengths[:, None])
        update = narrow(m.where(valid[..., None], taken, m.zeros_like(taken)), input.dtype)
    return y, narrow(m.swapaxes(final, 1, 2), input.dtype), update


# --- gates and streams around them ------------------------------------------------------------------------------------


@operator("GatedRMSNorm", since_version=1, domain=MICROSOFT)
def gated_rms_norm_1(
    X: Any,
    scale: Any,
    gate: Any,
    /,
    *,
    activation: str = "silu",
    epsilon: float = 9.999999747378752e-06,
    context: Context,
) -> Any:
    """RMS norm over each group of `len(scale)` elements, times `silu(gate)` or `sigmoid(gate)`."""
    if X.shape[-1] % scale.shape[0]:
        raise ValueError(f"the last axis of X, {X.shape[-1]}, is no multiple of the {scale.shape[0]} scales")
    rows = widen(X).reshape(*X.shape[:-1], X.shape[-1] // scale.shape[0], scale.shape[0])
    y, _ = rms_norm(rows, scale, epsilon, context.platform)
    z = widen(gate)
    if activation not in ("silu", "swish", "sigmoid"):
        raise ValueError(f"activation {activation!r} is none of silu, swish, sigmoid")
    return narrow(y.reshape(X.shape) * (sigmoid(z) if activation == "sigmoid" else z * sigmoid(z)), X.dtype)


@operator("GatedAdd", since_version=1, domain=MICROSOFT)
def gated_add_1(X: Any, Y: Any, gate: Any, gate_weight: Any = None, /, *, context: Context) -> Any:
    """`X + Y * gate` with one gate for each row; the product is rounded to the dtype before the sum."""
    if gate_weight is not None:
        raise context.error("gate_weight exists in CUDA kernels only")
    if gate.shape != (*X.shape[:-1], 1):
        raise ValueError(f"gate has shape {tuple(gate.shape)}, expected {(*X.shape[:-1], 1)}")
    return narrow(widen(X) + widen(narrow(widen(Y) * widen(gate), X.dtype)), X.dtype)


def _branches(x: Any, count: int) -> Any:
    """`(..., C, H)` out of grouped or flattened streams."""
    if not count:
        return x
    if x.shape[-1] % count:
        raise ValueError(f"a width of {x.shape[-1]} does not fall into {count} branches")
    return x.reshape(*x.shape[:-1], count, x.shape[-1] // count)


@operator("BranchwiseRMSNorm", since_version=1, domain=MICROSOFT)
def branchwise_rms_norm_1(
    X: Any, scale: Any = None, /, *, epsilon: float = 9.999999747378752e-06, num_branches: int = 0, context: Context
) -> Any:
    """RMS norm of each branch on its own; one scale for each branch, or one for all."""
    rows = _branches(widen(X), num_branches)
    y, _ = rms_norm(rows, None, epsilon, context.platform)
    if scale is not None:
        wide = widen(scale)
        size = int(np.prod(scale.shape, dtype=np.int64))
        y = y * (wide.reshape(rows.shape[-1:]) if size == rows.shape[-1] else wide.reshape(rows.shape[-2:]))
    return narrow(y.reshape(X.shape), X.dtype)


@operator("HyperConnectionPreMix", since_version=1, domain=MICROSOFT)
def hyper_connection_pre_mix_1(
    streams: Any, pre_mix: Any, /, *, num_branches: int = 0, reduction_scale: float = 1.0
) -> Any:
    """The streams' sum, weighted by branch or by element, times a constant."""
    rows = _branches(widen(streams), num_branches)
    mix = widen(pre_mix)
    if mix.shape == rows.shape[:-1]:
        mix = mix[..., None]
    elif mix.shape != rows.shape and mix.shape != (*rows.shape[:-1], 1):
        mix = mix.reshape(rows.shape)
    return narrow((rows * mix).sum(-2) * np.float32(reduction_scale), streams.dtype)


@operator("HyperConnectionPostMix", since_version=1, domain=MICROSOFT)
def hyper_connection_post_mix_1(
    streams: Any, block_output: Any, post_mix: Any, stream_mix: Any = None, /, *, num_branches: int = 0
) -> Any:
    """The streams mixed by a matrix `(C, C)`, plus a block's output, weighted by branch or by element."""
    m = xp(streams, block_output, post_mix, stream_mix)
    rows = _branches(widen(streams), num_branches)
    mix = widen(post_mix)
    if mix.shape == rows.shape[:-1]:
        mix = mix[..., None]
    elif mix.shape != (*rows.shape[:-1], 1):
        mix = mix.reshape(rows.shape)
    mixed = rows if stream_mix is None else m.einsum("...ck,...ch->...kh", widen(stream_mix), rows)
    return narrow((mixed + mix * widen(block_output)[..., None, :]).reshape(streams.shape), streams.dtype)


@operator("EngramGate", since_version=1, domain=MICROSOFT)
def engram_gate_1(
    key: Any,
    query: Any,
    value: Any,
    key_norm_scale: Any,
    query_norm_scale: Any,
    conv_norm_scale: Any = None,
    /,
    *,
    epsilon: float = 9.999999747378752e-06,
    context: Context,
) -> tuple[Any, Any]:
    """A value shared by all hyper-connections, gated in each by how much key and query agree; and its RMS norm."""
    m = xp(key, query, value)
    k, _ = rms_norm(widen(key), key_norm_scale, epsilon, context.platform)
    q, _ = rms_norm(widen(query), query_norm_scale, epsilon, context.platform)
    dot = (k * q).sum(-1, keepdims=True) / np.float32(np.sqrt(key.shape[-1]))
    gate = sigmoid(m.sign(dot) * m.sqrt(m.maximum(m.abs(dot), np.float32(1e-6))))
    gated = gate * widen(value)[:, :, None]
    normed = None
    if conv_norm_scale is not None:
        normed, _ = rms_norm(gated, conv_norm_scale, epsilon, context.platform)
        normed = narrow(normed, key.dtype)
    return narrow(gated, key.dtype), normed
