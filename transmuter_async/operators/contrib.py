"""com.microsoft: fused activations, normalisations and matrix products that optimised exports are made of.

Attention is in `contrib_attention.py`, quantised operators in `contrib_quantized.py`, packed weights in
`contrib_weights.py`, expert mixtures in `contrib_experts.py`, the rest in `contrib_small.py`. The schemas are those of
onnxruntime, which is also the oracle of the tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from transmuter_async.operators.activation import gelu_20
from transmuter_async.operators.context import Context
from transmuter_async.operators.convolution import conv_1
from transmuter_async.operators.matrix import gemm_11
from transmuter_async.operators.numeric import device_index, matmul, narrow, sigmoid, widen
from transmuter_async.operators.registry import is_host, operator, xp

__all__ = ["activated", "layer_norm", "rms_norm", "row_mean"]

MICROSOFT = "com.microsoft"


# --- activations ------------------------------------------------------------------------------------------------------


@operator("Gelu", since_version=1, domain=MICROSOFT)
def gelu_1(X: Any, /) -> Any:
    """The exact Gelu, through erf."""
    return gelu_20(X)


@operator("BiasGelu", since_version=1, domain=MICROSOFT)
def bias_gelu_1(A: Any, B: Any, /) -> Any:
    """Exact Gelu of `A + B`, B along the last axis; the sum is not rounded to a narrow dtype in between."""
    return narrow(gelu_20(widen(A) + widen(B)), A.dtype)


@operator("FastGelu", since_version=1, domain=MICROSOFT)
def fast_gelu_1(X: Any, bias: Any = None, /) -> Any:
    """Gelu of `X + bias` by its tanh approximation."""
    x = widen(X) if bias is None else widen(X) + widen(bias)
    return narrow(gelu_20(x, approximate="tanh"), X.dtype)


@operator("QuickGelu", since_version=1, domain=MICROSOFT)
def quick_gelu_1(X: Any, /, *, alpha: float = 1.7020000219345093) -> Any:
    """`x * sigmoid(alpha * x)`; alpha 1 is SiLU."""
    x = widen(X)
    return narrow(x * sigmoid(x * x.dtype.type(alpha)), X.dtype)


@operator("BiasSplitGelu", since_version=1, domain=MICROSOFT)
def bias_split_gelu_1(X: Any, bias: Any, /) -> Any:
    """The left half of `X + bias` times the Gelu of the right half, `(N, S, D)` to `(N, S, D / 2)`."""
    x = widen(X) + widen(bias)
    if x.shape[-1] % 2:
        raise ValueError(f"the last axis of X has the odd size {x.shape[-1]}")
    half = x.shape[-1] // 2
    return narrow(x[..., :half] * gelu_20(x[..., half:]), X.dtype)


@operator("BiasAdd", since_version=1, domain=MICROSOFT)
def bias_add_1(X: Any, bias: Any, skip: Any, /) -> Any:
    """`X + bias + skip`, the bias along the last axis."""
    return narrow(widen(X) + widen(bias) + widen(skip), X.dtype)


@operator("ScaledSiLU", since_version=1, domain=MICROSOFT)
def scaled_si_lu_1(X: Any, scale: Any = None, /, *, alpha: float = 1.0) -> Any:
    """SiLU of `scale * X`, rounded to the dtype of X after the scaling, after the sigmoid and at the end."""
    factor = np.float32(alpha) if scale is None else widen(scale).reshape(()).astype(np.float32)
    z = narrow(widen(X) * factor, X.dtype)
    return narrow(widen(z) * widen(narrow(sigmoid(widen(z)), X.dtype)), X.dtype)


def activated(x: Any, name: str | None, params: Sequence[float] = ()) -> Any:
    """A fused activation by its ONNX name; `params` are its alpha, beta, gamma in order, where not the defaults."""
    m = xp(x)

    def param(index: int, default: float) -> Any:
        return x.dtype.type(params[index] if index < len(params) else default)

    zero = m.zeros_like(x)
    match name:
        case None | "" | "Identity":
            return x
        case "Relu":
            return m.maximum(x, zero)
        case "Tanh":
            return m.tanh(x)
        case "Sigmoid" | "Logistic":
            return sigmoid(x)
        case "LeakyRelu":
            return m.where(x >= 0, x, param(0, 0.01) * x)
        case "Clip":
            return m.clip(x, param(0, -np.inf), param(1, np.inf))
        case "HardSigmoid":
            return m.clip(param(0, 0.2) * x + param(1, 0.5), x.dtype.type(0), x.dtype.type(1))
        case "HardSwish":
            return x * m.clip(x / x.dtype.type(6) + x.dtype.type(0.5), x.dtype.type(0), x.dtype.type(1))
        case "Elu":
            return m.where(x > 0, x, param(0, 1.0) * m.expm1(m.minimum(x, zero)))
        case "Selu":
            low = param(0, 1.6732632) * m.expm1(m.minimum(x, zero))
            return param(1, 1.0507010) * m.where(x > 0, x, low)
        case "Softplus":
            return m.logaddexp(x, zero)
        case "ParametricSoftplus":
            return param(0, 1.0) * m.logaddexp(param(1, 1.0) * x, zero)
        case "Softsign":
            return x / (1 + m.abs(x))
        case "ThresholdedRelu":
            return m.where(x > param(0, 1.0), x, zero)
        case "ScaledTanh":
            return param(0, 1.0) * m.tanh(param(1, 1.0) * x)
    raise ValueError(f"the activation {name!r} is not known")


# --- normalisation ----------------------------------------------------------------------------------------------------


def row_mean(x: Any, platform: str) -> Any:
    """Mean over the last axis, which stays with size 1.

    On the CPU as a product with a column of 1/n: XLA does not vectorise a sum along a row, but it does vectorise this.
    """
    size = x.shape[-1]
    if is_host(x) or platform != "cpu" or size == 0:
        return x.mean(-1, keepdims=True)
    return jnp.matmul(x, jnp.full((size, 1), 1 / size, x.dtype))


def layer_norm(x: Any, gamma: Any, beta: Any, epsilon: float, platform: str) -> tuple[Any, Any, Any]:
    """`(normalised, mean, 1 / deviation)` of wide `x` over its last axis; `gamma` and `beta` may be None."""
    if x.shape[-1] == 0:
        empty = xp(x).zeros((*x.shape[:-1], 1), x.dtype)
        return x, empty, empty
    mean = row_mean(x, platform)
    centred = x - mean
    inverse = 1 / xp(x).sqrt(row_mean(centred * centred, platform) + x.dtype.type(epsilon))
    y = centred * inverse
    y = y if gamma is None else y * widen(gamma)
    return (y if beta is None else y + widen(beta)), mean, inverse


def rms_norm(x: Any, gamma: Any, epsilon: float, platform: str) -> tuple[Any, Any]:
    """`(normalised, 1 / root mean square)` of wide `x` over its last axis; `gamma` may be None."""
    if x.shape[-1] == 0:
        return x, xp(x).zeros((*x.shape[:-1], 1), x.dtype)
    inverse = 1 / xp(x).sqrt(row_mean(x * x, platform) + x.dtype.type(epsilon))
    y = x * inverse
    return (y if gamma is None else y * widen(gamma)), inverse


def _flat(x: Any, axis: int) -> tuple[Any, tuple[int, ...]]:
    """`x` with all axes from `axis` on in one, and its shape."""
    axis = axis + x.ndim if axis < 0 else axis
    if not 0 <= axis < max(1, x.ndim):
        raise ValueError(f"axis {axis} is out of range for rank {x.ndim}")
    size = int(np.prod(x.shape[axis:], dtype=np.int64))
    return x.reshape(*x.shape[:axis], size), x.shape


@operator("SimplifiedLayerNormalization", since_version=1)
def simplified_layer_normalization_1(
    X: Any,
    scale: Any,
    /,
    *,
    axis: int = -1,
    epsilon: float = 9.999999747378752e-06,
    stash_type: int = 1,
    context: Context,
) -> tuple[Any, Any]:
    """RMS normalisation as onnxruntime's exports put it into the standard domain, long before RMSNormalization-23."""
    rows, shape = _flat(widen(X), axis)
    y, inverse = rms_norm(rows, scale.reshape(-1), epsilon, context.platform)
    inverse = inverse.reshape(*shape[: rows.ndim - 1], *(1,) * (len(shape) - rows.ndim + 1))
    return narrow(y.reshape(shape), scale.dtype), inverse


