"""com.microsoft: attention with merged projections, multi-head attention, rotary embeddings.

All of them end in `attend`, which computes in float32 (float64 for doubles) whatever the dtype of the inputs. Masks are
additive, as in onnxruntime: a masked position gets `mask_filter_value`, so that a row in which everything is masked
still is a softmax of its scores; a position in the future is out altogether.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from transmuter_async.operators.context import Context
from transmuter_async.operators.numeric import device_index, narrow, softmax, widen
from transmuter_async.operators.registry import operator, xp

__all__ = [
    "additive_mask",
    "append_cache",
    "attend",
    "causal_mask",
    "default_scale",
    "merge_heads",
    "rotate",
    "split_heads",
]

MICROSOFT = "com.microsoft"
FILTER = -10000.0
OUT = np.finfo(np.float32).min


def split_heads(x: Any, heads: int) -> Any:
    """`(B, S, heads * size)` to `(B, heads, S, size)`."""
    batch, length, hidden = x.shape
    if heads < 1 or hidden % heads:
        raise ValueError(f"a hidden size of {hidden} does not fall into {heads} heads")
    return xp(x).transpose(x.reshape(batch, length, heads, hidden // heads), (0, 2, 1, 3))


def merge_heads(x: Any) -> Any:
    """`(B, heads, S, size)` to `(B, S, heads * size)`."""
    batch, heads, length, size = x.shape
    return xp(x).transpose(x, (0, 2, 1, 3)).reshape(batch, length, heads * size)


def default_scale(scale: float | None, size: int) -> np.float32:
    """The attribute `scale`, or 1 / sqrt(head size) where it is left out or 0."""
    return np.float32(scale if scale else 1 / np.sqrt(max(1, size)))


def attend(q: Any, k: Any, v: Any, scale: Any, *biases: Any, context: Context | None = None) -> tuple[Any, Any, Any]:
    """Scaled dot-product attention of wide `(B, N, S, h)`, `(B, N, T, h)`, `(B, N, T, hv)`.

    Returns:
        `(B, N, S, hv)`, the biased scores and their softmax, both `(B, N, S, T)`.
    """
    m = xp(q, k, v)
    scores = m.matmul(q * q.dtype.type(scale), m.swapaxes(k, -1, -2))
    for bias in biases:
        if bias is not None:
            scores = scores + bias.astype(scores.dtype)
    weights = softmax(scores, context=context)
    return m.matmul(weights, v), scores, weights


def causal_mask(queries: int, keys: int, before: int) -> np.ndarray:
    """`(queries, keys)` of 0, and the lowest float32 where a key lies in the future of a query, `before` keys being past."""
    future = np.arange(keys) > np.arange(queries)[:, None] + before
    return np.where(future, OUT, np.float32(0))


def additive_mask(
    mask: Any, batch: int, queries: int, keys: int, filter_value: float, context: Context, name: str
) -> Any:
    """One of the forms of a padding mask as an additive `(B, 1, S or 1, T)`.

    `(B,)`: lengths. `(2 B,)`: ends, then starts. `(B, T)` and `(B, S, T)`: 0 is masked. `(B, 1, M, M)`: the same for
    the longest sequences, of which the last S rows before T count.
    """
    if mask is None:
        return None
    m = xp(mask)
    place = np.arange(keys, dtype=mask.dtype)
    if mask.ndim == 1 and mask.shape[0] == batch:
        live = place < mask[:, None]
    elif mask.ndim == 1 and mask.shape[0] == 2 * batch:
        live = (place < mask[:batch, None]) & (place >= mask[batch:, None])
    elif mask.ndim == 1 and mask.shape[0] == 3 * batch + 2:
        live = place < mask[:batch, None]
    elif mask.ndim == 2 and mask.shape[0] == batch and mask.shape[1] <= keys:
        # Shorter than all keys: it speaks of the new ones, and what is cached counts.
        live = m.concatenate([m.ones((batch, keys - mask.shape[1]), bool), mask > 0], axis=1)
    elif mask.ndim == 3 and mask.shape == (batch, queries, keys):
        live = mask > 0
    elif mask.ndim == 4 and mask.shape[:2] == (batch, 1) and mask.shape[2] >= keys and mask.shape[3] >= keys:
        live = mask[:, 0, keys - queries : keys, :keys] > 0
    else:
        raise context.error(
            f"{name} has shape {tuple(mask.shape)}, which fits none of the forms for batch {batch}, "
            f"{queries} queries and {keys} keys"
        )
    live = live[:, None, :] if live.ndim == 2 else live
    return m.where(live, np.float32(0), np.float32(filter_value))[:, None]


def append_cache(past: Any, new: Any, length: Any, shared: bool, context: Context, index: int) -> tuple[Any, Any]:
    """`(present, keys)`: the cache `(B, N, P, h)` with `new` behind it, and the part of it to attend to.

    With a shared buffer the cache has room for the longest sequence and `length` rows of it are filled; it must be a
    host value, since it decides how many keys there are.
    """
    m = xp(past, new)
    if past is None:
        return new, new
    if not shared:
        both = m.concatenate([past, new], axis=2)
        return both, both
    if length is None:
        raise context.error("past_present_share_buffer needs past_sequence_length")
    filled = int(context.needs(length, index, "the number of cached tokens").reshape(-1)[0])
    end = filled + new.shape[2]
    if end > past.shape[2]:
        raise context.error(f"{end} tokens do not fit a cache for {past.shape[2]}")
    present = m.concatenate([past[:, :, :filled], new, past[:, :, end:]], axis=2)
    return present, present[:, :, :end]


# --- attention with merged projections --------------------------------------------------------------------------------


def projected(
    q: Any, k: Any, v: Any, dtype: Any, *, mask: Any, past: Any, bias: Any, past_length: Any, attributes: dict[str, Any]
) -> tuple[Any, Any]:
    """What Attention and QAttention do after their projection: `(output, present)` from wide `(B, N, S, h)`."""
    context: Context = attributes["context"]
    m = xp(q, k, v, past, mask)
    shared = bool(attributes["past_present_share_buffer"])
    past_k, past_v = (None, None) if past is None else (widen(past[0]), widen(past[1]))
    present_k, k = append_cache(past_k, k, past_length, shared, context, 6)
    present_v, v = append_cache(past_v, v, past_length, shared, context, 6)
    queries, keys = q.shape[2], k.shape[2]
    value = attributes["mask_filter_value"]
    padding = additive_mask(mask, q.shape[0], queries, keys, FILTER if value is None else value, context, "mask_index")
    if attributes["unidirectional"]:
        causal = causal_mask(queries, keys, keys - queries)
        padding = causal if padding is None else m.where(causal < 0, OUT, padding)
    scale = default_scale(attributes["scale"], q.shape[3])
    y, _, _ = attend(q, k, v, scale, padding, None if bias is None else widen(bias), context=context)
    present = m.stack([present_k, present_v]) if present_k.shape == present_v.shape else None
    return narrow(merge_heads(y), dtype), None if present is None else narrow(present, dtype)


@operator("Attention", since_version=1, domain=MICROSOFT)
def attention_1(
    input: Any,
    weights: Any,
    bias: Any = None,
    mask_index: Any = None,
    past: Any = None,
    attention_bias: Any = None,
    past_sequence_length: Any = None,
    /,
    *,
    do_rotary: int | None = None,
    mask_filter_value: float | None = None,
    num_heads: int,
    past_present_share_buffer: int | None = None,
    qkv_hidden_sizes: tuple[int, ...] | None = None,
    rotary_embedding_dim: int | None = None,
    scale: float | None = None,
    unidirectional: int = 0,
    context: Context,
) -> tuple[Any, Any]:
    """Self-attention with its projection: BERT, ViT and GPT-2 after onnxruntime's optimiser.

    `do_rotary` is refused, as onnxruntime's CPU kernel does: the operator has no angles to rotate by.
    """
    if do_rotary:
        raise context.error("do_rotary is not supported: the operator has no cosine and sine caches")
    q, k, v = split_projection(
        xp(input, weights).matmul(widen(input), widen(weights)), bias, qkv_hidden_sizes, num_heads
    )
    attributes = {
        "context": context,
        "mask_filter_value": mask_filter_value,
        "past_present_share_buffer": past_present_share_buffer,
        "scale": scale,
        "unidirectional": unidirectional,
    }
    return projected(
        q,
        k,
        v,
        input.dtype,
        mask=mask_index,
        past=past,
        bias=attention_bias,
        past_length=past_sequence_length,
        attributes=attributes,
    )


def split_projection(qkv: Any, bias: Any, sizes: tuple[int, ...] | None, heads: int) -> tuple[Any, Any, Any]:
    """Wide `(B, S, q + k + v)` plus its bias as three `(B, heads, S, size)`."""
    if bias is not None:
        qkv = qkv + widen(bias)
    if not sizes:
        if qkv.shape[-1] % 3:
            raise ValueError(f"the projection has {qkv.shape[-1]} columns, which is not a multiple of 3")
        sizes = (qkv.shape[-1] // 3,) * 3
    if sum(sizes) != qkv.shape[-1] or sizes[0] != sizes[1]:
        raise ValueError(f"qkv_hidden_sizes {tuple(sizes)} do not fit a projection with {qkv.shape[-1]} columns")
    ends = np.cumsum((0, *sizes))
    q, k, v = (split_heads(qkv[..., a:b], heads) for a, b in zip(ends, ends[1:], strict=False))
    return q, k, v


# --- multi-head attention ---------------------------------------------------------------------------------------------


def _packed_parts(query: Any, key: Any, value: Any, bias: Any, heads: int) -> tuple[Any, Any, Any, bool]:
    """Wide `(B, N, S, h)` of query, key, value out of the forms they come in; whether key and value are the cache."""
    m = xp(query, key, value)
    if query.ndim == 5:
        q, k, v = (m.swapaxes(widen(query[:, :, :, part]), 1, 2) for part in range(3))
    elif key is None:
        raise ValueError(f"key is left out, but query has shape {tuple(query.shape)} and not the packed one of rank 5")
    else:
        q = split_heads(widen(query), heads)
        if key.ndim == 5:
            k, v = (m.swapaxes(widen(key[:, :, :, part]), 1, 2) for part in range(2))
        elif key.ndim == 4:
            k, v = widen(key), widen(value)
        else:
            k, v = split_heads(widen(key), heads), split_heads(widen(value), heads)
    cached = query.ndim != 5 and key.ndim == 4
    if bias is not None:
        sizes = (q.shape[1] * q.shape[3], k.shape[1] * k.shape[3], v.shape[1] * v.shape[3])
        given: tuple[int, ...] = sizes
        if cached:
            given = sizes if bias.shape[0] == sum(sizes) else sizes[:1]
        ends = np.cumsum((0, *given))
        rows = [widen(bias)[a:b].reshape(1, heads, 1, -1) for a, b in zip(ends, ends[1:], strict=False)]
        q = q + rows[0]
        if not cached:
            k, v = k + rows[1], v + rows[2]
    return q, k, v, cached


@operator("MultiHeadAttention", since_version=1, domain=MICROSOFT)
def multi_head_attention_1(
    query: Any,
    key: Any = None,
    value: Any = None,
    bias: Any = None,
    key_padding_mask: Any = None,
    attention_bias: Any = None,
    past_key: Any = None,
    past_value: Any = None,
    past_sequence_length: Any = None,
    cache_indirection: Any = None,
    /,
    *,
    mask_filter_value: float | None = None,
    num_heads: int,
    scale: float | None = None,
    unidirectional: int = 0,
    context: Context,
) -> tuple[Any, Any, Any, Any]:
    """Self- or cross-attention over projected inputs: `(output, present_key, present_value, scores)`.

    `unidirectional`: a query sees the keys up to its own place, counted from the end of the past (onnxruntime lets the last
    query see all keys where there are more of them). `cache_indirection` belongs to DecoderMaskedMultiHeadAttention and
    is refused here, as in onnxruntime.
    """
    if cache_indirection is not None:
        raise context.error("cache_indirection needs DecoderMaskedMultiHeadAttention")
    m = xp(query, key, value, past_key)
    q, k, v, cached = _packed_parts(query, key, value, bias, num_heads)
    shared = past_sequence_length is not None
    present_k, k = append_cache(
        None if past_key is None or cached else widen(past_key), k, past_sequence_length, shared, context, 8
    )
    present_v, v = append_cache(
        None if past_value is None or cached else widen(past_value), v, past_sequence_length, shared, context, 8
    )
    queries, keys = q.shape[2], k.shape[2]
    padding = additive_mask(
        key_padding_mask,
        q.shape[0],
        queries,
        keys,
        FILTER if mask_filter_value is None else mask_filter_value,
        context,
        "key_padding_mask",
    )
    if unidirectional:
        causal = causal_mask(queries, keys, 0 if past_key is None or cached else keys - queries)
        padding = causal if padding is None else m.where(causal < 0, OUT, padding)
    added = None if attention_bias is None else widen(attention_bias)
    y, scores, _ = attend(q, k, v, default_scale(scale, q.shape[3]), padding, added, context=context)
    dtype = query.dtype
    return narrow(merge_heads(y), dtype), narrow(present_k, dtype), narrow(present_v, dtype), narrow(scores, dtype)


@operator("DecoderMaskedMultiHeadAttention", since_version=1, domain=MICROSOFT)
def decoder_masked_multi_head_attention_1(
    query: Any,
    key: Any = None,
    value: Any = None,
    mask_index: Any = None,
    attention_bias: Any = None,
    past_key: Any = None,
    past_value: Any = None,
    past_sequence_length: Any = None,
    beam_width: Any = None,
    cache_indirection: Any = None,
    bias: Any = None,
    /,
    *,
    mask_filter_value: float | None = None,
    num_heads: int,
    output_qk: int | None = None,
    past_present_share_buffer: int | None = None,
    scale: float | None = None,
    context: Context,
) -> tuple[Any, Any, Any, Any]:
    """One step of a decoder for each beam: `(output, present_key, present_value, scores)`.

    `cache_indirection` `(batch, beams, longest)` tells from which beam each cached token of a beam comes, so that the
    cache itself is never reordered.
    """
    m = xp(query, key, value, past_key)
    if query.shape[1] != 1:
        raise context.error(f"query has {query.shape[1]} positions; this operator decodes one at a time")
    if key is None:
        third = query.shape[2] // 3
        query, key, value = query[..., :third], query[..., third : 2 * third], query[..., 2 * third :]
    q, k, v, cached = _packed_parts(query, key, value, bias, num_heads)
    shared = bool(past_present_share_buffer)
    present_k, k = append_cache(
        None if past_key is None or cached else widen(past_key), k, past_sequence_length, shared, context, 7
    )
    present_v, v = append_cache(
        None if past_value is None or cached else widen(past_value), v, past_sequence_length, shared, context, 7
    )
    keys = k.shape[2]
    if cache_indirection is not None and not cached:
        beams = cache_indirection.shape[1]
        source = cache_indirection.reshape(-1, cache_indirection.shape[2])[:, : keys - 1]
        rows = np.arange(q.shape[0])[:, None]
        own = m.broadcast_to(rows, (q.shape[0], 1))
        first = (rows // beams * beams).astype(source.dtype)
        source = m.concatenate([first + source, own.astype(source.dtype)], axis=1)
        k, v = (part[source[:, None, :], np.arange(num_heads)[:, None], np.arange(keys)] for part in (k, v))
    padding = additive_mask(
        mask_index,
        q.shape[0],
        1,
        keys,
        FILTER if mask_filter_value is None else mask_filter_value,
        context,
        "mask_index",
    )
    added = None if attention_bias is None else widen(attention_bias)
    y, scores, _ = attend(q, k, v, default_scale(scale, q.shape[3]), padding, added, context=context)
    dtype = query.dtype
    return narrow(merge_heads(y), dtype), narrow(present_k, dtype), narrow(present_v, dtype), narrow(scores, dtype)


# --- rotary embeddings ------------------------------------------------------------------------------------------------


def rotate(x: Any, cos: Any, sin: Any, interleaved: int) -> Any:
    """Rotate the leading `2 * cos.shape[-1]` elements of the last axis by angles that broadcast against `x`'s others."""
    m = xp(x, cos, sin)
    half = cos.shape[-1]
    if 2 * half > x.shape[-1]:
        raise ValueError(f"there are angles for {2 * half} elements, but a head has only {x.shape[-1]}")
    turned, rest = x[..., : 2 * half], x[..., 2 * half :]
    if interleaved:
        real, imaginary = turned[..., 0::2], turned[..., 1::2]
    else:
        real, imaginary = turned[..., :half], turned[..., half:]
    first, second = real * cos - imaginary * sin, real * sin + imaginary * cos
    if interleaved:
        turned = m.stack([first, second], axis=-1).reshape(turned.shape)
    else:
        turned = m.concatenate([first, second], axis=-1)
    return m.concatenate([turned, rest], axis=-1) if rest.shape[-1] else turned


