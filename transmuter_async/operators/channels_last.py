"""Values that keep their channels as the last axis in memory, and how operators compute on them.

ONNX has images as (N, C, *sizes). On a CPU convolutions, pooling and everything between them are faster as (N, *sizes, C):
channels are then what one vector instruction works on. A convolution that gains from it gives a `ChannelsLast` value; the
operators with a rule here take and give such values, every other reader gets the plain value, transposed. So a
transposition is computed only where a chain of these operators begins or ends.

A rule returns None where it does not apply: then the definition computes on plain values, and says what is wrong where
something is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from transmuter_async.operators.context import Context
from transmuter_async.operators.convolution_forms import Filters, channels_last, transposed_channels_last
from transmuter_async.operators.numeric import is_float, narrow, spatial, widen
from transmuter_async.operators.registry import Operator, invoke
from transmuter_async.operators.windows import separable, windows

__all__ = ["ChannelsLast", "keep_channels_last"]

NAME = "channels last"


class ChannelsLast:
    """A traced value of shape (N, C, *sizes) that is held as (N, *sizes, C).

    Attributes:
        array: As it is held.
        width: How many axes the channels take. Two while a shuffle of channels has them split: (N, A, B, *sizes).
    """

    __slots__ = ("array", "width")

    def __init__(self, array: Any, width: int = 1) -> None:
        self.array = array
        self.width = width

    @property
    def shape(self) -> tuple[int, ...]:
        """As the graph has it."""
        batch, *others = self.array.shape
        split = len(others) - self.width
        return (batch, *others[split:], *others[:split])

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return int(self.array.ndim)

    @property
    def dtype(self) -> Any:
        """Of the elements."""
        return self.array.dtype

    def plain(self) -> Any:
        """The value as the graph has it."""
        return jnp.moveaxis(self.array, range(-self.width, 0), range(1, 1 + self.width))


@dataclass(frozen=True, slots=True)
class _Call:
    """A node about to be computed: its definition, its inputs as they lie, and what else the definition takes."""

    definition: Operator
    values: Sequence[Any]
    attributes: dict[str, Any]
    runner: dict[str, Any]

    @property
    def context(self) -> Context:
        found: Context = self.runner["context"]
        return found

    def value(self, index: int) -> Any:
        """An input, None where it is left out."""
        return self.values[index] if index < len(self.values) else None

    def defaulted(self, name: str) -> Any:
        """An attribute, or its default."""
        return self.attributes.get(name, self.definition.attributes.get(name))

    def invoke(self, values: Sequence[Any], attributes: dict[str, Any] | None = None) -> tuple[Any, ...]:
        """The definition, on other inputs and attributes."""
        given = self.attributes if attributes is None else attributes
        return invoke(self.definition, values, given, self.runner)


Rule = Callable[[_Call], "tuple[Any, ...] | None"]
_RULES: dict[str, Rule] = {}


def _rule(*names: str) -> Callable[[Rule], Rule]:
    def register(rule: Rule) -> Rule:
        _RULES.update(dict.fromkeys(names, rule))
        return rule

    return register


def keep_channels_last(
    definition: Operator, values: Sequence[Any], attributes: dict[str, Any], runner: dict[str, Any]
) -> tuple[Any, ...] | None:
    """Compute a node on values that keep their channels last.

    Args:
        definition: Of its operator.
        values: Of its inputs, some of them `ChannelsLast`.
        attributes: As for `invoke`.
        runner: As for `invoke`: `n_outputs` and `context`.

    Returns:
        Its outputs; None where it has to be computed on plain values.
    """
    rule = None if definition.domain else _RULES.get(definition.name)
    if rule is None:
        return None
    held = [value for value in values if isinstance(value, ChannelsLast)]
    if definition.name != "Conv" and not held:
        return None
    if definition.name not in ("Reshape", "Transpose") and any(value.width > 1 for value in held):
        return None
    outputs = rule(_Call(definition, values, attributes, runner))
    if outputs is not None:
        runner["context"].lowers(NAME)
    return outputs


def _lies(value: Any) -> Any:
    """A value of full rank with its channels last, moved there if need be."""
    return value.array if isinstance(value, ChannelsLast) else jnp.moveaxis(value, 1, -1)


def _where(axis: int, rank: int) -> int:
    """Where an axis of the graph lies."""
    axis %= rank
    return rank - 1 if axis == 1 else axis - (axis > 1)


def _is_known(*values: Any) -> bool:
    return all(value is None or isinstance(value, np.ndarray) for value in values)


# --- element by element ---------------------------------------------------------------------------------------------------


@_rule(
    *("Abs", "Acos", "Acosh", "Add", "And", "Asin", "Asinh", "Atan", "Atanh", "Cast", "Ceil", "Celu", "Clip", "Cos", "Cosh"),
    *("Div", "Elu", "Equal", "Erf", "Exp", "Floor", "Gelu", "Greater", "GreaterOrEqual", "HardSigmoid", "HardSwish"),
    *("Identity", "LeakyRelu", "Less", "LessOrEqual", "Log", "Max", "Mean", "Min", "Mish", "Mul", "Neg", "Not", "Or", "PRelu"),
    *("Pow", "Reciprocal", "Relu", "Round", "Selu", "Sigmoid", "Sign", "Sin", "Sinh", "Softplus", "Softsign", "Sqrt", "Sub"),
    *("Sum", "Tan", "Tanh", "ThresholdedRelu", "Where", "Xor"),
)  # fmt: skip
def _elementwise(call: _Call) -> tuple[Any, ...] | None:
    """Operands are broadcast as in numpy, so all get the rank of the result before their channels are moved."""
    if "broadcast" in call.definition.attributes or "consumed_inputs" in call.definition.attributes:
        return None  # before version 7
    rank, *others = {value.ndim for value in call.values if isinstance(value, ChannelsLast)}
    if others:
        return None
    ready: list[Any] = []
    for value in call.values:
        if isinstance(value, ChannelsLast):
            ready.append(value.array)
        elif value is None:
            ready.append(None)
        elif not isinstance(value, (np.ndarray, jax.Array)) or value.ndim > rank or value.dtype == object:
            return None
        elif value.size == 1 and value.ndim < 2:
            ready.append(value)
        else:
            ready.append(call.context.prepared(value, NAME, rank))
    return tuple(ChannelsLast(y) for y in call.invoke(ready))


@_rule("BatchNormalization")
def _batch_normalization(call: _Call) -> tuple[Any, ...] | None:
    """In inference: what each channel is multiplied by is made of the parameters once."""
    if len(call.values) != 5 or any(value is None or value.ndim != 1 for value in call.values[1:]):
        return None
    if (
        call.runner.get("n_outputs", 1) != 1
        or call.attributes.get("training_mode")
        or call.attributes.get("spatial") == 0
    ):
        return None
    x = call.values[0].array if isinstance(call.values[0], ChannelsLast) else None
    if x is None or any(value.shape[0] != x.shape[-1] for value in call.values[1:]):
        return None
    scale, bias, mean, var = call.values[1:]
    wide = widen(x)
    if any(widen(value).dtype != wide.dtype for value in call.values[1:]):
        return None
    factor = call.context.prepared((scale, var), "deviation", float(call.defaulted("epsilon")))
    y = (wide - widen(call.context.prepared(mean, "same"))) * factor + widen(call.context.prepared(bias, "same"))
    return (ChannelsLast(narrow(y, x.dtype)),)


@_rule("Dropout")
def _dropout(call: _Call) -> tuple[Any, ...] | None:
    """Where nothing is dropped; what is drawn lies as the graph has it."""
    training = call.value(2)
    if "is_test" in call.definition.attributes:  # before version 7
        drops = not call.defaulted("is_test")
    else:
        drops = training is not None and (not isinstance(training, np.ndarray) or bool(training.any()))
    held = call.values[0]
    if drops or not isinstance(held, ChannelsLast):
        return None
    _, *mask = call.invoke([held.array, *call.values[1:]])
    return (held, *(ones.reshape(held.shape) for ones in mask))


# --- windows --------------------------------------------------------------------------------------------------------------


@_rule("Conv")
def _conv(call: _Call) -> tuple[Any, ...] | None:
    x, weights, bias = call.value(0), call.value(1), call.value(2)
    held = isinstance(x, ChannelsLast)
    if not (held or isinstance(x, jax.Array)) or not isinstance(weights, (np.ndarray, jax.Array)):
        return None
    if x.ndim not in (3, 4) or weights.ndim != x.ndim or 0 in x.shape or 0 in weights.shape or not is_float(x.dtype):
        return None
    group, kernel = call.defaulted("group"), tuple(weights.shape[2:])
    wanted = call.attributes.get("kernel_shape")
    if group < 1 or x.shape[1] != weights.shape[1] * group or weights.shape[0] % group:
        return None
    if (wanted and tuple(wanted) != kernel) or (bias is not None and bias.shape != (weights.shape[0],)):
        return None
    # Where nothing is held yet, only what XLA itself would transpose for is worth a transposition.
    if not held and (math.prod(kernel) == 1 or (group > 1 and weights.shape[1] <= 8)):
        return None
    geometry: dict[str, Any] = {name: call.attributes.get(name) for name in ("strides", "dilations", "pads")}
    w = windows(x.shape, kernel, **geometry, auto_pad=call.defaulted("auto_pad"))
    if 0 in w.outputs:
        return None
    y = channels_last(widen(_lies(x)), Filters(weights, call.context), w, group, call.context)
    if bias is not None:
        y = y + widen(call.context.prepared(bias, "same"))
    return (ChannelsLast(narrow(y, x.dtype)),)


@_rule("ConvTranspose")
def _conv_transpose(call: _Call) -> tuple[Any, ...] | None:
    """Plain attributes only: pads, strides, dilations, output_padding; one group."""
    x, weights, bias = call.value(0), call.value(1), call.value(2)
    if not isinstance(x, ChannelsLast) or not isinstance(weights, (np.ndarray, jax.Array)) or not is_float(x.dtype):
        return None
    if weights.ndim != x.ndim or x.shape[1] != weights.shape[0] or 0 in x.shape or 0 in weights.shape:
        return None
    if call.defaulted("group") != 1 or call.attributes.get("output_shape") or call.defaulted("auto_pad") != "NOTSET":
        return None
    kernel, wanted = tuple(weights.shape[2:]), call.attributes.get("kernel_shape")
    if (wanted and tuple(wanted) != kernel) or (bias is not None and bias.shape != (weights.shape[1],)):
        return None
    rank = x.ndim - 2
    steps = spatial(call.attributes.get("strides"), rank, 1, "strides")
    dilate = spatial(call.attributes.get("dilations"), rank, 1, "dilations")
    extra = spatial(call.attributes.get("output_padding"), rank, 0, "output_padding")
    pads = spatial(call.attributes.get("pads"), 2 * rank, 0, "pads")
    crop = tuple(more - after for more, after in zip(extra, pads[rank:], strict=True))
    sizes = zip(x.shape[2:], steps, dilate, kernel, pads, crop, strict=False)
    if min((n - 1) * s + (k - 1) * d + 1 - low + more for n, s, d, k, low, more in sizes) < 1:
        return None
    turned = call.context.prepared(weights, "filters last")  # (*kernel, M, C)
    y = transposed_channels_last(widen(x.array), turned, steps, dilate, pads[:rank], crop)
    if bias is not None:
        y = y + widen(call.context.prepared(bias, "same"))
    return (ChannelsLast(narrow(y, x.dtype)),)


@_rule("MaxPool", "AveragePool")
def _pool(call: _Call) -> tuple[Any, ...] | None:
    (x,) = call.values
    if not isinstance(x, ChannelsLast) or not is_float(x.dtype) or call.runner.get("n_outputs", 1) > 1 or 0 in x.shape:
        return None
    geometry: dict[str, Any] = {name: call.attributes.get(name) for name in ("strides", "dilations", "pads")}
    w = windows(
        x.shape,
        call.attributes["kernel_shape"],
        **geometry,
        auto_pad=call.defaulted("auto_pad"),
        ceil_mode=call.defaulted("ceil_mode") or 0,
        partial=True,
    )
    if 0 in w.outputs or not call.context.lowers("separable"):
        return None
    if call.definition.name == "MaxPool":
        return (ChannelsLast(separable(x.array, w, jnp.maximum, -np.inf, first=1)),)
    total = separable(widen(x.array), w, jnp.add, first=1)
    counts = np.maximum(w.counts(bool(call.defaulted("count_include_pad"))), 1).astype(total.dtype)
    return (ChannelsLast(narrow(total / counts[..., None], x.dtype)),)


# --- all of the spatial axes ------------------------------------------------------------------------------------------------


def _spatial_mean(x: ChannelsLast) -> Any:
    """(N, 1, C), as a product with a constant row."""
    rows = widen(x.array).reshape(x.array.shape[0], -1, x.array.shape[-1])
    weights = jnp.full((rows.shape[0], 1, rows.shape[1]), 1.0 / rows.shape[1], rows.dtype)
    return narrow(jnp.matmul(weights, rows), x.dtype)


@_rule("GlobalAveragePool")
def _global_average_pool(call: _Call) -> tuple[Any, ...] | None:
    (x,) = call.values
    if 0 in x.shape or not is_float(x.dtype):
        return None
    return (ChannelsLast(_spatial_mean(x).reshape(x.shape[0], *(1,) * (x.ndim - 2), x.shape[1])),)


@_rule("GlobalMaxPool")
def _global_max_pool(call: _Call) -> tuple[Any, ...] | None:
    (x,) = call.values
    if 0 in x.shape:
        return None
    return (ChannelsLast(x.array.max(axis=tuple(range(1, x.ndim - 1)), keepdims=True)),)


@_rule("ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin")
def _reduce(call: _Call) -> tuple[Any, ...] | None:
    x, given = call.value(0), call.value(1)
    if not isinstance(x, ChannelsLast) or not _is_known(given) or 0 in x.shape:
        return None
    axes = call.attributes.get("axes") if given is None else given.reshape(-1)
    if axes is None or len(axes) == 0 or any(not -x.ndim <= axis < x.ndim for axis in axes):
        return None
    over = {int(axis) % x.ndim for axis in axes}
    keep = call.defaulted("keepdims")
    whole = over == set(range(2, x.ndim))
    if not keep and not whole and 1 not in over:
        return None
    if whole and call.definition.name == "ReduceMean" and is_float(x.dtype):
        mean = _spatial_mean(x)
        shape = (x.shape[0], *(1,) * (x.ndim - 2), x.shape[1])
        return (ChannelsLast(mean.reshape(shape)),) if keep else (mean.reshape(x.shape[:2]),)
    moved = [_where(axis, x.ndim) for axis in sorted(over)]
    if given is None:
        outputs = call.invoke([x.array], {**call.attributes, "axes": moved})
    else:
        outputs = call.invoke([x.array, np.asarray(moved, np.int64)])
    return tuple(map(ChannelsLast, outputs)) if keep else outputs


# --- moves ------------------------------------------------------------------------------------------------------------------


@_rule("Concat")
def _concat(call: _Call) -> tuple[Any, ...] | None:
    rank = next(value.ndim for value in call.values if isinstance(value, ChannelsLast))
    axis = call.attributes.get("axis", 1)
    if not -rank <= axis < rank:
        return None
    if any(not isinstance(value, (ChannelsLast, jax.Array)) or value.ndim != rank for value in call.values):
        return None
    attributes = {**call.attributes, "axis": _where(axis, rank)}
    return tuple(map(ChannelsLast, call.invoke([_lies(value) for value in call.values], attributes)))


@_rule("Split")
def _split(call: _Call) -> tuple[Any, ...] | None:
    x = call.value(0)
    axis = call.defaulted("axis")
    if not isinstance(x, ChannelsLast) or not _is_known(*call.values[1:]) or not -x.ndim <= axis < x.ndim:
        return None
    attributes = {**call.attributes, "axis": _where(axis, x.ndim)}
    return tuple(map(ChannelsLast, call.invoke([x.array, *call.values[1:]], attributes)))


@_rule("Softmax", "LogSoftmax")
def _softmax(call: _Call) -> tuple[Any, ...] | None:
    x = call.value(0)
    axis = call.defaulted("axis")
    # Until version 13 the axes from `axis` on are one.
    if call.definition.since_version < 13 or not -x.ndim <= axis < x.ndim:
        return None
    return tuple(map(ChannelsLast, call.invoke([x.array], {**call.attributes, "axis": _where(axis, x.ndim)})))


@_rule("Slice")
def _slice(call: _Call) -> tuple[Any, ...] | None:
    """With starts, ends, axes and steps as inputs that are known, since version 10."""
    x, axes = call.value(0), call.value(3)
    if call.definition.since_version < 10 or not isinstance(x, ChannelsLast) or not _is_known(*call.values[1:]):
        return None
    if len(call.values) < 3 or (axes is not None and any(not -x.ndim <= axis < x.ndim for axis in axes)):
        return None
    named = list(range(len(call.values[1]))) if axes is None else [int(axis) for axis in axes]
    moved = np.asarray([_where(axis, x.ndim) for axis in named], np.int64)
    values = [x.array, call.values[1], call.values[2], moved, *call.values[4:]]
    return tuple(map(ChannelsLast, call.invoke(values)))


@_rule("Transpose")
def _transpose(call: _Call) -> tuple[Any, ...] | None:
    (x,) = call.values
    order = call.attributes.get("perm") or tuple(reversed(range(x.ndim)))
    if sorted(order) != list(range(x.ndim)):
        return None
    if x.width == 2:
        if tuple(order) != (0, 2, 1, *range(3, x.ndim)):
            return None
        return (ChannelsLast(jnp.swapaxes(x.array, -1, -2), 2),)
    return call.invoke([x.array], {"perm": [_where(axis, x.ndim) for axis in order]})


def _with_sizes(x: ChannelsLast, sizes: Sequence[int]) -> ChannelsLast:
    """Other spatial axes for the same elements: their order is that of the graph."""
    return ChannelsLast(x.array.reshape(x.shape[0], *sizes, x.shape[1]))


@_rule("Squeeze", "Unsqueeze")
def _spatial_ones(call: _Call) -> tuple[Any, ...] | None:
    """Where a spatial axis stays, and axes of one element come or go among them."""
    x, given = call.value(0), call.value(1)
    if not isinstance(x, ChannelsLast) or not _is_known(given):
        return None
    axes = call.attributes.get("axes") if given is None else [int(axis) for axis in given.reshape(-1)]
    adds = call.definition.name == "Unsqueeze"
    if axes is None or not (adds or axes):
        return None  # all axes of one element
    rank = x.ndim + len(axes) if adds else x.ndim
    over = sorted({axis % rank for axis in axes if -rank <= axis < rank})
    if len(over) != len(axes) or (over and over[0] < 2):
        return None
    sizes = list(x.shape[2:])
    for axis in over if adds else reversed(over):
        if adds:
            sizes.insert(axis - 2, 1)
        elif sizes.pop(axis - 2) != 1:
            return None
    return (_with_sizes(x, sizes),) if sizes else None


@_rule("Reshape")
def _reshape(call: _Call) -> tuple[Any, ...] | None:
    """One that splits the channels in two axes or joins them again, as a shuffle of channels does, or of the spatial axes alone."""
    x, wanted = call.value(0), call.value(1)
    if wanted is None:
        wanted = np.asarray(call.attributes.get("shape", ()), np.int64)
    if (
        not isinstance(x, ChannelsLast)
        or not isinstance(wanted, np.ndarray)
        or 0 in x.shape
        or call.attributes.get("allowzero")
    ):
        return None
    dims = [x.shape[i] if n == 0 and i < x.ndim else int(n) for i, n in enumerate(wanted.reshape(-1))]
    known = math.prod(n for n in dims if n != -1)
    total = math.prod(x.shape)
    if dims.count(-1) == 1 and known and total % known == 0:
        dims[dims.index(-1)] = total // known
        known = total
    batch, sizes = x.shape[0], x.shape[1 + x.width :]
    if x.width == 2 and tuple(dims) == (batch, total // (batch * math.prod(sizes)), *sizes):
        return (ChannelsLast(x.array.reshape(batch, *sizes, -1)),)
    if x.width == 1 and len(dims) == x.ndim + 1 and (dims[0], *dims[3:]) == (batch, *sizes) and min(dims) > 0:
        if dims[1] * dims[2] == x.shape[1]:
            return (ChannelsLast(x.array.reshape(batch, *sizes, dims[1], dims[2]), 2),)
    if x.width == 1 and len(dims) > 2 and tuple(dims[:2]) == x.shape[:2] and min(dims) > 0 and known == total:
        return (_with_sizes(x, dims[2:]),)
    return None


@_rule("Resize")
def _resize(call: _Call) -> tuple[Any, ...] | None:
    x, *others = call.values
    if not isinstance(x, ChannelsLast) or not _is_known(*others) or call.attributes.get("axes") is not None:
        return None

    def moved(value: Any) -> Any:
        if value is None or value.size not in (x.ndim, 2 * x.ndim):
            return value
        parts = [np.concatenate([half[:1], half[2:], half[1:2]]) for half in value.reshape(-1, x.ndim)]
        return np.concatenate(parts)

    return tuple(map(ChannelsLast, call.invoke([x.array, *map(moved, others)])))


@_rule("Pad")
def _pad(call: _Call) -> tuple[Any, ...] | None:
    x, pads, value, axes = (call.value(i) for i in range(4))
    if call.definition.since_version < 11 or axes is not None or not isinstance(x, ChannelsLast):
        return None
    if not isinstance(pads, np.ndarray) or pads.shape != (2 * x.ndim,) or not (value is None or value.size == 1):
        return None
    moved = np.concatenate([np.concatenate([half[:1], half[2:], half[1:2]]) for half in pads.reshape(2, -1)])
    return tuple(map(ChannelsLast, call.invoke([x.array, moved, *call.values[2:]])))