def _sum_with_skip(input: Any, skip: Any, bias: Any) -> Any:
    if skip.ndim > input.ndim or skip.shape != input.shape[input.ndim - skip.ndim :]:
        np.broadcast_shapes(input.shape, skip.shape)
    total = widen(input) + widen(skip)
    if total.shape != input.shape:
        raise ValueError(f"skip of shape {tuple(skip.shape)} does not fit the input of shape {tuple(input.shape)}")
    return total if bias is None else total + widen(bias)


@operator("SkipLayerNormalization", since_version=1, domain=MICROSOFT)
def skip_layer_normalization_1(
    input: Any,
    skip: Any,
    gamma: Any,
    beta: Any = None,
    bias: Any = None,
    /,
    *,
    epsilon: float = 9.999999960041972e-13,
    context: Context,
) -> tuple[Any, Any, Any, Any]:
    """LayerNorm of `input + skip + bias`, its mean, inverse deviation, and that sum. Narrow floats sum in float32."""
    total = _sum_with_skip(input, skip, bias)
    y, mean, inverse = layer_norm(total, gamma, beta, epsilon, context.platform)
    return narrow(y, input.dtype), mean, inverse, narrow(total, input.dtype)


@operator("SkipSimplifiedLayerNormalization", since_version=1, domain=MICROSOFT)
def skip_simplified_layer_normalization_1(
    input: Any,
    skip: Any,
    gamma: Any,
    bias: Any = None,
    /,
    *,
    epsilon: float = 9.999999960041972e-13,
    context: Context,
) -> tuple[Any, Any, Any, Any]:
    """RMS norm of `input + skip + bias`; the second output (a mean) stays 0 as there is none; the last is the sum."""
    total = _sum_with_skip(input, skip, bias)
    y, inverse = rms_norm(total, gamma, epsilon, context.platform)
    return narrow(y, input.dtype), xp(total).zeros_like(inverse), inverse, narrow(total, input.dtype)


