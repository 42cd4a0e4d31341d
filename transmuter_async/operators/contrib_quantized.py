"""com.microsoft: quantised products, convolutions, attention and LSTM.

Sums of products of 8-bit values are exact, as in `quantization.py`; what follows them (scaling, rounding) happens in
float32. Elementwise and pooling operators are in `contrib_quantized_elements.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from transmuter_async.operators.context import Context
from transmuter_async.operators.contrib import embedded, layer_norm, mask_counts
from transmuter_async.operators.contrib_attention import projected, split_projection
from transmuter_async.operators.numeric import narrow, widen
from transmuter_async.operators.quantization import (
    dequantize_linear_23,
    dynamic_quantize_linear_11,
    integer_product,
    q_linear_conv_10,
    quantize_linear_23,
    requantize,
    shifted,
)
from transmuter_async.operators.recipes import RECIPES
from transmuter_async.operators.recurrence import (
    clipper,
    finish,
    gate_functions,
    initial_state,
    recur,
    row_lengths,
    run,
)
from transmuter_async.operators.registry import is_host, operator, xp

MICROSOFT = "com.microsoft"


@operator("QuantizeLinear", since_version=1, domain=MICROSOFT)
def quantize_linear_1(
    x: Any, y_scale: Any, y_zero_point: Any = None, /, *, axis: int | None = None, context: Context
) -> Any:
    """The standard's QuantizeLinear, from before it knew 16 and 4 bits. Without `axis` one scale is for the whole tensor."""
    if axis is None:
        y_scale = _one(y_scale, "y_scale", context)
        y_zero_point = None if y_zero_point is None else _one(y_zero_point, "y_zero_point", context)
    return quantize_linear_23(x, y_scale, y_zero_point, axis=axis or 0, context=context)


@operator("DequantizeLinear", since_version=1, domain=MICROSOFT)
def dequantize_linear_1(
    x: Any, x_scale: Any, x_zero_point: Any = None, /, *, axis: int | None = None, context: Context
) -> Any:
    """The standard's DequantizeLinear. Without `axis` one scale is for the whole tensor."""
    if axis is None:
        x_scale = _one(x_scale, "x_scale", context)
        x_zero_point = None if x_zero_point is None else _one(x_zero_point, "x_zero_point", context)
    return dequantize_linear_23(x, x_scale, x_zero_point, axis=axis or 0, context=context)


def _one(value: Any, name: str, context: Context) -> Any:
    if value.size != 1:
        raise context.error(f"{name} has {value.size} elements; without axis there is one for the whole tensor")
    return value.reshape(())


def _column(value: Any) -> Any:
    """A scale or zero point of the columns of a right factor: a scalar, or along the last axis."""
    if value is None or value.ndim <= 1:
        return value.reshape(()) if value is not None and value.size == 1 else value
    return xp(value).expand_dims(value, -2) if value.shape[-2] != 1 else value


def _product(a: Any, b: Any, a_zero: Any, b_zero: Any) -> Any:
    """Exact `(a - a_zero) @ (b - b_zero)` of 8-bit values, int32."""
    left, left_limit = shifted(a, None if a_zero is None else a_zero.reshape(()) if a_zero.size == 1 else a_zero)
    right, right_limit = shifted(b, _column(b_zero))
    return integer_product(left, right, left_limit, right_limit)


@operator("DynamicQuantizeMatMul", since_version=1, domain=MICROSOFT)
def dynamic_quantize_mat_mul_1(
    A: Any, B: Any, b_scale: Any, b_zero_point: Any = None, bias: Any = None, /, *, context: Context
) -> Any:
    """`A`, quantised to uint8 by the range of all its values, times an 8-bit matrix."""
    quantised, scale, zero = dynamic_quantize_linear_11(A, context=context)
    y = _product(quantised, B, zero, b_zero_point).astype(np.float32) * (scale * _column(b_scale))
    return y if bias is None else y + bias


@operator("MatMulIntegerToFloat", since_version=1, domain=MICROSOFT)
def mat_mul_integer_to_float_1(
    A: Any,
    B: Any,
    a_scale: Any,
    b_scale: Any,
    a_zero_point: Any = None,
    b_zero_point: Any = None,
    bias: Any = None,
    /,
) -> Any:
    """MatMulInteger, scaled and with a bias; scales and zero points of B for all or for each column."""
    scales = _column(widen(a_scale)) * _column(widen(b_scale))
    y = _product(A, B, a_zero_point, b_zero_point).astype(np.float32) * scales
    return narrow(y if bias is None else y + widen(bias), a_scale.dtype)


