"""com.microsoft: PagedAttention, attention over a key/value cache in blocks. It has no CPU kernel in onnxruntime."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from transmuter_async.operators.context import Context
from transmuter_async.operators.contrib import rms_norm
from transmuter_async.operators.contrib_attention import angles, default_scale, rotate
from transmuter_async.operators.contrib_cache import grouped_attention
from transmuter_async.operators.numeric import narrow, widen
from transmuter_async.operators.registry import operator, xp

MICROSOFT = "com.microsoft"
OWN = {"", "float16", "bfloat16", "int8", "float8e4m3fn"}
"""Logical types of a cache that are the type of its tensor."""


def _heads(x: Any, count: int) -> Any:
    """`(tokens, count, size)` in float32."""
    if x.shape[1] % count:
        raise ValueError(f"a width of {x.shape[1]} does not fall into {count} heads")
    return widen(x).reshape(x.shape[0], count, x.shape[1] // count)


def _by(scale: Any, kind: str, what: str) -> Any:
    """The scale of a cache, broadcast against `(slots, heads, size)`; None where the cache holds plain floats."""
    if (scale is None) != (kind == "NONE"):
        raise ValueError(
            f"{what}_quant_type is {kind!r}, which does not go with {what}_scale being {'left out' if scale is None else 'given'}"
        )
    return None if scale is None else scale.reshape(scale.shape[0], scale.shape[-1]) if scale.ndim == 3 else scale


def _read(cache: Any, by: Any) -> Any:
    wide = cache.astype(np.float32)
    return wide if by is None else wide * by


def _stored(rows: Any, by: Any, dtype: Any) -> Any:
    """Rows in the dtype of the cache, rounded and saturated where it is quantised."""
    if by is None:
        return narrow(rows, dtype)
    m, scaled = xp(rows, by), rows / by
    if np.dtype(dtype) == ml_dtypes.float8_e4m3fn:
        return m.clip(scaled, np.float32(-448), np.float32(448)).astype(dtype)
    return m.clip(m.round(scaled), np.float32(-128), np.float32(127)).astype(dtype)


def _write(flat: Any, rows: Any, slots: Any) -> Any:
    """`flat` `(slots, heads, size)` with each row at its slot; a slot that there is not takes none."""
    m, count = xp(flat, rows, slots), flat.shape[0]
    if m is np:
        held, result = (slots >= 0) & (slots < count), np.array(flat)
        result[slots[held]] = rows[held]
        return result
    return m.asarray(flat).at[m.where((slots < 0) | (slots >= count), count, slots)].set(rows, mode="drop")


@operator("PagedAttention", since_version=1, domain=MICROSOFT)
def paged_attention_1(
    query: Any,
    key: Any,
    value: Any,
    key_cache: Any,
    value_cache: Any,
    cumulative_sequence_length: Any,
    past_seqlens: Any,
    block_table: Any,
    cos_cache: Any = None,
    sin_cache: Any = None,
    slot_mapping: Any = None,
    head_sink: Any = None,
    q_norm_weight: Any = None,
    k_norm_weight: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    attention_metadata: Any = None,
    /,
    *,
    do_rotary: int | None = None,
    is_causal: int = 1,
    k_cache_dtype: str = "",
    k_quant_type: str = "NONE",
    kv_cache_layout: str = "SEPARATE",
    kv_num_heads: int,
    local_window_size: int = -1,
    num_heads: int,
    qk_norm_epsilon: float | None = None,
    rotary_interleaved: int | None = None,
    rotary_offset: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    v_cache_dtype: str = "",
    v_head_size: int | None = None,
    v_quant_type: str = "NONE",
    context: Context,
) -> tuple[Any, Any, Any]:
    """Attention of packed tokens `(tokens, hidden)` over caches `(blocks, block_size, heads, size)`: output and both caches.

    Each token sees the blocks that `block_table` gives its sequence; what is unmapped (negative) is not seen. Caches of 4-bit
    types are refused. `attention_metadata` holds bounds for kernels and changes nothing.
    """
    latent = kv_cache_layout == "LATENT"
    if kv_cache_layout not in ("SEPARATE", "LATENT"):
        raise ValueError(f"kv_cache_layout {kv_cache_layout!r} is neither SEPARATE nor LATENT")
    if latent != (value_cache is None) or (latent and (value is not None or kv_num_heads != 1)):
        raise ValueError("the LATENT layout has one cache of one head and no value; SEPARATE has two caches")
    if not {k_cache_dtype, v_cache_dtype} <= OWN or np.uint8 in (
        key_cache.dtype,
        *(() if latent else (value_cache.dtype,)),
    ):
        raise context.error(
            f"caches of {k_cache_dtype or 'uint8'} (two values a byte) are not supported; give int8 or a float"
        )
    tokens, dtype = query.shape[0], query.dtype
    q, k, v = _parts(query, key, value, num_heads, kv_num_heads, latent)
    if q_norm_weight is not None:
        epsilon = 1e-6 if qk_norm_epsilon is None else qk_norm_epsilon
        q, _ = rms_norm(q, q_norm_weight, epsilon, context.platform)
        k, _ = rms_norm(k, k_norm_weight, epsilon, context.platform)
    m = xp(q, cumulative_sequence_length, past_seqlens, block_table, key_cache, slot_mapping)
    edges = cumulative_sequence_length.astype(np.int64)
    past = past_seqlens.astype(np.int64)
    sequences, block = block_table.shape[0], key_cache.shape[1]
    if not tokens or not sequences or not block:
        width = num_heads * (v_head_size or q.shape[2])
        return m.zeros((tokens, width), dtype), m.asarray(key_cache), None if latent else m.asarray(value_cache)
    token = np.arange(tokens)
    owner = m.minimum((token[:, None] >= edges[1:]).sum(1), sequences - 1)
    positions = m.take(past, owner, mode="clip") + token - m.take(edges, owner, mode="clip")
    if do_rotary:
        if cos_cache is None or sin_cache is None:
            raise context.error("do_rotary needs cos_cache and sin_cache")
        cos, sin = (part[:, None] for part in angles(cos_cache, sin_cache, positions, context, "past_seqlens"))
        start = rotary_offset or 0
        q, k = (
            m.concatenate([x[..., :start], rotate(x[..., start:], cos, sin, rotary_interleaved or 0)], axis=-1)
            for x in (q, k)
        )
    place = np.arange(block_table.shape[1] * block)
    pages = m.repeat(block_table.astype(np.int64), block, axis=1)  # of each place of each sequence
    count = key_cache.shape[0]
    mapped = (pages >= 0) & (pages < count)
    slots = m.where(mapped, pages * block + place % block, -1)
    if slot_mapping is None:
        fits = (positions >= 0) & (positions < len(place))
        found = slots[owner, m.clip(positions, 0, max(0, len(place) - 1))]
        target = m.where(fits, found, -1)
    else:
        target = slot_mapping.astype(np.int64)
    k_by, v_by = _by(k_scale, k_quant_type, "k"), _by(v_scale, v_quant_type, "v")
    flat_k = _write(key_cache.reshape(-1, *key_cache.shape[2:]), _stored(k, k_by, key_cache.dtype), target)
    seen = m.where(mapped, slots, 0)[owner]  # (tokens, places)
    keys = _read(flat_k[seen], k_by)
    if latent:
        flat_v, values = None, keys[..., : v_head_size or keys.shape[-1]]
    else:
        flat_v = _write(value_cache.reshape(-1, *value_cache.shape[2:]), _stored(v, v_by, value_cache.dtype), target)
        values = _read(flat_v[seen], v_by)
    total = past + edges[1:] - edges[:-1]
    visible = mapped[owner] & (place < m.take(total, owner, mode="clip")[:, None])
    if is_causal:
        visible = visible & (place <= positions[:, None])
    if local_window_size > 0:
        visible = visible & (place > positions[:, None] - local_window_size)
    sink = None if head_sink is None else widen(head_sink)
    factor = default_scale(scale, q.shape[2])
    keys, values = (m.swapaxes(x, 1, 2) for x in (keys, values))
    y, _, _ = grouped_attention(q[:, :, None], keys, values, factor, visible[:, None, None], None, softcap or 0.0, sink)
    y = narrow(y.reshape(tokens, num_heads * values.shape[-1]), dtype)
    return y, flat_k.reshape(key_cache.shape), None if flat_v is None else flat_v.reshape(value_cache.shape)


def _parts(query: Any, key: Any, value: Any, heads: int, groups: int, latent: bool) -> tuple[Any, Any, Any]:
    """Query, key and value by head, out of three tensors or of a packed one; no value in the latent layout."""
    if key is not None:
        return _heads(query, heads), _heads(key, groups), None if latent else _heads(value, groups)
    packed = _heads(query, heads + (1 if latent else 2) * groups)
    return packed[:, :heads], packed[:, heads : heads + groups], None if latent else packed[:, heads + groups :]