@operator("EmbedLayerNormalization", since_version=1, domain=MICROSOFT)
def embed_layer_normalization_1(
    input_ids: Any,
    segment_ids: Any,
    word_embedding: Any,
    position_embedding: Any,
    segment_embedding: Any,
    gamma: Any,
    beta: Any,
    mask: Any = None,
    position_ids: Any = None,
    /,
    *,
    epsilon: float = 9.999999960041972e-13,
    mask_index_type: int | None = None,
    context: Context,
) -> tuple[Any, Any, Any]:
    """LayerNorm of word + position + segment embedding; the number of ones in each row of the mask; the sum."""
    total = embedded(input_ids, word_embedding, "input_ids", context)
    batch, length = input_ids.shape
    if position_ids is None:
        if length > position_embedding.shape[0]:
            raise ValueError(f"{length} tokens, but there are only {position_embedding.shape[0]} positions")
        total = total + widen(position_embedding[:length])
    else:
        total = total + embedded(position_ids, position_embedding, "position_ids", context)
    if segment_embedding is not None and segment_ids is not None:
        total = total + embedded(segment_ids, segment_embedding, "segment_ids", context)
    y, _, _ = layer_norm(total, gamma, beta, epsilon, context.platform)
    return narrow(y, gamma.dtype), mask_counts(mask, batch), narrow(total, gamma.dtype)


def embedded(ids: Any, table: Any, name: str, context: Context) -> Any:
    """Rows of a wide embedding table."""
    rows, valid = context.bounded(ids, table.shape[0], input=name, axis=0)
    found = xp(rows, table).take(table, device_index(rows, table.shape[0]), axis=0, mode="clip")
    return widen(found if valid is None else context.fill_invalid(found, valid[..., None]))


def mask_counts(mask: Any, batch: int) -> Any:
    """How many ones each row of an attention mask has, int32; zeros without a mask."""
    if mask is None:
        return np.zeros(batch, np.int32)
    return (mask == 1).sum(1, dtype=np.int32)


@operator("GroupNorm", since_version=1, domain=MICROSOFT)
def group_norm_1(
    X: Any,
    gamma: Any,
    beta: Any,
    /,
    *,
    activation: int,
    channels_last: int = 1,
    epsilon: float = 9.999999747378752e-06,
    groups: int,
) -> Any:
    """Group normalisation of (N, H, W, C), or (N, C, H, W) with `channels_last=0`; `activation=1` is SiLU."""
    return _group_norm(widen(X), gamma, beta, activation, channels_last, epsilon, groups, X.dtype)


