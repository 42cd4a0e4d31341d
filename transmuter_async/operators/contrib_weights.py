"""com.microsoft: products with packed weights — MatMulNBits, MatMulBnb4, MatMulFpQ4, GatherBlockQuantized.

The weights are unpacked to float32 and multiplied as such; with constant weights that happens once, on the host.
`accuracy_level`, which allows onnxruntime to quantise the activations as well, is not made use of: results are those of
level 1 (float32).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from transmuter_async.operators.context import Context
from transmuter_async.operators.numeric import matmul, narrow, widen
from transmuter_async.operators.registry import is_host, operator, xp

__all__ = ["columns_of_n_bits", "dequantize_blocks", "unpack"]

MICROSOFT = "com.microsoft"

NF4 = np.asarray(
    [
        -1.0,
        -0.6961928009986877,
        -0.5250730514526367,
        -0.39491748809814453,
        -0.28444138169288635,
        -0.18477343022823334,
        -0.09105003625154495,
        0.0,
        0.07958029955625534,
        0.16093020141124725,
        0.24611230194568634,
        0.33791524171829224,
        0.44070982933044434,
        0.5626170039176941,
        0.7229568362236023,
        1.0,
    ],
    np.float32,
)
"""The 16 values of the NormalFloat type of the QLoRA paper (arXiv 2305.14314, appendix E)."""

_FP4 = np.asarray([0.0, 5.208333333e-03, 0.66666667, 1.0, 0.33333333, 0.5, 0.16666667, 0.25], np.float32)
FP4 = np.concatenate([_FP4, -_FP4])
"""The values of bitsandbytes' 4-bit float, sign in the highest bit."""