@operator("MatMulInteger16", since_version=1, domain=MICROSOFT)
def mat_mul_integer16_1(A: Any, B: Any, /) -> Any:
    """Matrix product of 16-bit integers, summed in 32 bits; unsigned where both are."""
    both = A.dtype.kind == B.dtype.kind == "u"
    dtype = np.uint32 if both else np.int32
    return xp(A, B).matmul(A.astype(dtype), B.astype(dtype))


@operator("MulInteger", since_version=1, domain=MICROSOFT)
def mul_integer_1(A: Any, A_zero_point: Any, B: Any, B_zero_point: Any = None, /) -> Any:
    """Elementwise product of 8-bit integers less their zero points, int32."""
    a, b = A.astype(np.int32), B.astype(np.int32)
    a = a if A_zero_point is None else a - A_zero_point.astype(np.int32).reshape(())
    return a * (b if B_zero_point is None else b - B_zero_point.astype(np.int32).reshape(()))


@operator("ReduceSumInteger", since_version=1, domain=MICROSOFT)
def reduce_sum_integer_1(data: Any, /, *, axes: tuple[int, ...], keepdims: int) -> Any:
    """Sum of 8-bit integers in 32 bits."""
    return xp(data).sum(
        data, axis=tuple(axes), keepdims=bool(keepdims), dtype=np.uint32 if data.dtype == np.uint8 else np.int32
    )


@operator("QGemm", since_version=1, domain=MICROSOFT)
def q_gemm_1(
    A: Any,
    a_scale: Any,
    a_zero_point: Any,
    B: Any,
    b_scale: Any,
    b_zero_point: Any,
    C: Any = None,
    y_scale: Any = None,
    y_zero_point: Any = None,
    /,
    *,
    alpha: float = 1.0,
    transA: int = 0,
    transB: int = 0,
) -> Any:
    """`alpha * a_scale * b_scale * (A B + C)`, as float32, or quantised where an output scale is given."""
    a, b = A.T if transA else A, B.T if transB else B
    total = _product(a, b, a_zero_point, b_zero_point)
    if C is not None:
        total = total + C
    scales = np.float32(alpha) * a_scale.reshape(()) * _column(b_scale)
    if y_scale is None:
        return total.astype(np.float32) * scales
    zero = np.zeros((), A.dtype) if y_zero_point is None else y_zero_point.reshape(())
    return requantize(total, scales / y_scale.reshape(()), zero, np.dtype(zero.dtype))


@operator("QLinearConv", since_version=1, domain=MICROSOFT)
def q_linear_conv_1(
    x: Any,
    x_scale: Any,
    x_zero_point: Any,
    w: Any,
    w_scale: Any,
    w_zero_point: Any,
    y_scale: Any,
    y_zero_point: Any,
    B: Any = None,
    /,
    *,
    auto_pad: str = "NOTSET",
    channels_last: int = 0,
    dilations: Sequence[int] | None = None,
    group: int = 1,
    kernel_shape: Sequence[int] | None = None,
    pads: Sequence[int] | None = None,
    strides: Sequence[int] | None = None,
    context: Context,
) -> Any:
    """The standard's QLinearConv, with channels last where asked; the filters stay (M, C / group, *kernel)."""
    y = q_linear_conv_10(
        xp(x).moveaxis(x, -1, 1) if channels_last else x,
        x_scale,
        x_zero_point,
        w,
        w_scale,
        w_zero_point,
        y_scale,
        y_zero_point,
        B,
        auto_pad=auto_pad,
        dilations=dilations,
        group=group,
        kernel_shape=kernel_shape,
        pads=pads,
        strides=strides,
        context=context,
    )
    return xp(y).moveaxis(y, 1, -1) if channels_last else y


# --- attention and embeddings -----------------------------------------------------------------------------------------


