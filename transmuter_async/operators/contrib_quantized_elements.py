"""com.microsoft: elementwise and pooling operators on 8-bit tensors.

Each is "dequantise, compute in float32, quantise". onnxruntime folds the scales together first, so a value that lies on
the border between two levels may come out one level apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from transmuter_async.operators.context import Context
from transmuter_async.operators.numeric import sigmoid, softmax
from transmuter_async.operators.pooling import average_pool_10, max_pool_10
from transmuter_async.operators.quantization import dequantize, quantize
from transmuter_async.operators.registry import operator, xp
from transmuter_async.operators.windows import windows

MICROSOFT = "com.microsoft"
FLOAT32 = np.dtype(np.float32)


def _plain(x: Any, scale: Any, zero_point: Any) -> Any:
    return dequantize(x, scale.reshape(()), None if zero_point is None else zero_point.reshape(()))


def _level(x: Any, scale: Any, zero_point: Any, dtype: Any) -> Any:
    zero = None if zero_point is None else zero_point.reshape(()).astype(np.int32)
    return quantize(x, scale.reshape(()), zero, np.dtype(dtype), FLOAT32)


@operator("QLinearAdd", since_version=1, domain=MICROSOFT)
def q_linear_add_1(
    A: Any,
    A_scale: Any,
    A_zero_point: Any,
    B: Any,
    B_scale: Any,
    B_zero_point: Any,
    C_scale: Any,
    C_zero_point: Any = None,
    /,
) -> Any:
    """Quantised sum with broadcasting."""
    total = _plain(A, A_scale, A_zero_point) + _plain(B, B_scale, B_zero_point)
    return _level(total, C_scale, C_zero_point, A.dtype)


@operator("QLinearMul", since_version=1, domain=MICROSOFT)
def q_linear_mul_1(
    A: Any,
    A_scale: Any,
    A_zero_point: Any,
    B: Any,
    B_scale: Any,
    B_zero_point: Any,
    C_scale: Any,
    C_zero_point: Any = None,
    /,
) -> Any:
    """Quantised product with broadcasting."""
    product = _plain(A, A_scale, A_zero_point) * _plain(B, B_scale, B_zero_point)
    return _level(product, C_scale, C_zero_point, A.dtype)


@operator("QLinearSigmoid", since_version=1, domain=MICROSOFT)
def q_linear_sigmoid_1(X: Any, X_scale: Any, X_zero_point: Any, Y_scale: Any, Y_zero_point: Any = None, /) -> Any:
    """Quantised sigmoid."""
    return _level(sigmoid(_plain(X, X_scale, X_zero_point)), Y_scale, Y_zero_point, X.dtype)


@operator("QLinearLeakyRelu", since_version=1, domain=MICROSOFT)
def q_linear_leaky_relu_1(
    X: Any,
    X_scale: Any,
    X_zero_point: Any,
    Y_scale: Any,
    Y_zero_point: Any = None,
    /,
    *,
    alpha: float = 0.009999999776482582,
) -> Any:
    """Quantised LeakyRelu."""
    x = _plain(X, X_scale, X_zero_point)
    return _level(xp(x).where(x >= 0, x, np.float32(alpha) * x), Y_scale, Y_zero_point, X.dtype)


@operator("QLinearSoftmax", since_version=1, domain=MICROSOFT)
def q_linear_softmax_1(
    X: Any,
    X_scale: Any,
    x_zero_point: Any,
    y_scale: Any,
    y_zero_point: Any,
    /,
    *,
    axis: int = -1,
    opset: int,
) -> Any:
    """Quantised softmax, along `axis` (opset 13 and above) or over all axes from it on."""
    x = _plain(X, X_scale, x_zero_point)
    if not -x.ndim <= axis < max(1, x.ndim):
        raise ValueError(f"axis {axis} is out of range for rank {x.ndim}")
    if opset < 13 and x.size:
        flat = x.reshape(int(np.prod(x.shape[: axis % x.ndim], dtype=np.int64)), -1)
        y = softmax(flat).reshape(x.shape)
    else:
        y = softmax(x, axis)
    return _level(y, y_scale, y_zero_point, X.dtype)


@operator("QLinearConcat", since_version=1, domain=MICROSOFT)
def q_linear_concat_1(Y_scale: Any, Y_zero_point: Any, /, *inputs: Any, axis: int) -> Any:
    """Tensors of different scales side by side; the inputs are triples of tensor, scale and zero point."""
    if len(inputs) % 3:
        raise ValueError(f"the inputs have to be triples, but there are {len(inputs)}")
    parts = [_plain(*inputs[i : i + 3]) for i in range(0, len(inputs), 3)]
    return _level(xp(*parts).concatenate(parts, axis=axis), Y_scale, Y_zero_point, Y_zero_point.dtype)


@operator("QLinearWhere", since_version=1, domain=MICROSOFT)
def q_linear_where_1(
    condition: Any,
    X: Any,
    x_scale: Any,
    x_zero_point: Any,
    Y: Any,
    y_scale: Any,
    y_zero_point: Any,
    z_scale: Any,
    z_zero_point: Any,
    /,
) -> Any:
    """Quantised choice with broadcasting."""
    x, y = _plain(X, x_scale, x_zero_point), _plain(Y, y_scale, y_zero_point)
    return _level(xp(condition, x, y).where(condition, x, y), z_scale, z_zero_point, X.dtype)


@operator("QLinearReduceMean", since_version=1, domain=MICROSOFT)
def q_linear_reduce_mean_1(
    data: Any,
    data_scale: Any,
    data_zero_point: Any,
    reduced_scale: Any,
    reduced_zero_point: Any = None,
    /,
    *,
    axes: tuple[int, ...],
    keepdims: int,
) -> Any:
    """Quantised mean over some axes."""
    mean = xp(data).mean(_plain(data, data_scale, data_zero_point), axis=tuple(axes), keepdims=bool(keepdims))
    return _level(mean, reduced_scale, reduced_zero_point, data.dtype)


@operator("QLinearAveragePool", since_version=1, domain=MICROSOFT)
def q_linear_average_pool_1(
    X: Any,
    x_scale: Any,
    x_zero_point: Any,
    y_scale: Any,
    y_zero_point: Any = None,
    /,
    *,
    auto_pad: str = "NOTSET",
    ceil_mode: int = 0,
    channels_last: int = 0,
    count_include_pad: int = 0,
    kernel_shape: Sequence[int],
    pads: Sequence[int] | None = None,
    strides: Sequence[int] | None = None,
    context: Context,
) -> Any:
    """AveragePool of the dequantised tensor. With `count_include_pad` every window is divided by the kernel's size.

    So also one that `ceil_mode` lets reach beyond the padding, as in onnxruntime (AveragePool-19 counts less there).
    """
    x = _plain(X, x_scale, x_zero_point)
    x = xp(x).moveaxis(x, -1, 1) if channels_last else x
    y = average_pool_10(
        x,
        auto_pad=auto_pad,
        ceil_mode=ceil_mode,
        count_include_pad=count_include_pad,
        kernel_shape=kernel_shape,
        pads=pads,
        strides=strides,
        context=context,
    )
    if count_include_pad and ceil_mode:
        w = windows(x.shape, kernel_shape, strides=strides, dilations=None, pads=pads, auto_pad=auto_pad, ceil_mode=1)
        y = y * (w.counts(True) / np.prod(kernel_shape)).astype(np.float32)
    return _level(xp(y).moveaxis(y, 1, -1) if channels_last else y, y_scale, y_zero_point, X.dtype)


@operator("QLinearGlobalAveragePool", since_version=1, domain=MICROSOFT)
def q_linear_global_average_pool_1(
    X: Any, x_scale: Any, x_zero_point: Any, y_scale: Any, y_zero_point: Any, /, *, channels_last: int = 0
) -> Any:
    """The mean of each channel: the exact sum of the integers, scaled once."""
    axes = tuple(range(1, X.ndim - 1)) if channels_last else tuple(range(2, X.ndim))
    count = int(np.prod([X.shape[axis] for axis in axes], dtype=np.int64))
    if count == 0:
        raise ValueError(f"X of shape {tuple(X.shape)} has channels without elements, so that there is no mean")
    total = X.astype(np.int32).sum(axes, keepdims=True, dtype=np.int32)
    total = total - x_zero_point.reshape(()).astype(np.int32) * np.int32(count)
    return _level(total.astype(np.float32) * (x_scale.reshape(()) / np.float32(count)), y_scale, y_zero_point, X.dtype)


@operator("NhwcMaxPool", since_version=1, domain=MICROSOFT)
def nhwc_max_pool_1(
    x: Any,
    /,
    *,
    auto_pad: str = "NOTSET",
    ceil_mode: int = 0,
    dilations: Sequence[int] | None = None,
    kernel_shape: Sequence[int],
    pads: Sequence[int] | None = None,
    strides: Sequence[int] | None = None,
    context: Context,
) -> Any:
    """MaxPool of 8-bit (N, *sizes, C)."""
    result = max_pool_10(
        xp(x).moveaxis(x, -1, 1),
        auto_pad=auto_pad,
        ceil_mode=ceil_mode,
        dilations=dilations,
        kernel_shape=kernel_shape,
        pads=pads,
        strides=strides,
        n_outputs=1,
        context=context,
    )
    y = result[0] if isinstance(result, tuple) else result
    return xp(y).moveaxis(y, 1, -1)