def unpack(packed: Any, bits: int) -> Any:
    """Codes of `bits` bits out of bytes along the last axis, lowest bits first, uint8; every code the bytes hold."""
    m = xp(packed)
    if bits == 8:
        return packed
    if bits in (1, 2, 4):
        shifts = np.arange(0, 8, bits, dtype=np.uint8)
        codes = (packed[..., None] >> shifts) & np.uint8((1 << bits) - 1)
        return codes.reshape(*packed.shape[:-1], packed.shape[-1] * (8 // bits))
    if not 1 <= bits <= 8:
        raise ValueError(f"weights of {bits} bits are not known; 1 to 8 are")
    stream = (packed[..., None] >> np.arange(8, dtype=np.uint8)) & np.uint8(1)
    stream = stream.reshape(*packed.shape[:-1], packed.shape[-1] * 8)
    count = stream.shape[-1] // bits
    stream = stream[..., : count * bits].reshape(*packed.shape[:-1], count, bits)
    return (
        (stream << np.arange(bits, dtype=np.uint8)).sum(-1, dtype=np.uint8)
        if m is np
        else m.sum(stream << np.arange(bits, dtype=np.uint8), axis=-1, dtype=np.uint8)
    )


def dequantize_blocks(codes: Any, scales: Any, zero_points: Any, block: int, default_zero: int) -> Any:
    """`(codes - zero) * scale` in float32, with one scale and zero for each `block` codes of the last axis.

    Args:
        codes: `(..., K)` integers.
        scales: `(..., ceil(K / block))`.
        zero_points: The same, integers or floats, or None.
        default_zero: The zero where `zero_points` is None.
    """
    m = xp(codes, scales, zero_points)
    size = codes.shape[-1]

    def spread(values: Any) -> Any:
        shape = (*values.shape, block)
        wide = m.broadcast_to(values.astype(np.float32)[..., None], shape)
        return wide.reshape(*values.shape[:-1], values.shape[-1] * block)[..., :size]

    zero = np.float32(default_zero) if zero_points is None else spread(zero_points)
    return (codes.astype(np.float32) - zero) * spread(scales)


@operator("MatMulNBits", since_version=1, domain=MICROSOFT)
def mat_mul_n_bits_1(
    A: Any,
    B: Any,
    scales: Any,
    zero_points: Any = None,
    g_idx: Any = None,
    bias: Any = None,
    /,
    *,
    K: int,
    N: int,
    accuracy_level: int = 0,
    bits: int = 4,
    block_size: int,
    weight_prepacked: int = 0,
    context: Context,
) -> Any:
    """`A` times the transpose of a weight `(N, K)` of 2 to 8 bits, quantised in blocks along K, plus a bias.

    Zero points are packed like the weights (uint8) or plain (float). `g_idx`: the block of each of the K rows. A weight
    of size 0 stands for one that is left out: the result is the bias.
    """
    if weight_prepacked:
        raise context.error("weight_prepacked asks for a layout of CUDA kernels; only 0 can be read")
    if A.shape[-1] != K:
        raise context.error(f"A has {A.shape[-1]} columns, but K is {K}")
    shape = (*A.shape[:-1], N)
    if B.size == 0 and N and K:
        y: Any = xp(A).zeros(shape, np.float32)
    else:
        packed = (B, scales, zero_points, g_idx)
        given = (K, N, bits, block_size)
        columns = columns_of_n_bits(*packed, *given) if is_host(A, *packed) else context.prepared(packed, "n bits", *given)
        y = matmul(widen(A), columns)
    y = y.astype(np.float32)
    return narrow(y if bias is None else y + widen(bias), A.dtype)


def columns_of_n_bits(
    B: Any, scales: Any, zero_points: Any, g_idx: Any, K: int, N: int, bits: int, block: int
) -> Any:
    """The weight of MatMulNBits as (K, N) in float32."""
    return xp(B, scales).swapaxes(_nbits(B, scales, zero_points, g_idx, K, N, bits, block), 0, 1)


def _nbits(B: Any, scales: Any, zero_points: Any, g_idx: Any, K: int, N: int, bits: int, block: int) -> Any:
    """The weight `(N, K)` in float32."""
    blocks = -(-K // block)
    codes = unpack(B.reshape(N, blocks * (block * bits // 8)), bits)[:, :K]
    scale = widen(scales).reshape(N, blocks)
    zero = zero_points
    if zero is not None:
        packed = zero.dtype == np.uint8
        zero = zero.reshape(N, -(-blocks * bits // 8) if packed else blocks)
        zero = unpack(zero, bits)[:, :blocks] if packed else widen(zero)
    if g_idx is None:
        return dequantize_blocks(codes, scale, zero, block, 1 << (bits - 1))
    m = xp(codes, scale, zero, g_idx)
    group = g_idx.reshape(-1)[:K]
    chosen = m.take(scale, group, axis=1, mode="clip")
    origin = (
        np.float32(1 << (bits - 1)) if zero is None else m.take(zero.astype(np.float32), group, axis=1, mode="clip")
    )
    return (codes.astype(np.float32) - origin) * chosen


@operator("MatMulBnb4", since_version=1, domain=MICROSOFT)
def mat_mul_bnb4_1(
    A: Any,
    B: Any,
    absmax: Any,
    /,
    *,
    K: int,
    N: int,
    block_size: int,
    quant_type: int,
    training_mode: int = 0,
    transB: int = 1,
    context: Context,
) -> Any:
    """`A` times a weight `(N, K)` of bitsandbytes: FP4 (`quant_type=0`) or NF4 (1), the first code in the high nibble.

    With `transB=0` the product is `A (..., N)` times the weight, as the schema's text says; onnxruntime's CPU kernel
    reads the weight with the wrong strides there.
    """
    if quant_type not in (0, 1):
        raise context.error(f"quant_type is {quant_type}, but has to be 0 (FP4) or 1 (NF4)")
    m = xp(B, absmax)
    flat = B.reshape(-1)
    codes = m.stack([flat >> np.uint8(4), flat & np.uint8(15)], axis=-1).reshape(-1)[: N * K]
    values = m.take(NF4 if quant_type else FP4, codes, mode="clip")
    weight = dequantize_blocks(values, widen(absmax).reshape(-1), None, block_size, 0).reshape(N, K)
    weight = m.swapaxes(weight, 0, 1) if transB else weight
    return narrow(matmul(widen(A), weight), A.dtype)


@operator("MatMulFpQ4", since_version=1, domain=MICROSOFT, static=("B_shape",))
def mat_mul_fp_q4_1(A: Any, B: Any, B_shape: np.ndarray, /, *, blk_quant_type: int = 1, context: Context) -> Any:
    """`A` times a weight in the blob of onnxruntime's kernels.

    By columns, block after block: a float32 scale, a zero point byte (type 1), then 4-bit codes, of each 32 the first
    16 in the low nibbles; blocks of 32. Type 2, blocks of 64, is refused: onnxruntime's kernel reads it as type 1.
    """
    if blk_quant_type not in (0, 1):
        raise context.error(f"blk_quant_type is {blk_quant_type}; 0 and 1, with blocks of 32, can be read")
    block, has_zero = 32, blk_quant_type == 1
    rows, columns = (int(d) for d in B_shape)
    m = xp(B)
    blocks = -(-rows // block)
    head = 5 if has_zero else 4
    blob = B.reshape(columns, blocks, head + block // 2)
    bits = blob[..., :4].astype(np.uint32)
    word = bits[..., 0] | (bits[..., 1] << 8) | (bits[..., 2] << 16) | (bits[..., 3] << 24)
    scale = word.view(np.float32)
    zero = blob[..., 4:5].astype(np.float32) if has_zero else np.float32(8)
    halves = blob[..., head:].reshape(columns, blocks, block // 32, 16)
    codes = m.concatenate([halves & np.uint8(15), halves >> np.uint8(4)], axis=-1).reshape(columns, blocks, block)
    weight = ((codes.astype(np.float32) - zero) * scale[..., None]).reshape(columns, blocks * block)[:, :rows]
    return narrow(matmul(widen(A), m.swapaxes(weight, 0, 1)), A.dtype)


@operator("GatherBlockQuantized", since_version=1, domain=MICROSOFT)
def gather_block_quantized_1(
    data: Any,
    indices: Any,
    scales: Any,
    zero_points: Any = None,
    /,
    *,
    bits: int = 4,
    block_size: int = 128,
    gather_axis: int = 0,
    quantize_axis: int = 1,
    context: Context,
) -> Any:
    """Slices of a table quantised in blocks, dequantised after they are gathered.

    uint8 data holds `8 / bits` codes a byte along the last axis, with the zero `2^(bits - 1)`; int4 and uint4 have the
    zero 0; float8 and float4 are multiplied by their scale, and with `block_size=0` one scale is for the whole axis. Unlike
    Gather's, an index out of range gives zeros.
    """
    m = xp(data, indices, scales, zero_points)
    rank = data.ndim
    gather, quantised = (axis + rank if axis < 0 else axis for axis in (gather_axis, quantize_axis))
    if not 0 <= gather < rank or not 0 <= quantised < rank:
        raise context.error(f"gather_axis {gather_axis} or quantize_axis {quantize_axis} is out of range")
    packed = data.dtype == np.uint8
    if packed and (gather == quantised or gather != 0):
        raise context.error("packed data is gathered on axis 0 and quantised on another")
    size = data.shape[gather]
    rows = m.where(indices < 0, indices + np.asarray(size, indices.dtype), indices).reshape(-1)
    valid = (rows >= 0) & (rows < size)
    same = gather == quantised

    def pick(table: Any, each: int) -> Any:
        if table is None or (not same and table.shape[gather] == 1 != size):
            return table
        return m.take(table, m.clip(rows, 0, max(0, size - 1)) // each, axis=gather, mode="clip")

    block = block_size or max(1, data.shape[quantised])
    each = block if same else 1
    codes, scale, zero = pick(data, 1), pick(widen(scales), each), pick(zero_points, each)
    default = 0
    if packed:
        codes, default = unpack(codes, bits), 1 << (bits - 1)
        zero = None if zero is None else unpack(zero, bits)
    codes, scale = m.moveaxis(codes, quantised, -1), m.moveaxis(scale, quantised, -1)
    if zero is not None:
        zero = m.moveaxis(zero, quantised, -1).astype(np.float32)[..., : scale.shape[-1]]
    values = dequantize_blocks(codes, scale, zero, 1 if same else block, default)
    values = m.moveaxis(values, -1, quantised)
    inside = valid.reshape(-1, *(1,) * (rank - 1 - gather))
    values = m.where(inside, values, m.zeros_like(values))
    return narrow(values.reshape(*data.shape[:gather], *indices.shape, *values.shape[gather + 1 :]), scales.dtype)
