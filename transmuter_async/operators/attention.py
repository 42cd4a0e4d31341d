"""Attention and what belongs to it: Attention, FlexAttention, RotaryEmbedding, LinearAttention.

Scores, softmax and products of narrow floats are computed in float32 and cast once.
"""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from transmuter_async.graph import dtype_of
from transmuter_async.operators.context import Context, Subgraph
from transmuter_async.operators.numeric import narrow, softmax, wide_dtype, widen
from transmuter_async.operators.registry import is_host, operator, xp

__all__ = ["group_heads", "grouped_scores", "grouped_values", "rotate", "split_heads"]

_SOFTMAX_TYPES = (1, 10, 11, 16)


# --- parts --------------------------------------------------------------------------------------------------------------


def split_heads(x: Any, heads: int | None, name: str) -> Any:
    """(batch, length, heads * size) as (batch, heads, length, size)."""
    if not heads or x.shape[2] % heads:
        raise ValueError(f"{name} of shape {tuple(x.shape)} does not split into {heads} heads")
    return x.reshape(*x.shape[:2], heads, x.shape[2] // heads).swapaxes(1, 2)


def group_heads(queries: int, keys: int) -> int:
    """How many query heads share a key head. Raises ValueError where they do not divide."""
    if keys < 1 or queries % keys:
        raise ValueError(f"{queries} query heads are no multiple of {keys} key and value heads")
    return queries // keys


def grouped_scores(q: Any, k: Any) -> Any:
    """q k^T for each head: (B, Hq, L, D) and (B, Hk, S, D) give (B, Hq, L, S) without repeating k."""
    batch, heads, length, size = q.shape
    group = group_heads(heads, k.shape[1])
    q = q.reshape(batch, heads // group, group * length, size)
    scores = xp(q, k).matmul(q, k.swapaxes(2, 3))
    return scores.reshape(batch, heads, length, k.shape[2])


def grouped_values(weights: Any, v: Any) -> Any:
    """weights v for each head: (B, Hq, L, S) and (B, Hk, S, D) give (B, Hq, L, D) without repeating v."""
    batch, heads, length, size = weights.shape
    group = group_heads(heads, v.shape[1])
    weights = weights.reshape(batch, heads // group, group * length, size)
    return xp(weights, v).matmul(weights, v).reshape(batch, heads, length, v.shape[3])


# --- Attention ----------------------------------------------------------------------------------------------------------


@operator("Attention", since_version=23)
def attention_23(
    Q: Any,
    K: Any,
    V: Any,
    attn_mask: Any = None,
    past_key: Any = None,
    past_value: Any = None,
    /,
    *,
    is_causal: int = 0,
    kv_num_heads: int | None = None,
    q_num_heads: int | None = None,
    qk_matmul_output_mode: int = 0,
    scale: float | None = None,
    softcap: float = 0.0,
    softmax_precision: int | None = None,
    n_outputs: int,
    context: Context,
) -> Any:
    """Until version 24 there is no `nonpad_kv_seqlen`."""
    return attention_25(
        Q,
        K,
        V,
        attn_mask,
        past_key,
        past_value,
        is_causal=is_causal,
        kv_num_heads=kv_num_heads,
        q_num_heads=q_num_heads,
        qk_matmul_output_mode=qk_matmul_output_mode,
        scale=scale,
        softcap=softcap,
        softmax_precision=softmax_precision,
        n_outputs=n_outputs,
        context=context,
    )


@operator("Attention", since_version=24)
def attention_24(
    Q: Any,
    K: Any,
    V: Any,
    attn_mask: Any = None,
    past_key: Any = None,
    past_value: Any = None,
    nonpad_kv_seqlen: Any = None,
    /,
    *,
    is_causal: int = 0,
    kv_num_heads: int | None = None,
    q_num_heads: int | None = None,
    qk_matmul_output_mode: int = 0,
    scale: float | None = None,
    softcap: float = 0.0,
    softmax_precision: int | None = None,
    n_outputs: int,
    context: Context,
) -> Any:
    """Until version 25 there are no windows."""
    return attention_25(
        Q,
        K,
        V,
        attn_mask,
        past_key,
        past_value,
        nonpad_kv_seqlen,
        is_causal=is_causal,
        kv_num_heads=kv_num_heads,
        q_num_heads=q_num_heads,
        qk_matmul_output_mode=qk_matmul_output_mode,
        scale=scale,
        softcap=softcap,
        softmax_precision=softmax_precision,
        n_outputs=n_outputs,
        context=context,
    )


@operator("Attention", since_version=25)
def attention_25(
    Q: Any,
    K: Any,
    V: Any,
    attn_mask: Any = None,
    past_key: Any = None,
    past_value: Any = None,
    nonpad_kv_seqlen: Any = None,
    /,
    *,
    is_causal: int = 0,
    kv_num_heads: int | None = None,
    left_window_size: int = -1,
    q_num_heads: int | None = None,
    qk_matmul_output_mode: int = 0,
    right_window_size: int = -1,
    scale: float | None = None,
    softcap: float = 0.0,
    softmax_precision: int | None = None,
    n_outputs: int,
    context: Context,
) -> Any:
    """Scaled dot product attention; query heads may share key and value heads.

    Q, K and V have the shape (batch, heads, length, size) or (batch, length, heads * size). Causal masks and windows
    count from the number of keys before the query block: the past's length, or nonpad_kv_seqlen less the query's length.
    A mask shorter than the keys is continued with "masked". A row without any allowed key gives zeros, never NaN.
    The softcap comes before the mask. `qk_matmul_output_mode`: 0 raw scores, 1 after the softcap, 2 after the mask,
    3 after the softmax.
    """
    if qk_matmul_output_mode not in (0, 1, 2, 3):
        raise ValueError(f"qk_matmul_output_mode {qk_matmul_output_mode} is none of 0, 1, 2, 3")
    if softmax_precision is not None and softmax_precision not in _SOFTMAX_TYPES:
        raise ValueError(f"softmax_precision {softmax_precision} is none of {_SOFTMAX_TYPES}")
    if (past_key is None) != (past_value is None):
        raise ValueError("past_key and past_value are given together or not at all")
    if nonpad_kv_seqlen is not None and past_key is not None:
        raise ValueError("nonpad_kv_seqlen and a past exclude each other: the cache is inside or outside, not both")
    if min(left_window_size, right_window_size) < -1:
        raise ValueError(f"window sizes {left_window_size}, {right_window_size} must be -1 or more")
    if not Q.ndim == K.ndim == V.ndim or Q.ndim not in (3, 4):
        raise ValueError(f"Q, K and V must all have 3 or all 4 dimensions, got {Q.shape}, {K.shape}, {V.shape}")
    m = xp(Q, K, V, attn_mask, past_key, past_value, nonpad_kv_seqlen)
    packed = Q.ndim == 3
    if packed:
        Q, K, V = split_heads(Q, q_num_heads, "Q"), split_heads(K, kv_num_heads, "K"), split_heads(V, kv_num_heads, "V")
    present_key = K if past_key is None else m.concatenate([past_key, K], axis=2)
    present_value = V if past_value is None else m.concatenate([past_value, V], axis=2)
    dtype = Q.dtype
    q, k, v = widen(Q), widen(present_key), widen(present_value)
    batch, heads, length, size = q.shape
    total = k.shape[2]
    factor = m.asarray(math.sqrt(scale if scale is not None else 1 / math.sqrt(size) if size else 1.0), q.dtype)
    with np.errstate(all="ignore"):
        scores = grouped_scores(q * factor, k * factor)
        exposed = scores
        if softcap > 0:
            cap = m.asarray(softcap, q.dtype)
            scores = m.tanh(scores / cap) * cap
            exposed = scores if qk_matmul_output_mode == 1 else exposed
        bias, allowed = _attention_bias(attn_mask, total, q.dtype, m)
        before = past_key.shape[2] if past_key is not None else 0
        allowed = _and(
            allowed,
            _frontier(m, before, nonpad_kv_seqlen, length, total, is_causal, left_window_size, right_window_size),
        )
        if nonpad_kv_seqlen is not None:
            allowed = _and(allowed, np.arange(total) < nonpad_kv_seqlen.reshape(-1, 1, 1, 1))
        if bias is not None:
            scores = scores + bias
        if allowed is not None:
            scores = m.where(allowed, scores, m.asarray(-np.inf, scores.dtype))
        if qk_matmul_output_mode == 2:
            exposed = scores
        weights = scores
        if softmax_precision is not None:
            precision = dtype_of(softmax_precision)
            weights = widen(narrow(weights, precision))
        weights = softmax(weights, context=context)
        masked = _masked_rows(bias, allowed, m)
        if masked is not None:
            weights = m.where(masked, m.zeros_like(weights), weights)
        if softmax_precision is not None:
            weights = narrow(weights, precision)
        if qk_matmul_output_mode == 3:
            exposed = weights
        y = grouped_values(weights.astype(v.dtype), v)
    y = narrow(y, dtype)
    if packed:
        y = y.swapaxes(1, 2).reshape(batch, length, heads * v.shape[3])
    if n_outputs == 1:
        return y
    return y, present_key, present_value, narrow(exposed, dtype)


def _and(a: Any, b: Any) -> Any:
    if a is None or b is None:
        return b if a is None else a
    return a & b


def _attention_bias(mask: Any, total: int, dtype: Any, m: Any) -> tuple[Any, Any]:
    """(additive, boolean) of the mask input: one of the two is None."""
    if mask is None:
        return None, None
    boolean = mask.dtype == np.bool_
    missing = total - mask.shape[-1]
    if missing > 0:
        fill = np.asarray(False if boolean else -np.inf, mask.dtype)
        mask = m.pad(mask, [*((0, 0),) * (mask.ndim - 1), (0, missing)], constant_values=fill)
    return (None, mask) if boolean else (mask.astype(dtype), None)


def _frontier(m: Any, before: int, valid: Any, length: int, total: int, causal: int, left: int, right: int) -> Any:
    """Which keys each query may see by causality and windows, or None: (length, total) or (batch, 1, length, total)."""
    if not causal and left < 0 and right < 0:
        return None
    offset: Any = before if valid is None else (valid - length).reshape(-1, 1, 1, 1)
    ahead = np.arange(total)[None, :] - np.arange(length)[:, None] - offset
    allowed = ahead <= 0 if causal else ahead <= right if right >= 0 else None
    if causal and right >= 0:
        allowed = ahead <= min(0, right)
    return _and(allowed, ahead >= -left if left >= 0 else None)


def _masked_rows(bias: Any, allowed: Any, m: Any) -> Any:
    """Which query rows have no key to attend, or None where there can't be one."""
    if bias is None and allowed is None:
        return None
    closed = None if bias is None else bias == -np.inf
    if allowed is not None:
        closed = ~allowed if closed is None else closed | ~allowed
    if closed is None or closed.shape[-1] == 0:
        return None
    return m.all(m.asarray(closed), axis=-1, keepdims=True)


@operator("FlexAttention", since_version=1, domain="ai.onnx.preview")
def flex_attention_1(
    Q: Any,
    K: Any,
    V: Any,
    /,
    *,
    prob_mod: Subgraph | None = None,
    scale: float | None = None,
    score_mod: Subgraph | None = None,
    softmax_precision: int | None = None,
    context: Context,
) -> Any:
    """Attention whose scores and probabilities pass through subgraphs; these see `softmax_precision`'s dtype."""
    if not Q.ndim == K.ndim == V.ndim == 4:
        raise ValueError(f"Q, K and V must have 4 dimensions, got {Q.shape}, {K.shape}, {V.shape}")
    if softmax_precision is not None and softmax_precision not in _SOFTMAX_TYPES:
        raise ValueError(f"softmax_precision {softmax_precision} is none of {_SOFTMAX_TYPES}")
    q, k, v = widen(Q), widen(K), widen(V)
    size = q.shape[3]
    precision = q.dtype if softmax_precision is None else dtype_of(softmax_precision)
    m = xp(Q, K, V)
    factor = m.asarray(scale if scale is not None else 1 / math.sqrt(size) if size else 1.0, q.dtype)

    def modify(values: Any, subgraph: Subgraph | None, name: str) -> Any:
        if subgraph is None:
            return values
        (changed,) = subgraph(values)
        if changed.shape != values.shape or changed.dtype != values.dtype:
            raise ValueError(
                f"{name} must keep shape and dtype, but made {changed.dtype}{tuple(changed.shape)} of "
                f"{values.dtype}{tuple(values.shape)}"
            )
        return changed

    with np.errstate(all="ignore"):
        scores = modify(narrow(grouped_scores(q, k) * factor, precision), score_mod, "score_mod")
        probabilities = narrow(softmax(widen(scores), context=context), precision)
        probabilities = modify(probabilities, prob_mod, "prob_mod")
        return narrow(grouped_values(probabilities.astype(v.dtype), v), Q.dtype)


# --- rotary -------------------------------------------------------------------------------------------------------------


def rotate(x: Any, cos: Any, sin: Any, interleaved: bool) -> Any:
    """Rotate pairs of the last axis: halves of it, or (`interleaved`) neighbours; cos and sin hold half its size."""
    m = xp(x, cos, sin)
    half = x.shape[-1] // 2
    first, second = (x[..., 0::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])
    real, imaginary = cos * first - sin * second, sin * first + cos * second
    if interleaved:
        return m.stack([real, imaginary], axis=-1).reshape(x.shape)
    return m.concatenate([real, imaginary], axis=-1)


@operator("RotaryEmbedding", since_version=23)
def rotary_embedding_23(
    X: Any,
    cos_cache: Any,
    sin_cache: Any,
    position_ids: Any = None,
    /,
    *,
    interleaved: int = 0,
    num_heads: int | None = None,
    rotary_embedding_dim: int = 0,
    context: Context,
) -> Any:
    """Rotate the first `rotary_embedding_dim` elements (0: all) of each head by the angle of its position.

    X is (batch, heads, length, size) or (batch, length, heads * size). With position_ids the caches have a row for each
    position, else one for each element of (batch, length).
    """
    if X.ndim not in (3, 4):
        raise ValueError(f"X must have 3 or 4 dimensions, got shape {X.shape}")
    x = X if X.ndim == 4 else split_heads(X, num_heads, "X")
    batch, _, length, size = x.shape
    width = rotary_embedding_dim or size
    m = xp(X, cos_cache, sin_cache, position_ids)
    if width > size or width % 2:
        raise ValueError(f"rotary_embedding_dim {width} must be even and at most the head size {size}")
    if position_ids is not None:
        if cos_cache.ndim != 2 or tuple(position_ids.shape) != (batch, length):
            raise ValueError(f"caches {cos_cache.shape} and position_ids {position_ids.shape} do not fit X {X.shape}")
        index, valid = context.bounded(position_ids, cos_cache.shape[0], input="position_ids", axis=0)
        caches = []
        for cache in (cos_cache, sin_cache):
            if is_host(cache, index):
                rows: Any = np.take(cache, index, axis=0)
            else:
                rows = jnp.take(jnp.asarray(cache), jnp.asarray(index), axis=0, mode="clip")
            caches.append(rows if valid is None else context.fill_invalid(rows, valid[..., None]))
        cos_cache, sin_cache = caches
    expected = (batch, length, width // 2)
    for name, cache in (("cos_cache", cos_cache), ("sin_cache", sin_cache)):
        if cache.ndim != 3 or np.broadcast_shapes(tuple(cache.shape), expected) != expected:
            raise ValueError(f"{name} has the shape {tuple(cache.shape)} here, expected {expected}")
    wide = widen(x)
    cos, sin = (widen(cache).astype(wide.dtype)[:, None] for cache in (cos_cache, sin_cache))
    turned = rotate(wide[..., :width], cos, sin, bool(interleaved))
    if width < size:
        turned = m.concatenate([turned, wide[..., width:]], axis=-1)
    if X.ndim == 3:
        turned = turned.swapaxes(1, 2).reshape(X.shape)
    return narrow(turned, X.dtype)


# --- linear -------------------------------------------------------------------------------------------------------------


@operator("LinearAttention", since_version=27, loops=True)
def linear_attention_27(
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
    update_rule: str = "gated_delta",
) -> tuple[Any, Any]:
    """Attention through a recurrent state (batch, heads, key size, value size), updated token by token.

    The state is kept in float32 (float64 for such inputs). `chunk_size` is a hint for other implementations.
    """
    if update_rule not in ("linear", "gated", "delta", "gated_delta"):
        raise ValueError(f"update_rule {update_rule!r} is none of linear, gated, delta, gated_delta")
    gated, delta = update_rule.startswith("gated"), update_rule.endswith("delta")
    for name, given, wanted in (("decay", decay, gated), ("beta", beta, delta)):
        if (given is not None) != wanted:
            raise ValueError(f"update_rule {update_rule!r} {'needs' if wanted else 'takes no'} {name}")
    m = xp(query, key, value, past_state, decay, beta)
    group = group_heads(q_num_heads, kv_num_heads)
    accumulate = wide_dtype(query.dtype)

    def by_time(x: Any, heads: int, name: str) -> Any:
        """(batch, time, heads * size) as (time, batch, heads, size)."""
        return m.moveaxis(split_heads(x.astype(accumulate), heads, name), 2, 0)

    q, k, v = (
        by_time(query, q_num_heads, "query"),
        by_time(key, kv_num_heads, "key"),
        by_time(value, kv_num_heads, "value"),
    )
    time, batch, _, size = q.shape
    width = v.shape[3]
    if k.shape[3] != size:
        raise ValueError(f"query and key heads have the sizes {size} and {k.shape[3]}")
    shape = (batch, kv_num_heads, size, width)
    if past_state is not None and tuple(past_state.shape) != shape:
        raise ValueError(f"past_state has shape {tuple(past_state.shape)}, expected {shape}")
    state = m.zeros(shape, accumulate) if past_state is None else m.asarray(past_state).astype(accumulate)
    inputs = [q.reshape(time, batch, kv_num_heads, group, size), k, v]
    if decay is not None:
        fade = by_time(decay, kv_num_heads, "decay")
        if fade.shape[3] not in (1, size):
            raise ValueError(f"decay of shape {tuple(decay.shape)} holds neither one value for each head nor {size}")
        inputs.append(m.exp(fade))
    if beta is not None:
        if beta.shape[2] not in (1, kv_num_heads):
            raise ValueError(f"beta of shape {tuple(beta.shape)} holds neither 1 nor {kv_num_heads} values")
        inputs.append(by_time(beta, beta.shape[2], "beta"))
    factor = m.asarray(scale if scale else 1 / math.sqrt(size) if size else 1.0, accumulate)

    def step(state: Any, now: Any) -> tuple[Any, Any]:
        q, k, v = now[:3]
        if gated:
            state = state * now[3][..., None]
        if delta:
            v = now[-1] * (v - m.matmul(k[..., None, :], state)[..., 0, :])
        state = state + k[..., :, None] * v[..., None, :]
        return state, m.matmul(q, state) * factor

    with np.errstate(all="ignore"):
        if m is np:
            outputs: Any = np.zeros((time, batch, kv_num_heads, group, width), accumulate)
            for t in range(time):
                state, outputs[t] = step(state, [x[t] for x in inputs])
        else:
            state, outputs = lax.scan(step, state, tuple(m.asarray(x) for x in inputs))
    output = m.moveaxis(outputs, 0, 1).reshape(batch, time, q_num_heads * width)
    return narrow(output, query.dtype), narrow(state, query.dtype if past_state is None else past_state.dtype)
