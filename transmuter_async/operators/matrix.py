"""Matrix products: MatMul, Gemm, Einsum, Det."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from transmuter_async.operators.context import Context
from transmuter_async.operators.numeric import is_float, matmul, narrow, wide_dtype, widen
from transmuter_async.operators.registry import is_host, operator, xp


@operator("MatMul", since_version=1)
def mat_mul_1(A: Any, B: Any, /, *, context: Context) -> Any:
    """The product of `numpy.matmul`, batch dimensions broadcast. Version 9 adds integers (exact, they wrap), 13 bfloat16."""
    if A.ndim == 0 or B.ndim == 0:
        raise ValueError(f"MatMul takes operands of at least one dimension, got shapes {A.shape} and {B.shape}")
    if A.shape[-1] != B.shape[-2 if B.ndim > 1 else -1]:
        raise ValueError(f"the inner dimensions of {A.shape} and {B.shape} differ")
    return matmul(A, B, context.platform)


@operator("Gemm", since_version=1)
def gemm_1(
    A: Any,
    B: Any,
    C: Any,
    /,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    broadcast: int = 0,
    transA: int = 0,
    transB: int = 0,
    context: Context,
) -> Any:
    """Until version 7, C may differ from the product's shape only with `broadcast`."""
    rows, columns = A.shape[1 if transA else 0], B.shape[0 if transB else 1]
    if not broadcast and C.shape != (rows, columns):
        raise ValueError(f"C has shape {C.shape}, the product {(rows, columns)}; set broadcast to allow that")
    return gemm_11(A, B, C, alpha=alpha, beta=beta, transA=transA, transB=transB, context=context)


@operator("Gemm", since_version=7)
def gemm_7(
    A: Any,
    B: Any,
    C: Any,
    /,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    transA: int = 0,
    transB: int = 0,
    context: Context,
) -> Any:
    """Until version 11, C is required."""
    return gemm_11(A, B, C, alpha=alpha, beta=beta, transA=transA, transB=transB, context=context)


@operator("Gemm", since_version=11)
def gemm_11(
    A: Any,
    B: Any,
    C: Any = None,
    /,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    transA: int = 0,
    transB: int = 0,
    context: Context,
) -> Any:
    """The sum alpha * A' * B' + beta * C, C broadcast to the product's shape (never the other way).

    Narrow floats accumulate and scale in float32; integers with a scale that is not 1 are scaled in float64 and
    truncated.
    """
    if A.ndim != 2 or B.ndim != 2:
        raise ValueError(f"A and B must be matrices, got shapes {A.shape} and {B.shape}")
    dtype = A.dtype
    a = A.T if transA else A
    if is_host(A, B):
        b = B.T if transB else B
    else:
        b = context.prepared(B, "transposed" if transB else "same")
    if a.shape[1] != b.shape[0]:
        raise ValueError(f"the inner dimensions of {a.shape} and {b.shape} differ (after transA, transB)")
    if is_host(A, B) or context.platform == "cpu" or not is_float(dtype):
        product = matmul(widen(a), widen(b), context.platform)
    else:
        product = jnp.matmul(a, b, preferred_element_type=wide_dtype(dtype))

    def scaled(x: Any, factor: float) -> Any:
        if factor == 1:
            return x
        if not is_float(x.dtype):
            return (x.astype(np.float64) * factor).astype(x.dtype)
        return x * xp(x).asarray(factor, x.dtype)

    with np.errstate(all="ignore"):
        result = scaled(product, alpha)
        if C is not None and beta != 0:
            if np.broadcast_shapes(C.shape, result.shape) != result.shape:
                raise ValueError(f"C of shape {C.shape} does not broadcast to the product's shape {result.shape}")
            result = result + scaled(widen(C), beta)
    return narrow(result, dtype)


@operator("Einsum", since_version=12)
def einsum_12(*Inputs: Any, equation: str) -> Any:
    """Einstein summation: explicit and implicit form, ellipsis, repeated letters (a diagonal), any number of operands.

    In implicit form the output's letters are sorted by ASCII value, capitals first, after the ellipsis.
    """
    if not Inputs:
        raise ValueError("Einsum needs at least one operand")
    equation = equation.replace(" ", "")
    dtype = Inputs[0].dtype
    operands = [widen(x) for x in Inputs]
    if is_host(*Inputs):
        with np.errstate(all="ignore"):
            return narrow(np.einsum(equation, *operands, optimize=len(operands) > 1), dtype)
    return narrow(jnp.einsum(equation, *operands, preferred_element_type=wide_dtype(dtype)), dtype)


@operator("Det", since_version=11, loops=True)
def det_11(X: Any, /) -> Any:
    """The determinant of the last two dimensions, which must be square."""
    if X.ndim < 2 or X.shape[-1] != X.shape[-2]:
        raise ValueError(f"Det takes square matrices in its last two dimensions, got shape {X.shape}")
    if X.shape[-1] == 0 or X.size == 0:
        return xp(X).ones(X.shape[:-2], X.dtype)
    with np.errstate(all="ignore"):
        return narrow(xp(X).linalg.det(widen(X)), X.dtype)
