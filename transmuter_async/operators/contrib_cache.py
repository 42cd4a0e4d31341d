"""com.microsoft: attention of decoders over a key/value cache — GroupQueryAttention and SparseAttention.

Each entry `b` of a batch holds `T[b]` tokens after the step, of which `P[b]` were cached before. The lengths of single
entries may be values of the run; how many keys there are at most (`total_sequence_length`) is a shape and must be a host
value, which it is in exports: they take it from the shape of the attention mask.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import ml_dtypes
import numpy as np
from jax import lax

from transmuter_async.operators.context import Context
from transmuter_async.operators.contrib import rms_norm
from transmuter_async.operators.contrib_attention import angles, default_scale, merge_heads, rotate, split_heads
from transmuter_async.operators.numeric import narrow, widen
from transmuter_async.operators.registry import is_host, operator, xp

__all__ = ["grouped_attention"]

MICROSOFT = "com.microsoft"


def grouped_attention(
    q: Any, k: Any, v: Any, scale: Any, visible: Any, bias: Any, softcap: float, sink: Any
) -> tuple[Any, Any, Any]:
    """Attention in which several query heads share a key head; all wide.

    Args:
        q: `(B, N, S, h)`.
        k, v: `(B, Nk, T, h)`, N a multiple of Nk.
        visible: Boolean, broadcast against `(B, 1, S, T)`.
        bias: None or broadcast against `(B, N, S, T)`.
        softcap: 0, or the bound that tanh gives the scores.
        sink: None or `(N,)`: one more logit of each head, whose weight goes nowhere.

    Returns:
        `(B, N, S, h)`, the scores (0 where not visible) and the weights, both `(B, N, S, T)`.
    """
    m = xp(q, k, v, visible, bias, sink)
    batch, heads, length, size = q.shape
    groups = k.shape[1]
    if groups < 1 or heads % groups:
        raise ValueError(f"{heads} query heads are no multiple of {groups} key heads")
    keys = k.shape[2]
    grouped = (q * q.dtype.type(scale)).reshape(batch, groups, heads // groups * length, size)
    scores = m.matmul(grouped, m.swapaxes(k, -1, -2)).reshape(batch, heads, length, keys)
    if softcap:
        cap = scores.dtype.type(softcap)
        scores = cap * m.tanh(scores / cap)
    if bias is not None:
        scores = scores + bias.astype(scores.dtype)
    hidden = m.where(visible, scores, scores.dtype.type(-np.inf))
    if keys:
        top = hidden.max(-1, keepdims=True)
        low = scores.dtype.type(0) if sink is None else sink.reshape(-1, 1, 1)
        top = m.maximum(top, low) if sink is not None else m.where(top == -np.inf, m.zeros_like(top), top)
        powers = m.exp(hidden - top)
        total = powers.sum(-1, keepdims=True)
        total = total + m.exp(low - top) if sink is not None else m.where(total == 0, m.ones_like(total), total)
        weights = powers / total
    else:
        weights = hidden
    mixed = m.matmul(weights.reshape(batch, groups, heads // groups * length, keys), v)
    return mixed.reshape(batch, heads, length, v.shape[3]), m.where(visible, scores, m.zeros_like(scores)), weights


def _write(cache: Any, new: Any, start: Any) -> Any:
    """`cache` `(B, N, C, h)` with the rows `new` `(B, N, S, h)` from row `start[b]` on."""
    if is_host(cache, new, start):
        result = np.array(cache)
        for entry, row in enumerate(np.asarray(start).tolist()):
            fits = max(0, min(new.shape[2], cache.shape[2] - row))
            result[entry, :, row : row + fits] = new[entry, :, :fits]
        return result
    zero = np.int32(0)
    return jax.vmap(lambda into, rows, at: lax.dynamic_update_slice(into, rows, (zero, at, zero)))(
        jax.numpy.asarray(cache), jax.numpy.asarray(new), jax.numpy.asarray(start).astype(np.int32)
    )


def _room(past: Any, like: Any, capacity: int) -> Any:
    """The past with zeros behind it up to `capacity` rows."""
    m = xp(past, like)
    if past is None:
        return m.zeros((like.shape[0], like.shape[1], capacity, like.shape[3]), like.dtype)
    return m.pad(past, ((0, 0), (0, 0), (0, capacity - past.shape[2]), (0, 0)))


# --- quantised caches -------------------------------------------------------------------------------------------------


def _load(cache: Any, scale: Any, bits: int) -> Any:
    """A cache as wide floats."""
    if cache is None or scale is None:
        return None if cache is None else widen(cache)
    m = xp(cache, scale)
    if bits == 4:
        pair = m.stack([cache & np.uint8(15), cache >> np.uint8(4)], axis=-1)
        codes = pair.reshape(*cache.shape[:-1], 2 * cache.shape[-1]).astype(np.float32) - np.float32(8)
    else:
        codes = cache.astype(np.float32)
    return codes * _scale(scale, codes)


def _scale(scale: Any, like: Any) -> Any:
    if scale.size == 1:
        return scale.reshape(())
    return scale.reshape(1, like.shape[1], 1, like.shape[3])


def _store(values: Any, scale: Any, bits: int, dtype: Any) -> Any:
    """Wide floats in the dtype of the cache."""
    if scale is None:
        return narrow(values, dtype)
    m = xp(values, scale)
    scaled = values / _scale(scale, values)
    if np.dtype(dtype) == ml_dtypes.float8_e4m3fn:
        return m.clip(scaled, np.float32(-448), np.float32(448)).astype(dtype)
    low, high = (-8, 7) if bits == 4 else (-128, 127)
    codes = m.clip(m.round(scaled), np.float32(low), np.float32(high))
    if bits != 4:
        return codes.astype(dtype)
    nibbles = (codes + np.float32(8)).astype(np.uint8)
    return nibbles[..., 0::2] | (nibbles[..., 1::2] << np.uint8(4))


# --- group query attention --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Step:
    """Where the tokens of a step stand. `(B,)` arrays: tokens after the step, and cached before it."""

    total: Any
    past: Any
    length: int
    longest: int

    @property
    def positions(self) -> Any:
        """`(B, S)` absolute positions of the new tokens."""
        return self.past[:, None] + np.arange(self.length)


def _step(seqlens_k: Any, total_sequence_length: Any, query_seqlens: Any, length: int, context: Context) -> _Step:
    longest = int(context.needs(total_sequence_length, 6, "the length of the cache").reshape(-1)[0])
    ends, _ = context.bounded(seqlens_k.reshape(-1), longest, input="seqlens_k", axis=None)
    total = ends.astype(np.int64) + 1
    m = xp(total, query_seqlens)
    fresh = m.minimum(total, length) if query_seqlens is None else query_seqlens.astype(np.int64)
    return _Step(total, total - fresh, length, longest)


@operator("GroupQueryAttention", since_version=1, domain=MICROSOFT)
def group_query_attention_1(
    query: Any,
    key: Any,
    value: Any,
    past_key: Any,
    past_value: Any,
    seqlens_k: Any,
    total_sequence_length: Any,
    cos_cache: Any = None,
    sin_cache: Any = None,
    position_ids: Any = None,
    attention_bias: Any = None,
    head_sink: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    q_norm_weight: Any = None,
    k_norm_weight: Any = None,
    query_seqlens: Any = None,
    /,
    *,
    causal: int = 1,
    do_rotary: int | None = None,
    k_norm_epsilon: float | None = None,
    k_quant_type: str = "NONE",
    kv_cache_bit_width: int | None = None,
    kv_num_heads: int,
    local_window_size: int = -1,
    num_heads: int,
    q_norm_epsilon: float | None = None,
    qk_norm_epsilon: float = 9.999999974752427e-07,
    qk_output: int = 0,
    rotary_interleaved: int | None = None,
    scale: float | None = None,
    sliding_window_cache: int = 0,
    smooth_softmax: int = -1,
    softcap: float | None = None,
    v_quant_type: str = "NONE",
    context: Context,
) -> tuple[Any, Any, Any, Any]:
    """Attention of LLM decoders: `(output, present_key, present_value, scores or weights)`.

    Rows of the present caches beyond the tokens of an entry are not defined; here they keep what the past had, else 0.
    A quantised cache is read back as it was stored, also for the tokens of the step.
    """
    q, k, v = _split_qkv(query, key, value, num_heads, kv_num_heads)
    batch, _, length, size = q.shape
    at = _step(seqlens_k, total_sequence_length, query_seqlens, length, context)
    if q_norm_weight is not None:
        first = qk_norm_epsilon if q_norm_epsilon is None else q_norm_epsilon
        second = qk_norm_epsilon if k_norm_epsilon is None else k_norm_epsilon
        q, _ = rms_norm(q, q_norm_weight, first, context.platform)
        k, _ = rms_norm(k, k_norm_weight, second, context.platform)
    if do_rotary:
        if cos_cache is None or sin_cache is None:
            raise context.error("do_rotary needs cos_cache and sin_cache")
        if position_ids is None:
            places = at.positions
        elif query_seqlens is None and at.longest == length and position_ids.size:
            # The schema: of a first prompt only the very first element is used.
            places = position_ids.reshape(-1)[0].astype(np.int64) + np.arange(length)
            places = xp(places).broadcast_to(places, (batch, length))
        else:
            places = position_ids.reshape(batch, length)
        cos, sin = (part[:, None] for part in angles(cos_cache, sin_cache, places, context))
        q, k = (rotate(x, cos, sin, rotary_interleaved or 0) for x in (q, k))

    bits = kv_cache_bit_width or 8
    dtype = query.dtype if past_key is None else past_key.dtype
    k_by = k_scale if k_quant_type != "NONE" else None
    v_by = v_scale if v_quant_type != "NONE" else None
    if k_by is not None:
        k, v = _load(_store(k, k_by, bits, dtype), k_by, bits), _load(_store(v, v_by, bits, dtype), v_by, bits)
    window = local_window_size if causal and local_window_size > 0 else 0
    old_k, old_v = _load(past_key, k_by, bits), _load(past_value, v_by, bits)
    if sliding_window_cache:
        if not window or old_k is None or old_k.shape[2] < window:
            raise context.error("sliding_window_cache needs a past at least as long as local_window_size")
        keys, values, places, (present_k, present_v) = _sliding(old_k, old_v, k, v, at, window)
    else:
        present_k, present_v, places = _grow(old_k, old_v, k, v, at)
        keys, values = present_k[:, :, : at.longest], present_v[:, :, : at.longest]
    visible = _visible(places, at, causal, window)
    bias = None if attention_bias is None else widen(attention_bias)
    if bias is not None and sliding_window_cache:
        columns = xp(bias, places).clip(places, 0, at.longest - 1)[:, None, None, :]
        bias = xp(bias, places).take_along_axis(xp(bias).broadcast_to(bias, (batch, *bias.shape[1:])), columns, axis=3)
    sink = None
    if head_sink is not None or smooth_softmax == 1:
        sink = np.zeros(num_heads, np.float32) if head_sink is None else widen(head_sink)
    y, scores, weights = grouped_attention(
        q, keys, values, default_scale(scale, size), visible, bias, softcap or 0.0, sink
    )
    shown = None
    if qk_output:
        shown = narrow(weights if qk_output == 2 else scores, query.dtype)
    return (
        narrow(merge_heads(y), query.dtype),
        _store(present_k, k_by, bits, dtype),
        _store(present_v, v_by, bits, dtype),
        shown,
    )


def _split_qkv(query: Any, key: Any, value: Any, heads: int, groups: int) -> tuple[Any, Any, Any]:
    """Wide `(B, heads, S, h)` of the separate or packed projections."""
    q = widen(query)
    if key is not None:
        return split_heads(q, heads), split_heads(widen(key), groups), split_heads(widen(value), groups)
    if q.shape[2] % (heads + 2 * groups):
        raise ValueError(f"a packed width of {q.shape[2]} does not fall into {heads} + 2 x {groups} heads")
    size = q.shape[2] // (heads + 2 * groups)
    parts = q[..., : heads * size], q[..., heads * size : (heads + groups) * size], q[..., (heads + groups) * size :]
    return split_heads(parts[0], heads), split_heads(parts[1], groups), split_heads(parts[2], groups)


def _grow(old_k: Any, old_v: Any, k: Any, v: Any, at: _Step) -> tuple[Any, Any, Any]:
    """The caches with the new tokens behind those of each entry, and the positions `(1, T)` of their rows."""
    capacity = max(0 if old_k is None else old_k.shape[2], at.longest)
    # A padded chunk may reach behind the cache; its padding falls off again.
    rows = capacity if at.length >= at.longest else max(capacity, at.longest + at.length - 1)
    if at.length == at.longest:  # the first prompt: nothing is cached yet
        start = np.zeros(k.shape[0], np.int64)
    else:
        start = at.past
    present = (_write(_room(old, new, rows), new, start)[:, :, :capacity] for old, new in ((old_k, k), (old_v, v)))
    return (*present, np.arange(at.longest)[None])


def _visible(places: Any, at: _Step, causal: int, window: int) -> Any:
    """`(B, 1, S, T)`: which of the keys at `places` (absolute, negative: none) each query sees."""
    keys = places[:, None, None, :]
    if not causal:
        return (keys >= 0) & (keys < at.total[:, None, None, None])
    own = at.positions[:, None, :, None]
    seen = (keys >= 0) & (keys <= own)
    return seen & (keys > own - window) if window else seen


def _resident(total: Any, capacity: int, window: int) -> Any:
    """How many of `total` tokens a sliding cache holds: all that fit, then evicted a whole slack at a time."""
    m = xp(total)
    slack = capacity - window + 1
    over = m.maximum(total - capacity, 0)
    return total - slack * ((over + slack - 1) // slack)


def _sliding(old_k: Any, old_v: Any, k: Any, v: Any, at: _Step, window: int) -> tuple[Any, Any, Any, tuple[Any, Any]]:
    """Keys and values of past and step side by side, their positions `(B, C + S)`, and the cache after the step."""
    m = xp(old_k, k, at.total)
    capacity = old_k.shape[2]
    held = _resident(at.past, capacity, window)[:, None]
    row = np.arange(capacity)
    before = m.where(row < held, at.past[:, None] - held + row, -1)
    fresh = m.where(np.arange(at.length) < (at.total - at.past)[:, None], at.positions, -1)
    places = m.concatenate([before, fresh], axis=1)
    keys, values = m.concatenate([old_k, k], axis=2), m.concatenate([old_v, v], axis=2)
    kept = _resident(at.total, capacity, window)[:, None]
    position = at.total[:, None] - kept + row
    source = m.where(
        position < at.past[:, None], position - (at.past[:, None] - held), capacity + position - at.past[:, None]
    )
    source = m.clip(source, 0, keys.shape[2] - 1)[:, None, :, None]
    stay = (at.total == at.past)[:, None, None, None]
    present = tuple(
        m.where(stay, both[:, :, :capacity], m.take_along_axis(both, source, axis=2)) for both in (keys, values)
    )
    return keys, values, places, (present[0], present[1])


# --- block-sparse attention -------------------------------------------------------------------------------------------


@operator("SparseAttention", since_version=1, domain=MICROSOFT)
def sparse_attention_1(
    query: Any,
    key: Any,
    value: Any,
    past_key: Any,
    past_value: Any,
    block_row_indices: Any,
    block_col_indices: Any,
    total_sequence_length: Any,
    key_total_sequence_lengths: Any,
    cos_cache: Any = None,
    sin_cache: Any = None,
    /,
    *,
    do_rotary: int | None = None,
    kv_num_heads: int,
    num_heads: int,
    rotary_interleaved: int | None = None,
    scale: float | None = None,
    sparse_block_size: int,
    context: Context,
) -> tuple[Any, Any, Any]:
    """Causal attention over a cache in which a head only sees the blocks of its layout; layouts repeat over the heads.

    Entries of different lengths are each masked by their own (onnxruntime's CPU kernel mixes them up, down to NaN).
    """
    q, k, v = _split_qkv(query, key, value, num_heads, kv_num_heads)
    length, size = q.shape[2:]
    longest = int(context.needs(total_sequence_length, 7, "the length of the cache").reshape(-1)[0])
    ends, _ = context.bounded(
        key_total_sequence_lengths, longest, input="key_total_sequence_lengths", axis=None, inclusive=True
    )
    total = ends.astype(np.int64)
    at = _Step(total, xp(total).maximum(total - length, 0), length, longest)
    if do_rotary:
        if cos_cache is None or sin_cache is None:
            raise context.error("do_rotary needs cos_cache and sin_cache")
        cos, sin = (part[:, None] for part in angles(cos_cache, sin_cache, at.positions, context))
        q, k = (rotate(x, cos, sin, rotary_interleaved or 0) for x in (q, k))
    present_k, present_v, places = _grow(widen(past_key), widen(past_value), k, v, at)
    blocks = _block_mask(block_row_indices, block_col_indices)
    m = xp(blocks, total)
    layouts = blocks.shape[0]
    if num_heads % layouts:
        raise context.error(f"{num_heads} heads are no multiple of {layouts} layouts")
    rows = m.clip(at.positions // sparse_block_size, 0, blocks.shape[1] - 1)
    columns = np.minimum(np.arange(longest) // sparse_block_size, blocks.shape[1] - 1)
    by_layout = blocks[:, rows][..., columns]  # layouts, B, S, T
    by_head = m.swapaxes(m.concatenate([by_layout] * (num_heads // layouts)), 0, 1)
    visible = _visible(places, at, 1, 0) & by_head
    y, _, _ = grouped_attention(
        q,
        present_k[:, :, :longest],
        present_v[:, :, :longest],
        default_scale(scale, size),
        visible,
        None,
        0.0,
        None,
    )
    dtype = query.dtype
    return narrow(merge_heads(y), dtype), narrow(present_k, dtype), narrow(present_v, dtype)


def _block_mask(row_indices: Any, col_indices: Any) -> Any:
    """`(layouts, blocks, blocks)` boolean out of the CSR form; entries behind the last row are padding."""
    m = xp(row_indices, col_indices)
    entry = np.arange(col_indices.shape[1], dtype=row_indices.dtype)
    inside = (row_indices[:, :-1, None] <= entry) & (entry < row_indices[:, 1:, None])
    hits = col_indices[:, :, None] == np.arange(row_indices.shape[1] - 1, dtype=col_indices.dtype)
    return m.matmul(inside.astype(np.float32), hits.astype(np.float32)) > 0