@operator("QAttention", since_version=1, domain=MICROSOFT)
def q_attention_1(
    input: Any,
    weight: Any,
    bias: Any,
    input_scale: Any,
    weight_scale: Any,
    mask_index: Any = None,
    input_zero_point: Any = None,
    weight_zero_point: Any = None,
    past: Any = None,
    /,
    *,
    do_rotary: int | None = None,
    mask_filter_value: float | None = None,
    num_heads: int,
    past_present_share_buffer: int | None = None,
    scale: float | None = None,
    unidirectional: int = 0,
    context: Context,
) -> tuple[Any, Any]:
    """Attention whose projection is an integer product; everything after it is float."""
    if do_rotary or past_present_share_buffer:
        raise context.error("do_rotary and past_present_share_buffer are not supported: there are no inputs for them")
    total = _product(input, weight, input_zero_point, weight_zero_point).astype(np.float32)
    qkv = total * (widen(input_scale).reshape(()) * _column(widen(weight_scale)))
    q, k, v = split_projection(qkv, bias, None, num_heads)
    attributes = {
        "context": context,
        "mask_filter_value": mask_filter_value,
        "past_present_share_buffer": 0,
        "scale": scale,
        "unidirectional": unidirectional,
    }
    return projected(
        q, k, v, bias.dtype, mask=mask_index, past=past, bias=None, past_length=None, attributes=attributes
    )


@operator("QEmbedLayerNormalization", since_version=1, domain=MICROSOFT)
def q_embed_layer_normalization_1(
    input_ids: Any,
    segment_ids: Any,
    word_embedding_quant: Any,
    position_embedding_quant: Any,
    segment_embedding: Any,
    gamma_quant: Any,
    beta_quant: Any,
    mask: Any,
    word_embedding_scale: Any,
    position_embedding_scale: Any,
    segment_embedding_scale: Any,
    gamma_scale: Any,
    beta_scale: Any,
    word_embedding_zero_point: Any,
    position_embedding_zero_point: Any,
    segment_embedding_zero_point: Any,
    gamma_zero_point: Any,
    beta_zero_point: Any,
    /,
    *,
    epsilon: float = 9.999999960041972e-13,
    context: Context,
) -> tuple[Any, Any]:
    """EmbedLayerNormalization over 8-bit tables, dequantised row by row."""

    def plain(table: Any, scale: Any, zero: Any) -> Any:
        codes = table.astype(np.float32)
        return (codes if zero is None else codes - zero.reshape(()).astype(np.float32)) * scale.reshape(())

    batch, length = input_ids.shape
    words = embedded(input_ids, word_embedding_quant, "input_ids", context)
    total = plain(words, word_embedding_scale, word_embedding_zero_point)
    if length > position_embedding_quant.shape[0]:
        raise ValueError(f"{length} tokens, but there are only {position_embedding_quant.shape[0]} positions")
    total = total + plain(position_embedding_quant[:length], position_embedding_scale, position_embedding_zero_point)
    if segment_embedding is not None and segment_ids is not None:
        segments = embedded(segment_ids, segment_embedding, "segment_ids", context)
        total = total + plain(segments, segment_embedding_scale, segment_embedding_zero_point)
    gamma = plain(gamma_quant, gamma_scale, gamma_zero_point)
    beta = plain(beta_quant, beta_scale, beta_zero_point)
    y, _, _ = layer_norm(total, gamma, beta, epsilon, context.platform)
    return y, mask_counts(mask, batch)


# --- LSTM -------------------------------------------------------------------------------------------------------------


