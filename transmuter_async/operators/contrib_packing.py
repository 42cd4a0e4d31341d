"""com.microsoft: operators of older and server exports that have no CPU kernel in onnxruntime.

Attention over packed tokens, relative position biases of T5 and WavLM, Fourier transforms of older PyTorch exports. Their
meaning is the schemas' text.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from jax import lax

from transmuter_async.operators.context import Context
from transmuter_async.operators.contrib_attention import attend, default_scale
from transmuter_async.operators.numeric import matmul, narrow, sigmoid, widen
from transmuter_async.operators.registry import operator, xp

MICROSOFT = "com.microsoft"


@operator("RemovePadding", since_version=1, domain=MICROSOFT)
def remove_padding_1(
    input: Any, sequence_token_count: Any, /, *, context: Context
) -> tuple[Any, np.ndarray, np.ndarray, np.ndarray]:
    """Rows `(tokens, hidden)` without right padding, the offsets of real and padding tokens, and lengths, all int32."""
    counts = context.needs(sequence_token_count, 1, "the number of tokens of each sequence").reshape(-1)
    batch, length = input.shape[:2]
    if len(counts) != batch or (counts < 0).any() or (counts > length).any():
        raise context.error(f"sequence_token_count {counts} does not fit an input of shape {tuple(input.shape)}")
    real = (np.arange(length) < counts[:, None]).reshape(-1)
    offsets = np.concatenate([np.flatnonzero(real), np.flatnonzero(~real)]).astype(np.int32)
    rows = xp(input).take(input.reshape(batch * length, *input.shape[2:]), np.flatnonzero(real), axis=0, mode="clip")
    ends = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    longest = np.asarray([counts.max(initial=0)], np.int32)
    return rows, offsets.reshape(batch, length), ends, longest


@operator("RestorePadding", since_version=1, domain=MICROSOFT)
def restore_padding_1(input: Any, token_offset: Any, /, *, context: Context) -> Any:
    """The inverse of RemovePadding: rows at their offsets, zeros elsewhere."""
    m = xp(input, token_offset)
    batch, length = token_offset.shape
    places, _ = context.bounded(
        token_offset.reshape(-1)[: input.shape[0]], batch * length, input="token_offset", axis=0
    )
    flat = m.zeros((batch * length, input.shape[1]), input.dtype)
    if m is np:
        flat[places] = input
    else:
        flat = flat.at[places].set(input)
    return flat.reshape(batch, length, input.shape[1])


@operator("PackedMultiHeadAttention", since_version=1, domain=MICROSOFT)
def packed_multi_head_attention_1(
    query: Any,
    key: Any,
    value: Any,
    bias: Any,
    token_offset: Any,
    cumulative_sequence_length: Any,
    attention_bias: Any = None,
    /,
    *,
    mask_filter_value: float | None = None,
    num_heads: int,
    scale: float | None = None,
) -> Any:
    """Attention of packed tokens `(tokens, hidden)`, each to those of its own sequence.

    All tokens are compared with all; other sequences are masked out.
    """
    if query.ndim == 4:
        parts = [widen(query[:, :, part]) for part in range(3)]
    else:
        parts = [widen(x) for x in (query, key, value)]
    if bias is not None:
        ends = np.cumsum([0, *(int(np.prod(part.shape[1:])) for part in parts)])
        parts = [
            part + widen(bias)[a:b].reshape(part.shape[1:]) for part, a, b in zip(parts, ends, ends[1:], strict=False)
        ]
    return _packed(parts, num_heads, token_offset, cumulative_sequence_length, attention_bias, scale, query.dtype)


def _packed(
    parts: list[Any], heads: int, token_offset: Any, ends: Any, attention_bias: Any, scale: float | None, dtype: Any
) -> Any:
    m = xp(*parts, token_offset, ends, attention_bias)
    tokens = parts[0].shape[0]
    widths = [int(np.prod(part.shape[1:])) for part in parts]
    q, k, v = (
        m.swapaxes(part.reshape(tokens, heads, width // heads), 0, 1)[None]
        for part, width in zip(parts, widths, strict=True)
    )
    edges = ends.astype(np.int64)
    owner = (np.arange(tokens)[:, None] >= edges[1:]).sum(1)
    apart = m.where(owner[:, None] == owner, np.float32(0), np.float32(-np.inf))
    added = None
    if attention_bias is not None:
        place = np.arange(tokens) - m.take(edges, owner, mode="clip")
        table = widen(attention_bias)
        batch = m.where(np.asarray(table.shape[0] == 1), 0, owner)
        added = m.moveaxis(table[batch[:, None], :, place[:, None], place[None, :]], -1, 0)[None]
    y, _, _ = attend(q, k, v, default_scale(scale, q.shape[3]), apart, added)
    return narrow(m.swapaxes(y[0], 0, 1).reshape(tokens, widths[2]), dtype)


@operator("PackedAttention", since_version=1, domain=MICROSOFT)
def packed_attention_1(
    input: Any,
    weights: Any,
    bias: Any,
    token_offset: Any,
    cumulative_sequence_length: Any,
    attention_bias: Any = None,
    /,
    *,
    num_heads: int,
    qkv_hidden_sizes: tuple[int, ...] | None = None,
    scale: float | None = None,
    context: Context,
) -> Any:
    """The same with the projection of query, key and value."""
    qkv = matmul(widen(input), widen(weights), context.platform) + widen(bias)
    sizes = qkv_hidden_sizes or (qkv.shape[-1] // 3,) * 3
    edges = np.cumsum([0, *sizes])
    if edges[-1] != qkv.shape[-1]:
        raise ValueError(f"qkv_hidden_sizes {tuple(sizes)} do not fit a projection with {qkv.shape[-1]} columns")
    parts = [qkv[:, a:b] for a, b in zip(edges, edges[1:], strict=False)]
    return _packed(parts, num_heads, token_offset, cumulative_sequence_length, attention_bias, scale, input.dtype)


@operator("RelativePositionBias", since_version=1, domain=MICROSOFT, static=("query_length", "key_length"))
def relative_position_bias_1(
    bias_table: Any,
    query_length: np.ndarray,
    key_length: np.ndarray,
    /,
    *,
    is_bidirectional: int = 0,
    max_distance: int,
) -> Any:
    """T5's bias `(1, heads, queries, keys)` by buckets of distance: exact up to half of them, then logarithmic."""
    buckets = bias_table.shape[0]
    queries, keys = int(query_length.reshape(-1)[0]), int(key_length.reshape(-1)[0])
    distance = np.arange(queries)[:, None] - np.arange(keys)  # how far back the key lies
    bucket = np.zeros(distance.shape, np.int64)
    if is_bidirectional:
        buckets //= 2
        bucket = np.where(distance < 0, buckets, 0)
        distance = np.abs(distance)
    else:
        distance = np.maximum(distance, 0)
    exact = max(1, buckets // 2)
    with np.errstate(divide="ignore"):
        ratio = np.log(np.maximum(distance, 1).astype(np.float32) / np.float32(exact))
    steps = ratio / np.float32(np.log(max_distance / exact)) * np.float32(buckets - exact)
    far = np.minimum(exact + steps.astype(np.int64), buckets - 1)
    bucket = bucket + np.where(distance < exact, distance, far)
    m = xp(bias_table)
    return m.transpose(m.take(bias_table, bucket, axis=0, mode="clip"), (2, 0, 1))[None]


@operator("GatedRelativePositionBias", since_version=1, domain=MICROSOFT)
def gated_relative_position_bias_1(
    query_layer: Any,
    query_bias: Any,
    rel_pos: Any,
    weight: Any,
    bias: Any,
    eco_a: Any,
    token_offset: Any = None,
    /,
    *,
    num_heads: int,
    context: Context,
) -> Any:
    """WavLM's gated bias `(B, heads, S, S)`: the relative bias times a gate that the query gives."""
    if token_offset is not None:
        raise context.error("token_offset (packed queries) is not supported; give padded queries")
    m = xp(query_layer, rel_pos, weight)
    batch, length, width = query_layer.shape
    q = (widen(query_layer) + widen(query_bias)).reshape(batch, length, num_heads, width // num_heads)
    gates = m.matmul(m.swapaxes(q, 1, 2), widen(weight)) + widen(bias)
    gates = sigmoid(gates.reshape(batch, num_heads, length, 2, gates.shape[3] // 2).sum(-1))
    update, reset = gates[..., :1], gates[..., 1:]
    one, two = np.float32(1), np.float32(2)
    gate = update * (reset * widen(eco_a) - one) + two
    return narrow(gate * widen(rel_pos), query_layer.dtype)


# --- complex numbers as pairs -----------------------------------------------------------------------------------------


def _pairs(x: Any) -> Any:
    if x.shape[-1:] != (2,):
        raise ValueError(f"the last axis holds real and imaginary parts, so that {tuple(x.shape)} is no such tensor")
    wide = widen(x)
    if xp(x) is np:
        return wide[..., 0] + 1j * wide[..., 1]
    return lax.complex(wide[..., 0], wide[..., 1])


def _unpaired(z: Any, dtype: Any) -> Any:
    return narrow(xp(z).stack([z.real, z.imag], axis=-1), dtype)


@operator("ComplexMul", since_version=1, domain=MICROSOFT)
def complex_mul_1(A: Any, B: Any, /) -> Any:
    """Product of complex tensors whose last axis holds real and imaginary parts."""
    return _complex_product(A, B, np.float32(1))


@operator("ComplexMulConj", since_version=1, domain=MICROSOFT)
def complex_mul_conj_1(A: Any, B: Any, /) -> Any:
    """Product with the conjugate of the second tensor."""
    return _complex_product(A, B, np.float32(-1))


def _complex_product(A: Any, B: Any, sign: np.float32) -> Any:
    a, b = widen(A), widen(B)
    if a.shape[-1:] != (2,) or b.shape[-1:] != (2,):
        raise ValueError(f"the last axes hold real and imaginary parts; the shapes are {A.shape} and {B.shape}")
    c = b[..., 1] * b.dtype.type(sign)
    real = a[..., 0] * b[..., 0] - a[..., 1] * c
    imaginary = a[..., 0] * c + a[..., 1] * b[..., 0]
    return narrow(xp(A, B).stack([real, imaginary], axis=-1), A.dtype)


def _check_transform(onesided: int, normalized: int, signal_ndim: int) -> tuple[int, ...]:
    if onesided != 1 or normalized != 0:
        raise ValueError("onesided has to be 1 and normalized 0")
    return tuple(range(-signal_ndim, 0))


@operator("Rfft", since_version=1, domain=MICROSOFT)
def rfft_1(X: Any, /, *, normalized: int = 0, onesided: int = 1, signal_ndim: int = 1) -> Any:
    """Fourier transform of real signals along the last `signal_ndim` axes; a pair axis is added."""
    axes = _check_transform(onesided, normalized, signal_ndim)
    m = xp(X)
    return _unpaired(m.fft.rfftn(widen(X), axes=axes), X.dtype)


@operator("Irfft", since_version=1, domain=MICROSOFT)
def irfft_1(X: Any, /, *, normalized: int = 0, onesided: int = 1, signal_ndim: int) -> Any:
    """The inverse: `(..., n // 2 + 1, 2)` to `(..., n)` with even n."""
    axes = _check_transform(onesided, normalized, signal_ndim)
    return narrow(xp(X).fft.irfftn(_pairs(X), axes=axes), X.dtype)


@operator("IsAllFinite", since_version=1, domain=MICROSOFT)
def is_all_finite_1(*input: Any, isinf_only: int = 0, isnan_only: int = 0) -> Any:
    """Whether no tensor holds NaN or infinity (or only the one that is asked for)."""
    m = xp(*input)
    good: Any = m.ones((), bool)
    for x in input:
        wide = widen(x)
        bad = m.isnan(wide) if isnan_only else m.isinf(wide) if isinf_only else ~m.isfinite(wide)
        good = good & ~bad.any()
    return m.asarray(good)