def angles(cos_cache: Any, sin_cache: Any, positions: Any, context: Context, name: str = "position_ids") -> Any:
    """Wide `(cos, sin)` at integer positions, each `(*positions.shape, half)`."""
    m = xp(cos_cache, sin_cache, positions)
    rows, valid = context.bounded(positions, cos_cache.shape[0], input=name, axis=0)
    rows = device_index(rows, cos_cache.shape[0])
    found = (m.take(widen(cache), rows, axis=0, mode="clip") for cache in (cos_cache, sin_cache))
    return tuple(part if valid is None else context.fill_invalid(part, valid[..., None]) for part in found)


def _as_heads(input: Any, half: int, num_heads: int | None, dim: int | None) -> tuple[Any, bool]:
    """`(B, N, S, h)` of a 3-D or 4-D input, and whether it was 4-D."""
    if input.ndim == 4:
        return input, True
    if input.ndim != 3:
        raise ValueError(f"input has rank {input.ndim}, but has to be (B, S, hidden) or (B, N, S, size)")
    size = input.shape[2] // num_heads if dim and num_heads else 2 * half
    if size < 1 or input.shape[2] % size:
        raise ValueError(f"a hidden size of {input.shape[2]} does not fall into heads of {size}")
    return split_heads(input, input.shape[2] // size), False


@operator("RotaryEmbedding", since_version=1, domain=MICROSOFT)
def rotary_embedding_1(
    input: Any,
    position_ids: Any,
    cos_cache: Any,
    sin_cache: Any,
    /,
    *,
    interleaved: int | None = None,
    is_packed_batching: int | None = None,
    num_heads: int | None = None,
    rotary_embedding_dim: int | None = None,
    scale: float | None = None,
    context: Context,
) -> Any:
    """Rotary position embedding. One position id alone is that of the first token. `scale` has no effect on the result.

    onnxruntime's CPU kernel does not read `scale` either.
    """
    x, four = _as_heads(widen(input), cos_cache.shape[1], num_heads, rotary_embedding_dim)
    batch, _, length, _ = x.shape
    positions = position_ids
    if positions.size == 1 and positions.ndim <= 1:
        positions = positions.reshape(1, 1) + np.arange(length)
    elif positions.shape != (batch, length):
        raise ValueError(f"position_ids has shape {tuple(positions.shape)}, expected (1,) or {(batch, length)}")
    cos, sin = angles(cos_cache, sin_cache, positions, context)
    y = rotate(x, cos[:, None], sin[:, None], interleaved or 0)
    return narrow(y if four else merge_heads(y), input.dtype)


@operator("MRotaryEmbedding", since_version=1, domain=MICROSOFT)
def m_rotary_embedding_1(
    input: Any,
    position_ids: Any,
    cos_cache: Any,
    sin_cache: Any,
    /,
    *,
    interleaved: int | None = None,
    is_packed_batching: int | None = None,
    mrope_layout: int | None = None,
    mrope_section: tuple[int, ...],
    num_heads: int | None = None,
    rotary_embedding_dim: int | None = None,
    scale: float | None = None,
    context: Context,
) -> Any:
    """Rotary embedding whose angles come from three positions (time, height, width), by sections of the half width."""
    m = xp(input, position_ids, cos_cache)
    x, four = _as_heads(widen(input), cos_cache.shape[1], num_heads, rotary_embedding_dim)
    half = cos_cache.shape[1]
    if len(mrope_section) != 3 or sum(mrope_section) != half:
        raise ValueError(f"mrope_section {tuple(mrope_section)} has to be three sizes whose sum is {half}")
    if mrope_layout:
        stream = np.zeros(half, np.int64)
        for which in (1, 2):
            stream[which : 3 * mrope_section[which] : 3] = which
    else:
        stream = np.repeat(np.arange(3), mrope_section)
    cos, sin = (
        sum(m.where(stream == which, part[which], m.zeros_like(part[which])) for which in range(3))
        for part in angles(cos_cache, sin_cache, position_ids, context)
    )
    y = rotate(x, cos[:, None], sin[:, None], interleaved or 0)
    return narrow(y if four else merge_heads(y), input.dtype)
