"""Whether a mask leaves data alone: what becomes, step by step, of an element that the mask's input says is data.

A finite mask hides padding only beside something that it does not hide. So it is not enough to know what a mask puts on
padding; it must be known to leave at least one true position of each row alone. Two assumptions are followed side by
side: the input holds a 1 there, and the input holds anything else than its padding. Along an axis of sizes (a causal mask)
the position is the first one. A call is then held to the assumption under which the mask lets go.

A `Live` is `("point", value)`; `("score", base)`: `base` and a finite score; `("other", fill)`: any number but the fill; or
`("unknown",)`. Sources: ai.onnx 1 to 24.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from transmuter_async.compiler.axes_spans import kind_of_dtype
from transmuter_async.graph import Node, dtype_of

__all__ = ["LEAST", "ONE_AND_OTHER", "SCORE", "UNKNOWN", "Live", "lets_go", "live_after", "point"]

Live = tuple[Any, ...]
UNKNOWN: Live = ("unknown",)
LEAST = -5000.0
"""A score of data, with a mask that lets go, lies above this: half of what `MASK` puts below it."""

LARGE_FACTOR = 1000.0
SCORE: Live = ("score", 0.0)
ONE_AND_OTHER = 2
"""How many assumptions are followed."""


def point(value: Any) -> Live:
    """A known number, with its dtype."""
    return "point", np.asarray(value).reshape(())


def lets_go(live: Live) -> bool:
    """Whether an element with this value is seen beside masked ones."""
    return live[0] in ("point", "score") and float(np.asarray(live[1]).astype(np.float64)) > LEAST


def live_after(node: Node, lives: Sequence[Live], evaluate: Callable[[Node, Sequence[Any]], Any]) -> Live:
    """What an elementwise operator makes of them.

    Args:
        node: Its operator.
        lives: Of the operands that are there, in order.
        evaluate: Gives the operator's result on known scalars, None where it refuses them.
    """
    op, kinds = node.op_type, [live[0] for live in lives]
    if op == "Where" and kinds[0] == "point":
        return lives[1] if bool(lives[0][1]) else lives[2]
    if op == "Identity":
        return lives[0]
    if kinds and all(kind == "point" for kind in kinds):
        if len(lives) != sum(map(bool, node.inputs)):
            return UNKNOWN
        scalars = iter(lives)
        found = evaluate(node, [next(scalars)[1] if name else None for name in node.inputs])
        return UNKNOWN if found is None else point(found)
    if op in ("And", "Or"):
        settled = op == "Or"
        return (
            point(np.bool_(settled))
            if any(k == "point" and bool(v[1]) == settled for k, v in zip(kinds, lives, strict=True))
            else UNKNOWN
        )
    if op == "Equal" and sorted(kinds) == ["other", "point"]:
        other, known = sorted(lives, key=lambda live: live[0])
        return point(np.False_) if bool(other[1] == known[1]) else UNKNOWN
    if op == "Cast" and kinds == ["other"]:
        to = dtype_of(int(node.attributes["to"]))  # type: ignore[call-overload]
        if to.kind == "b":
            return point(np.True_) if not lives[0][1] else UNKNOWN
        wide = to.itemsize >= 4 and kind_of_dtype(to) == "f"
        return ("other", lives[0][1].astype(to)) if wide or to == np.int64 else UNKNOWN
    if op in ("Cast", "CastLike") and kinds[0] == "score":
        return lives[0]
    if not all(kind in ("point", "score") for kind in kinds):
        return UNKNOWN
    bases = [float(np.asarray(live[1]).astype(np.float64)) for live in lives]
    if op in ("Add", "Sub", "Sum"):
        return "score", bases[0] + sum(-base if op == "Sub" else base for base in bases[1:])
    if op in ("Mul", "Div") and kinds[1 if op == "Div" else kinds.index("point") if "point" in kinds else 0] == "point":
        factor = bases[1 if op == "Div" else kinds.index("point")]
        factor = 1 / factor if op == "Div" and factor else factor
        small = abs(factor) < LARGE_FACTOR and all(
            abs(b) < LARGE_FACTOR for b, k in zip(bases, kinds, strict=True) if k == "score"
        )
        return SCORE if small else UNKNOWN
    return UNKNOWN