@operator("SkipGroupNorm", since_version=1, domain=MICROSOFT)
def skip_group_norm_1(
    X: Any,
    gamma: Any,
    beta: Any,
    skip: Any,
    bias: Any = None,
    /,
    *,
    activation: int,
    channels_last: int = 1,
    epsilon: float = 9.999999747378752e-06,
    groups: int,
) -> tuple[Any, Any]:
    """Group normalisation of `X + skip + bias`, and that sum. `skip` is (N, H, W, C), (N, 1, 1, C) or (N, C)."""
    channel = X.ndim - 1 if channels_last else 1
    shape = tuple(-1 if axis == channel else 1 for axis in range(X.ndim))
    if skip.ndim == 2:
        skip = skip.reshape(skip.shape[0], *shape[1:])
    total = widen(X) + widen(skip)
    if bias is not None:
        total = total + widen(bias).reshape(shape)
    y = _group_norm(total, gamma, beta, activation, channels_last, epsilon, groups, X.dtype)
    return y, narrow(total, X.dtype)


def _group_norm(
    x: Any, gamma: Any, beta: Any, activation: int, channels_last: int, epsilon: float, groups: int, dtype: Any
) -> Any:
    if activation not in (0, 1):
        raise ValueError(f"activation is {activation}, but has to be 0 (none) or 1 (SiLU)")
    m = xp(x)
    x = x if channels_last else m.moveaxis(x, 1, -1)
    channels = x.shape[-1]
    if groups < 1 or channels % groups:
        raise ValueError(f"{channels} channels do not fall into {groups} groups")
    parts = x.reshape(x.shape[0], -1, groups, channels // groups)
    mean = parts.mean((1, 3), keepdims=True)
    centred = parts - mean
    variance = (centred * centred).mean((1, 3), keepdims=True)
    y = (centred / m.sqrt(variance + x.dtype.type(epsilon))).reshape(x.shape) * widen(gamma) + widen(beta)
    y = y * sigmoid(y) if activation else y
    return narrow(y if channels_last else m.moveaxis(y, -1, 1), dtype)


# --- matrix products --------------------------------------------------------------------------------------------------


def _oriented(x: Any, trans: int, batch: int) -> Any:
    """`x` with its first axis moved before the last one (`batch`), and the last two swapped (`trans`); rank 1 stays."""
    m = xp(x)
    if x.ndim < 2:
        return x
    if batch and x.ndim > 2:
        x = m.moveaxis(x, 0, -2)
    return m.swapaxes(x, -1, -2) if trans else x


@operator("FusedMatMul", since_version=1, domain=MICROSOFT)
def fused_mat_mul_1(
    A: Any,
    B: Any,
    /,
    *,
    alpha: float = 1.0,
    transA: int = 0,
    transB: int = 0,
    transBatchA: int = 0,
    transBatchB: int = 0,
    context: Context,
) -> Any:
    """`alpha` times the matrix product of the possibly transposed operands."""
    a, b = _oriented(A, transA, transBatchA), _oriented(B, transB, transBatchB)
    product = matmul(widen(a), widen(b), context.platform)
    return narrow(product if alpha == 1 else product * product.dtype.type(alpha), A.dtype)


@operator("TransposeMatMul", since_version=1, domain=MICROSOFT)
def transpose_mat_mul_1(
    A: Any, B: Any, /, *, alpha: float = 1.0, transA: int = 0, transB: int = 0, context: Context
) -> Any:
    """The older name of FusedMatMul."""
    return fused_mat_mul_1(A, B, alpha=alpha, transA=transA, transB=transB, context=context)


@operator("FusedMatMulActivation", since_version=1, domain=MICROSOFT)
def fused_mat_mul_activation_1(
    A: Any,
    B: Any,
    /,
    *,
    activation: str,
    activation_alpha: float | None = None,
    activation_axis: int | None = None,
    activation_beta: float | None = None,
    activation_gamma: float | None = None,
    alpha: float = 1.0,
    transA: int = 0,
    transB: int = 0,
    transBatchA: int = 0,
    transBatchB: int = 0,
    context: Context,
) -> Any:
    """FusedMatMul, then an activation."""
    y = fused_mat_mul_1(
        widen(A),
        widen(B),
        alpha=alpha,
        transA=transA,
        transB=transB,
        transBatchA=transBatchA,
        transBatchB=transBatchB,
        context=context,
    )
    return narrow(activated(y, activation, _given(activation_alpha, activation_beta, activation_gamma)), A.dtype)


def _given(*params: float | None) -> tuple[float, ...]:
    """The leading parameters that are given."""
    found: list[float] = []
    for value in params:
        if value is None:
            break
        found.append(value)
    return tuple(found)


@operator("FusedGemm", since_version=1, domain=MICROSOFT)
def fused_gemm_1(
    A: Any,
    B: Any,
    C: Any = None,
    /,
    *,
    activation: str | None = None,
    activation_alpha: float | None = None,
    activation_beta: float | None = None,
    activation_gamma: float | None = None,
    alpha: float = 1.0,
    beta: float = 1.0,
    transA: int = 0,
    transB: int = 0,
    context: Context,
) -> Any:
    """Gemm, then an activation."""
    c = None if C is None else widen(C)
    y = gemm_11(widen(A), widen(B), c, alpha=alpha, beta=beta, transA=transA, transB=transB, context=context)
    return narrow(activated(y, activation, _given(activation_alpha, activation_beta, activation_gamma)), A.dtype)


@operator("GemmFastGelu", since_version=1, domain=MICROSOFT)
def gemm_fast_gelu_1(X: Any, W: Any, bias: Any = None, /, *, context: Context) -> Any:
    """FastGelu of `X W + bias`."""
    return narrow(fast_gelu_1(matmul(widen(X), widen(W), context.platform), bias), X.dtype)


@operator("FusedConv", since_version=1, domain=MICROSOFT)
def fused_conv_1(
    X: Any,
    W: Any,
    B: Any = None,
    Z: Any = None,
    /,
    *,
    activation: str | None = None,
    activation_params: Sequence[float] | None = None,
    auto_pad: str = "NOTSET",
    dilations: Sequence[int] | None = None,
    group: int = 1,
    kernel_shape: Sequence[int] | None = None,
    pads: Sequence[int] | None = None,
    strides: Sequence[int] | None = None,
    context: Context,
) -> Any:
    """Conv, plus Z, then an activation; narrow floats are rounded once, at the end."""
    y = conv_1(
        widen(X),
        widen(W),
        None if B is None else widen(B),
        auto_pad=auto_pad,
        dilations=dilations,
        group=group,
        kernel_shape=kernel_shape,
        pads=pads,
        strides=strides,
        context=context,
    )
    y = y if Z is None else y + widen(Z)
    return narrow(activated(y, activation, activation_params or ()), X.dtype)


def _channels_first(x: Any) -> Any:
    return xp(x).moveaxis(x, -1, 1)


@operator("NhwcConv", since_version=1, domain=MICROSOFT)
def nhwc_conv_1(
    X: Any,
    W: Any,
    B: Any = None,
    /,
    *,
    auto_pad: str = "NOTSET",
    dilations: Sequence[int] | None = None,
    group: int = 1,
    kernel_shape: Sequence[int] | None = None,
    pads: Sequence[int] | None = None,
    strides: Sequence[int] | None = None,
    context: Context,
) -> Any:
    """Conv of (N, H, W, C) with filters (M, H, W, C / group)."""
    y = conv_1(
        _channels_first(X),
        _channels_first(W),
        B,
        auto_pad=auto_pad,
        dilations=dilations,
        group=group,
        kernel_shape=kernel_shape,
        pads=pads,
        strides=strides,
        context=context,
    )
    return xp(y).moveaxis(y, 1, -1)


@operator("NhwcFusedConv", since_version=1, domain=MICROSOFT)
def nhwc_fused_conv_1(
    X: Any,
    W: Any,
    B: Any = None,
    Z: Any = None,
    /,
    *,
    activation: str | None = None,
    activation_params: Sequence[float] | None = None,
    auto_pad: str = "NOTSET",
    dilations: Sequence[int] | None = None,
    group: int = 1,
    kernel_shape: Sequence[int] | None = None,
    pads: Sequence[int] | None = None,
    strides: Sequence[int] | None = None,
    context: Context,
) -> Any:
    """FusedConv of (N, H, W, C). Unlike NhwcConv's, its filters stay (M, C / group, H, W)."""
    y = fused_conv_1(
        _channels_first(X),
        W,
        B,
        None if Z is None else _channels_first(Z),
        activation=activation,
        activation_params=activation_params,
        auto_pad=auto_pad,
        dilations=dilations,
        group=group,
        kernel_shape=kernel_shape,
        pads=pads,
        strides=strides,
        context=context,
    )
    return xp(y).moveaxis(y, 1, -1)
