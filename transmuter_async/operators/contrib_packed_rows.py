"""com.microsoft: GatherPacked — embedding rows in the block formats of GGML.

A row is a sequence of blocks; a block is a few scales and the codes of 32 or 256 elements. The byte layouts are those of
GGML's types, by whose numbers `packed_type` names them. The 2- and 3-bit "IQ" types need codebooks of thousands of entries
and are refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from transmuter_async.graph import dtype_of
from transmuter_async.operators.context import Context
from transmuter_async.operators.registry import is_host, operator, xp

MICROSOFT = "com.microsoft"
IQ4 = np.asarray([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)


def _as(data: Any, dtype: Any) -> Any:
    """Bytes along the last axis as little-endian elements of `dtype`."""
    dtype = np.dtype(dtype)
    if is_host(data):
        return np.ascontiguousarray(data).view(dtype)
    size = dtype.itemsize
    if size == 1:
        return jax.lax.bitcast_convert_type(data, dtype)
    return jax.lax.bitcast_convert_type(data.reshape(*data.shape[:-1], data.shape[-1] // size, size), dtype)


def _scale(data: Any) -> Any:
    """A float16 scale `(..., 1)` as float32."""
    return _as(data, np.float16).astype(np.float32)


def _nibbles(codes: Any) -> tuple[Any, Any]:
    return codes & np.uint8(15), codes >> np.uint8(4)


def _q4_0(block: Any) -> Any:
    low, high = _nibbles(block[..., 2:])
    return _scale(block[..., :2]) * (xp(block).concatenate([low, high], -1).astype(np.float32) - np.float32(8))


def _q5_0(block: Any) -> Any:
    m = xp(block)
    bits = ((block[..., 2:6, None] >> np.arange(8, dtype=np.uint8)) & np.uint8(1)).reshape(*block.shape[:-1], 32)
    codes = m.concatenate(_nibbles(block[..., 6:]), -1) | (bits << np.uint8(4))
    return _scale(block[..., :2]) * (codes.astype(np.float32) - np.float32(16))


def _q8_0(block: Any) -> Any:
    return _scale(block[..., :2]) * _as(block[..., 2:], np.int8).astype(np.float32)


def _iq4_nl(block: Any) -> Any:
    codes = xp(block).concatenate(_nibbles(block[..., 2:]), -1)
    return _scale(block[..., :2]) * xp(block).take(IQ4, codes, mode="clip")


def _q5_k(block: Any) -> Any:
    m = xp(block)
    packed, high, low = block[..., 4:16], block[..., 16:48], block[..., 48:176]
    six, four, two = np.uint8(63), np.uint8(4), np.uint8(6)
    first, second, third = packed[..., 0:4], packed[..., 4:8], packed[..., 8:12]
    scales = m.concatenate([first & six, (third & np.uint8(15)) | ((first >> two) << four)], -1)
    lows = m.concatenate([second & six, (third >> four) | ((second >> two) << four)], -1)
    parts = []
    for part in range(8):
        nibble = _nibbles(low[..., part // 2 * 32 : part // 2 * 32 + 32])[part % 2]
        bit = (high >> np.uint8(part)) & np.uint8(1)
        parts.append(nibble | (bit << four))
    codes = m.stack(parts, -2).astype(np.float32)
    d, least = _scale(block[..., :2])[..., None], _scale(block[..., 2:4])[..., None]
    y = d * scales.astype(np.float32)[..., None] * codes - least * lows.astype(np.float32)[..., None]
    return y.reshape(*block.shape[:-1], 256)


def _q6_k(block: Any) -> Any:
    m = xp(block)
    low, high, scales = block[..., :128], block[..., 128:192], _as(block[..., 192:208], np.int8)
    d = _scale(block[..., 208:210])
    parts = []
    for half in range(2):
        ql, qh = low[..., half * 64 : half * 64 + 64], high[..., half * 32 : half * 32 + 32]
        for quarter in range(4):
            nibble = _nibbles(ql[..., quarter % 2 * 32 : quarter % 2 * 32 + 32])[quarter // 2]
            top = (qh >> np.uint8(2 * quarter)) & np.uint8(3)
            parts.append((nibble | (top << np.uint8(4))).astype(np.float32) - np.float32(32))
    codes = m.concatenate(parts, -1).reshape(*block.shape[:-1], 16, 16)
    return (d[..., None] * scales.astype(np.float32)[..., None] * codes).reshape(*block.shape[:-1], 256)


def _iq4_xs(block: Any) -> Any:
    m = xp(block)
    high = _as(block[..., 2:4], np.uint16)
    parts = m.stack(_nibbles(block[..., 4:8]), -1).reshape(*block.shape[:-1], 8).astype(np.uint16)
    top = (high >> np.arange(0, 16, 2, dtype=np.uint16)) & np.uint16(3)
    scales = (parts | (top << np.uint16(4))).astype(np.float32) - np.float32(32)
    codes = block[..., 8:136].reshape(*block.shape[:-1], 8, 16)
    values = m.take(IQ4, m.concatenate(_nibbles(codes), -1), mode="clip")
    return (_scale(block[..., :2])[..., None] * scales[..., None] * values).reshape(*block.shape[:-1], 256)


def _plain(dtype: Any) -> Callable[[Any], Any]:
    return lambda block: _as(block, dtype).astype(np.float32)


FORMATS: dict[int, tuple[str, int, int, Callable[[Any], Any]]] = {
    0: ("F32", 1, 4, _plain(np.float32)),
    1: ("F16", 1, 2, _plain(np.float16)),
    2: ("Q4_0", 32, 18, _q4_0),
    6: ("Q5_0", 32, 22, _q5_0),
    8: ("Q8_0", 32, 34, _q8_0),
    13: ("Q5_K", 256, 176, _q5_k),
    14: ("Q6_K", 256, 210, _q6_k),
    20: ("IQ4_NL", 32, 18, _iq4_nl),
    23: ("IQ4_XS", 256, 136, _iq4_xs),
    30: ("BF16", 1, 2, _plain(ml_dtypes.bfloat16)),
}
"""By type number: name, elements of a block, bytes of a block, and what makes elements out of bytes."""


@operator("GatherPacked", since_version=1, domain=MICROSOFT)
def gather_packed_1(
    data: Any, indices: Any, /, *, K: int, output_dtype: int = 16, packed_type: int, context: Context
) -> Any:
    """Rows of a packed table `(rows, bytes)` as `(*indices.shape, K)`. An index out of range reads row 0, as documented."""
    if packed_type not in FORMATS:
        known = ", ".join(f"{number} ({entry[0]})" for number, entry in FORMATS.items())
        raise context.error(f"packed_type {packed_type} is not supported; {known} are")
    name, elements, size, decode = FORMATS[packed_type]
    if K < 1 or K % elements or data.ndim != 2 or data.shape[1] != K // elements * size:
        raise context.error(
            f"data has shape {tuple(data.shape)}, but {K} elements of {name} are {K / elements * size:g} bytes"
        )
    m = xp(data, indices)
    inside = (indices >= 0) & (indices < data.shape[0])
    rows = m.take(data, m.where(inside, indices, m.zeros_like(indices)), axis=0, mode="clip")
    blocks = rows.reshape(*indices.shape, K // elements, size)
    with np.errstate(all="ignore"):
        values = decode(blocks).reshape(*indices.shape, K)
        return values.astype(dtype_of(output_dtype)) if m is np else jnp.asarray(values, dtype_of(output_dtype))
