"""Bounds of what padding computes: where an operator is undefined, padding may give NaN, or be refused by the operator.

A state carries the interval that its elements lie in. `undefined` tells whether an operator may leave its domain on
such elements: the square root and the logarithm of what may be negative, a division by what may be zero. `span_after`
gives the interval of a result; it is exact enough to follow a variance through a normalisation that is written out.
Sources: ai.onnx 1 to 24.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from transmuter_async.graph import Node, dtype_of

__all__ = ["EVERYTHING", "Span", "hull", "kind_of_dtype", "may_be_zero", "span_after", "span_of_array", "undefined"]

Span = tuple[float, float]
EVERYTHING: Span = (-math.inf, math.inf)

SMALL = 1e-6
"""A product of positive numbers below this may underflow to zero in half precision."""

BOUNDED: dict[str, Span] = {
    **dict.fromkeys(("Sigmoid", "HardSigmoid", "IsNaN", "IsInf"), (0.0, 1.0)),
    **dict.fromkeys(
        ("Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Not", "And", "Or", "Xor"), (0.0, 1.0)
    ),
    **dict.fromkeys(("Tanh", "Erf", "Sin", "Cos", "Sign", "Softsign"), (-1.0, 1.0)),
    **dict.fromkeys(("Relu", "Exp", "Sqrt", "Softplus", "ThresholdedRelu"), (0.0, math.inf)),
}


def kind_of_dtype(dtype: np.dtype | None) -> str:
    """Either "f", "i" or "b"; "" for anything else. Floats of ml_dtypes have kind "V" or "f"."""
    if dtype is None or dtype.hasobject:
        return ""
    if dtype.kind in "fib":
        return dtype.kind
    if dtype.kind == "u":
        return "i"
    return "f" if dtype.name.startswith(("bfloat", "float")) else ""


def hull(spans: Sequence[Span]) -> Span:
    """The interval that holds all of them."""
    return min(low for low, _ in spans), max(high for _, high in spans)


def may_be_zero(span: Span) -> bool:
    """Whether zero lies in it."""
    return span[0] <= 0 <= span[1]


def span_of_array(array: np.ndarray) -> Span:
    """From the smallest to the largest element."""
    if not array.size or array.dtype.hasobject or array.dtype.kind == "c":
        return EVERYTHING
    low, high = float(np.min(array)), float(np.max(array))
    return EVERYTHING if math.isnan(low) or math.isnan(high) else (low, high)


def undefined(node: Node, spans: Sequence[Span], kinds: Sequence[str]) -> bool:
    """Whether the operator may give NaN or infinity for finite elements within these bounds.

    Overflow does not count: arithmetic that is finite on data is taken to be finite on padding.
    """
    op, (low, high) = node.op_type, spans[0]
    if op == "Log":
        return low <= 0
    if op == "Sqrt":
        return low < 0
    if op == "Reciprocal":
        return may_be_zero(spans[0])
    if op in ("Div", "Mod"):
        return may_be_zero(spans[1])
    if op in ("Asin", "Acos"):
        return low < -1 or high > 1
    if op == "Atanh":
        return low <= -1 or high >= 1
    if op == "Acosh":
        return low < 1
    if op == "Pow":
        exponent = spans[1]
        whole = exponent[0] == exponent[1] and exponent[0] == int(exponent[0]) if math.isfinite(exponent[0]) else False
        whole = whole or (len(kinds) > 1 and kinds[1] == "i")
        return not (low > 0 or (exponent[0] >= 0 and (whole or low >= 0)))
    return False


def span_after(node: Node, spans: Sequence[Span], kinds: Sequence[str], same: bool) -> Span:
    """The interval of an elementwise result.

    Args:
        node: Its operator and attributes.
        spans: Of the operands.
        kinds: Of their dtypes, "" where it is not known: then it may be an integer, which may wrap.
        same: Whether the first two operands are one value.
    """
    op = node.op_type
    real = bool(kinds) and all(kind == "f" for kind in kinds)
    if op in BOUNDED:
        return BOUNDED[op]
    (low, high) = spans[0]
    if op == "Identity":
        return spans[0]
    if op in ("Floor", "Ceil", "Round"):
        return (math.floor(low) if math.isfinite(low) else low, math.ceil(high) if math.isfinite(high) else high)
    if op == "Where":
        return hull(spans[1:3])
    if op in ("Max", "Min"):
        pick = max if op == "Max" else min
        return pick(s[0] for s in spans), pick(s[1] for s in spans)
    if op == "Clip":
        bounds = [*spans[1:], EVERYTHING, EVERYTHING][:2]
        if len(spans) == 1:  # until opset 10 its bounds are attributes
            found = (float(node.attributes.get("min", -math.inf)), float(node.attributes.get("max", math.inf)))  # type: ignore[arg-type]
            bounds = [(found[0], found[0]), (found[1], found[1])]
            return min(max(low, found[0]), found[1]), min(max(high, found[0]), found[1])
        if len(node.inputs) < 3 or not all(node.inputs[1:3]):
            if len(node.inputs) > 1 and node.inputs[1]:
                return max(low, bounds[0][0]), max(high, bounds[0][1])
            return min(low, bounds[0][0]), min(high, bounds[0][1])
        return min(max(low, bounds[0][0]), bounds[1][0]), min(max(high, bounds[0][1]), bounds[1][1])
    if op == "Cast":
        return _cast(node, spans[0], kinds[0])
    if op == "Abs" and real:
        return (0.0 if may_be_zero(spans[0]) else min(abs(low), abs(high))), max(abs(low), abs(high))
    if op == "Neg" and real:
        return -high, -low
    if op == "Pow" and kinds[0] == "f":
        exponent = spans[1]
        even = exponent[0] == exponent[1] and math.isfinite(exponent[0]) and exponent[0] % 2 == 0
        return (0.0, math.inf) if even or low >= 0 else EVERYTHING
    if op in ("Add", "Sum", "Sub", "Mean", "Mul", "Div"):
        return _arithmetic(op, spans, real, same)
    return EVERYTHING


def _arithmetic(op: str, spans: Sequence[Span], real: bool, same: bool) -> Span:
    if op == "Mul" and same and real and len(spans) == 2:
        return 0.0, math.inf
    if op == "Div":
        positive = real and all(low >= 0 for low, _ in spans)
        return (0.0, math.inf) if positive else EVERYTHING
    total = spans[0]
    for low, high in spans[1:]:
        if op == "Mul":
            ends = [_times(a, b) for a in total for b in (low, high)]
            total = (min(ends), max(ends))
            if 0 < total[0] < SMALL:
                total = (0.0, total[1])
            if -SMALL < total[1] < 0:
                total = (total[0], 0.0)
        elif op == "Sub":
            total = (total[0] - high, total[1] - low)
        else:
            total = (total[0] + low, total[1] + high)
    if op == "Mean":
        total = (total[0] / len(spans), total[1] / len(spans))
    if any(math.isnan(end) for end in total):
        return EVERYTHING
    return total if real or (_exact(total) and all(_exact(span) for span in spans)) else EVERYTHING


def _times(a: float, b: float) -> float:
    return 0.0 if a == 0 or b == 0 else a * b


def _exact(span: Span) -> bool:
    """Whether integers within it fit every type, those of 8 bits and unsigned ones included."""
    return span[0] >= 0 and span[1] <= 127


def _cast(node: Node, span: Span, kind: str) -> Span:
    to = dtype_of(int(node.attributes["to"]))  # type: ignore[call-overload]
    into = kind_of_dtype(to)
    if into == "b":
        return 0.0, 1.0
    if into == "f":
        return (0.0, span[1]) if to.itemsize < 4 and 0 < span[0] < SMALL else span
    if into != "i" or not all(map(math.isfinite, span)):
        return EVERYTHING
    limits = np.iinfo(to) if to.kind in "iu" else None
    low, high = math.trunc(span[0]), math.trunc(span[1])
    return (low, high) if limits is not None and limits.min <= low and high <= limits.max else EVERYTHING
