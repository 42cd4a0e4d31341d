"""com.microsoft: products with weights of 4- and 8-bit floats, scaled in blocks. Neither has a CPU kernel in onnxruntime."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax

from transmuter_async.operators.contrib_weights import unpack
from transmuter_async.operators.numeric import matmul, narrow, widen
from transmuter_async.operators.registry import is_host, operator, xp

MICROSOFT = "com.microsoft"

_HALF = np.asarray([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
E2M1 = np.concatenate([_HALF, -_HALF])
"""The values of a 4-bit float of 2 exponent bits and 1 mantissa bit, sign in the highest bit."""

LARGEST = np.float32(448)
"""The largest number of float8e4m3fn."""


def _spread(scale: Any, block: int, size: int) -> Any:
    """`(N, size)`: each of `(N, blocks)` for all elements of its block."""
    if block < 1 or scale.shape[1] != -(-size // block):
        raise ValueError(f"{scale.shape[1]} scales a row do not fit {size} values in blocks of {block}")
    return xp(scale).repeat(scale, block, axis=1)[:, :size]


def _product(A: Any, weight: Any, bias: Any) -> Any:
    if A.shape[-1] != weight.shape[1]:
        raise ValueError(f"A has {A.shape[-1]} columns, but the weight {weight.shape[1]}")
    y = matmul(widen(A), xp(weight).swapaxes(weight, 0, 1))
    return narrow(y if bias is None else y + widen(bias), A.dtype)


@operator("MatMulBlockQuantizedFp4Weight", since_version=1, domain=MICROSOFT)
def mat_mul_block_quantized_fp4_weight_1(
    A: Any,
    B: Any,
    weight_scale: Any,
    weight_scale_2: Any,
    input_scale: Any = None,
    bias: Any = None,
    /,
    *,
    block_size: int = 16,
) -> Any:
    """`A` times the transpose of an NVFP4 weight `(N, K/2)`, two values a byte, scales as the bytes of float8e4m3fn.

    The weight is rounded to the activations' dtype first, as the schema says. `input_scale` does nothing here.
    """
    codes = unpack(B, 4)
    raw = weight_scale
    if is_host(raw):
        scale = raw.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    else:
        scale = lax.bitcast_convert_type(raw, jnp.float8_e4m3fn).astype(np.float32)
    scale = scale * weight_scale_2.reshape(()).astype(np.float32)
    m = xp(codes, scale)
    values = m.take(m.asarray(E2M1), codes, axis=0, mode="clip")
    weight = (values * _spread(scale, block_size, codes.shape[1])).astype(A.dtype)
    return _product(A, widen(weight), bias)


@operator("MatMulBlockQuantizedFp8Weight", since_version=1, domain=MICROSOFT)
def mat_mul_block_quantized_fp8_weight_1(
    A: Any, B: Any, b_scale: Any, a_scale: Any = None, bias: Any = None, /, *, block_size: int = 128
) -> Any:
    """`A` times the transpose of a float8e4m3fn weight `(N, K)` with a scale for each block of a row.

    With `a_scale` the activations are rounded to float8e4m3fn as well, saturated.
    """
    weight = B.astype(np.float32) * _spread(b_scale, block_size, B.shape[1])
    given = A
    if a_scale is not None:
        by = a_scale.reshape(()).astype(np.float32)
        m = xp(A, by)
        levels = m.clip(widen(A) / by, -LARGEST, LARGEST).astype(ml_dtypes.float8_e4m3fn)
        return narrow(_product(levels.astype(np.float32) * by, weight, bias), A.dtype)
    return _product(given, weight, bias)