@operator("DynamicQuantizeLSTM", since_version=1, domain=MICROSOFT, loops=True)
def dynamic_quantize_lstm_1(
    X: Any,
    W: Any,
    R: Any,
    B: Any,
    sequence_lens: Any,
    initial_h: Any,
    initial_c: Any,
    P: Any,
    W_scale: Any,
    W_zero_point: Any,
    R_scale: Any,
    R_zero_point: Any,
    /,
    *,
    activation_alpha: Sequence[float] | None = None,
    activation_beta: Sequence[float] | None = None,
    activations: Sequence[str] | None = None,
    clip: float | None = None,
    direction: str = "forward",
    hidden_size: int | None = None,
    input_forget: int = 0,
    context: Context,
) -> tuple[Any, Any, Any]:
    """LSTM with 8-bit weights `(directions, inputs, 4 * hidden)`.

    Its inputs are quantised by the range of all of X, its hidden state by its range at each step, in each direction.
    """
    known = {"forward": (0,), "reverse": (1,), "bidirectional": (0, 1)}
    if direction not in known:
        raise ValueError(f"direction {direction!r} is none of forward, reverse, bidirectional")
    backwards = known[direction]
    directions, hidden = len(backwards), R.shape[1]
    time, batch, _ = X.shape
    m = xp(X, W, R, W_scale, R_scale)
    w, w_by = _gate_weights(X, W, W_scale, W_zero_point, context)
    r, r_by = _gate_weights(X, R, R_scale, R_zero_point, context)
    lengths, order = row_lengths(sequence_lens, time, batch, context)
    levels, scale = _levels(X.reshape(1, -1))
    flat = levels.reshape(time * batch, X.shape[2])
    each = [m.matmul(flat, w[d]) * (scale.reshape(()) * w_by[d]) for d in range(directions)]
    inputs = m.stack([part.reshape(time, batch, 4 * hidden) for part in each], axis=1)
    if B is not None:
        inputs = inputs + (B[:, : 4 * hidden] + B[:, 4 * hidden :])[:, None]
    inputs = _turned(inputs, backwards, order)
    names = ("Sigmoid", "Tanh", "Tanh")
    gate, candidate, output = gate_functions(activations, activation_alpha, activation_beta, names, directions)
    bound = clipper(clip)
    peep = None if P is None else [P[:, None, i * hidden : (i + 1) * hidden] for i in range(3)]

    def step(now: Any, states: tuple[Any, ...]) -> tuple[Any, ...]:
        h, c = states
        q, by = _levels(h.reshape(directions, -1))
        total = now + recur(q.reshape(h.shape), r) * (by[..., None] * r_by)
        i, o, f, g = (total[..., n * hidden : (n + 1) * hidden] for n in range(4))
        if peep is None:
            # One call for the three gates: three small ones cost more than their arithmetic.
            gates = gate(bound(total[..., : 3 * hidden]))
            i, o, f = (gates[..., n * hidden : (n + 1) * hidden] for n in range(3))
        else:
            i, f = gate(bound(i + peep[0] * c)), gate(bound(f + peep[2] * c))
        if input_forget:
            f = 1 - i
        new = f * c + i * candidate(bound(g))
        if peep is not None:
            o = gate(bound(o + peep[1] * new))
        return o * output(new), new

    start = tuple(initial_state(s, directions, batch, hidden, 0, inputs) for s in (initial_h, initial_c))
    Y, states = run(inputs, start, step, lengths, backwards, order)
    Y, Y_h, Y_c = finish(Y, states, 0, X.dtype)
    return Y, Y_h, Y_c


def _gate_weights(x: Any, weights: Any, scale: Any, zero: Any, context: Context) -> tuple[Any, Any]:
    """Weights less their zero points, as float32 integers, and the scales `(directions, 1, 1 or 4 * hidden)`."""
    recipe, both = "less origins", (weights, zero)
    levels = RECIPES[recipe](*both) if is_host(x, *both) else context.prepared(both, recipe)
    return levels, scale.reshape(scale.shape[0], 1, -1)


def _levels(x: Any) -> tuple[Any, Any]:
    """Rows quantised dynamically to uint8: levels less the zero point, as float32, and the scale `(rows, 1)`."""
    m = xp(x)
    one, top = x.dtype.type(1), x.dtype.type(255)
    low = m.min(x, axis=1, keepdims=True, initial=x.dtype.type(0))
    high = m.max(x, axis=1, keepdims=True, initial=x.dtype.type(0))
    scale = m.where(high == low, one, (high - low) / top)
    zero = m.round(m.clip(-low / scale, x.dtype.type(0), top))
    return m.clip(m.round(x / scale) + zero, x.dtype.type(0), top) - zero, scale


def _turned(inputs: Any, backwards: tuple[int, ...], order: Any) -> Any:
    """The steps `(time, directions, batch, ...)` in the order in which each direction reads them."""
    m = xp(inputs, order)
    lanes = []
    for d, back in enumerate(backwards):
        lane = inputs[:, d]
        if back and order is None:
            lane = m.flip(lane, axis=0)
        elif back:
            lane = m.take_along_axis(lane, order[..., None], axis=0)
        lanes.append(lane)
    return m.stack(lanes, axis=1)
