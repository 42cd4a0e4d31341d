"""How control flow treats followed axes; see `axes`. Sources: ai.onnx 1 to 24."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from transmuter_async.compiler.axes import (
    GARBAGE,
    WILD,
    Atom,
    Axis,
    Follower,
    Mixes,
    Mixing,
    Rule,
    State,
    Tensor,
    Undecided,
    labels,
    plain,
    size_of,
)
from transmuter_async.compiler.axes_rules import attribute, joined, shape_key, taint_of
from transmuter_async.compiler.axes_values import Poison
from transmuter_async.graph import Graph, Node

__all__ = ["CONTROL"]

CONTROL: dict[tuple[str, str], Rule] = {}

TOTAL = frozenset(
    """Abs Add And Cast Ceil Clip Concat Constant Cos Elu Equal Erf Expand Flatten Floor Gelu Gemm Greater GreaterOrEqual
    HardSigmoid Identity LayerNormalization LeakyRelu Less LessOrEqual MatMul Max Min Mul Neg Not Or Relu ReduceMax ReduceMean
    ReduceMin ReduceSum Reshape Selu Shape Sigmoid Sign Sin Slice Softmax Softplus Softsign Split Squeeze Sub Sum Tanh
    Transpose Unsqueeze Where Xor""".split()
)
"""Operators that are defined for all finite numbers, and raise for none."""

PARTIAL = frozenset({"Acos", "Acosh", "Asin", "Atanh", "Exp", "Log", "LogSoftmax", "Pow", "Reciprocal", "Sqrt", "Tan"})
"""Operators that may give NaN or infinity, and raise for no number."""


class Poisoned(Exception):
    """A body mixes, and was named: what it gives is not judged again."""


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register a rule for some operators."""

    def register(function: Rule) -> Rule:
        for name in names:
            CONTROL["", name] = function
        return function

    return register


@rule("If")
def conditional(follower: Follower, node: Node, values: list[Any]) -> list[Any]:
    """The branch that is taken, or what holds of both."""
    condition = values[0]
    branches = [attribute(node, name, None) for name in ("then_branch", "else_branch")]
    if isinstance(condition, np.ndarray):
        return _branch(follower, branches[0] if bool(condition.reshape(())) else branches[1])
    tensor = follower.tensor(condition)
    if tensor.dims or tensor.taint is not None:
        name = min(tensor.dims) if tensor.dims else tensor.taint.axis  # type: ignore[union-attr]
        raise Mixing(name, "which branch runs depends on it")
    follower.undecided = follower.undecided or not tensor.fed
    both = [_branch(follower, branch) for branch in branches]
    return [_either(follower, *pair) for pair in zip(*both, strict=True)]


def _branch(follower: Follower, graph: Graph) -> list[Any]:
    follower.run(graph)
    return [
        follower.read(v.name) if v.name not in graph.initializers else graph.initializers[v.name] for v in graph.outputs
    ]


def _either(follower: Follower, one: Any, other: Any) -> Any:
    if one is other:
        return one
    a, b = follower.tensor(one), follower.tensor(other)
    taint = taint_of(a, b)
    if a.axes is None or b.axes is None or len(a.axes) != len(b.axes):
        if a.dims or b.dims:
            raise Undecided("its branches give values of different rank, and which one runs is not known")
        return Tensor(None, taint=taint)
    axes = []
    for x, y in zip(a.axes, b.axes, strict=True):
        if labels([x, y]):
            if shape_key(x) != shape_key(y):
                raise Undecided("its branches give different axes, and which one runs is not known")
            axes.append(
                tuple(
                    p if p.dim is None else replace(p, state=joined([p.state, q.state]))
                    for p, q in zip(x, y, strict=True)
                )
            )
        else:
            axes.append(x if shape_key(x) == shape_key(y) else plain(follower.fresh("branch")))
    return Tensor(tuple(axes), None, taint, a.fed or b.fed)


ROUNDS = 8
"""Trips of a body that are followed until what it carries stays the same."""


def _passes(
    follower: Follower, body: Graph, carried: list[Any], inputs: Callable[[list[Any]], list[Any]], leading: int
) -> tuple[list[Any], list[Any]]:
    """Follow a body until what holds of its carried values holds after a trip as before it.

    Args:
        carried: Before the first trip.
        inputs: The body's inputs, made of the carried values.
        leading: Outputs before the carried ones.

    Returns:
        What holds of the carried values before each trip and after the last, and the outputs of a trip.
    """
    held = [value if isinstance(value, Tensor) else follower.tensor(value) for value in carried]
    for _ in range(ROUNDS):
        before = follower.marked()
        follower.values.update(zip((v.name for v in body.inputs), inputs(held), strict=True))
        outputs = _branch(follower, body)
        if any(isinstance(value, Poison) for value in outputs):
            raise Poisoned
        after = [
            _widened(follower, one, follower.tensor(two))
            for one, two in zip(held, outputs[leading : leading + len(held)], strict=True)
        ]
        if after == held:
            return held, outputs
        follower.back_to(before)
        held = after
    raise Undecided("what its body carries changes from trip to trip")


def _widened(follower: Follower, one: Tensor, two: Tensor) -> Tensor:
    """What holds of a carried value before and after a trip."""
    taint = taint_of(one, two)
    kind = one.kind if one.kind == two.kind else ""
    if one.axes is None or two.axes is None or len(one.axes) != len(two.axes):
        if one.dims or two.dims:
            raise Undecided("its body carries a value whose rank changes")
        return Tensor(None, None, taint, True, kind)
    axes = []
    for x, y in zip(one.axes, two.axes, strict=True):
        if labels([x, y]):
            if shape_key(x) != shape_key(y):
                raise Mixing(min(labels([x, y])), "its body carries an axis that changes from trip to trip")
            axes.append(
                tuple(
                    p if p.dim is None else replace(p, state=_either_state(p.state, q.state), level=p.level and q.level)
                    for p, q in zip(x, y, strict=True)
                )
            )
        elif shape_key(x) == shape_key(y):
            axes.append(x)
        else:
            axes.append(x if _is_free(x) else plain(follower.fresh("trip")))
    content = one.content if one.content == two.content else None
    return Tensor(tuple(axes), content, taint, one.fed or two.fed, kind)


def _either_state(one: State, two: State) -> State:
    """A state that holds for both; bounds that still move are given up, so that this ends."""
    if one == two:
        return one
    made = joined([one, two])
    if made.kind == "garbage" and one.kind == "garbage" and made.span != one.span:
        return GARBAGE
    return made


def _is_free(axis: Axis) -> bool:
    return any("trip?" in name for name in size_of(axis).symbols())


def _tainted(tensor: Tensor, node: Node, dim: str, why: str) -> Tensor:
    return replace(tensor, content=None, taint=tensor.taint or Mixes(node.name, node.op_type, dim, why))


@rule("Loop")
def loop(follower: Follower, node: Node, values: list[Any]) -> list[Any]:
    """Every row makes as many trips as the others: how many must not depend on rows or padding."""
    body = attribute(node, "body", None)
    trips, condition = values[0], values[1] if len(values) > 1 else None
    for value, what in ((trips, "how many trips it makes"), (condition, "whether it goes on")):
        if value is not None:
            _independent(follower, value, what)
    carried = values[2:]

    def inputs(held: list[Any]) -> list[Any]:
        return [Tensor((), None, None, True, "i"), Tensor((), None, None, True, "b"), *held]

    try:
        held, outputs = _passes(follower, body, carried, inputs, 1)
    except Poisoned:
        return [Poison()] * len(node.outputs)
    _independent(follower, outputs[0], "whether it goes on")
    scans = [_stacked(follower, value, plain(follower.fresh("trips")), 0) for value in outputs[1 + len(held) :]]
    return [*held, *scans]


def _independent(follower: Follower, value: Any, what: str) -> None:
    tensor = follower.as_data(follower.tensor(value))
    if tensor.dims or tensor.taint is not None:
        raise Mixing(min(tensor.dims) if tensor.dims else tensor.taint.axis, f"{what} depends on it")  # type: ignore[union-attr]


def _stacked(follower: Follower, value: Any, axis: Axis, at: int) -> Tensor:
    """The values of all trips on a new axis."""
    tensor = follower.as_data(follower.tensor(value))
    if tensor.axes is None:
        return replace(tensor, axes=None)
    axes = list(tensor.axes)
    axes.insert(at % (len(axes) + 1), axis)
    return replace(tensor, axes=tuple(axes), fed=True)


@rule("Scan")
def scan(follower: Follower, node: Node, values: list[Any]) -> list[Any]:
    """A trip for each slice. Along a padded axis, forwards: the trips of the data come first, and none reads a later one."""
    if node.opset < 9:
        raise Undecided("Scan of opset 8 is not followed")
    body, count = attribute(node, "body", None), int(attribute(node, "num_scan_inputs", 0))
    states, scanned = values[: len(values) - count], values[len(values) - count :]
    along = attribute(node, "scan_input_axes", None) or (0,) * count
    backwards = attribute(node, "scan_input_directions", None) or (0,) * count
    emitted = len(body.outputs) - len(states)
    places = attribute(node, "scan_output_axes", None) or (0,) * emitted
    turned = attribute(node, "scan_output_directions", None) or (0,) * emitted
    slices, steps = [], []
    for value, at in zip(scanned, along, strict=True):
        tensor = follower.as_data(follower.tensor(value))
        axes = list(follower.ranked(tensor))
        steps.append(axes.pop(at))
        slices.append(replace(tensor, axes=tuple(axes)))
    marked = [step for step in steps if labels([step])]
    step = marked[0] if marked else next((s for s in steps if size_of(s).constant() is not None), steps[0])
    if marked and any(shape_key(other) != shape_key(step) for other in steps):
        raise Mixing(min(labels(marked)), "runs along it together with an axis that is not the same dimension")
    batch = follower.batch([step])
    if batch is not None and states:
        raise Mixing(batch, "carries a state from row to row of the batch")
    if marked and (len(step) > 1 or any(backwards) or any(turned)):
        raise Mixing(min(labels([step])), "runs along it from its end, so through the padding")

    def inputs(held: list[Any]) -> list[Any]:
        return [*held, *slices]

    try:
        held, outputs = _passes(follower, body, states, inputs, 0)
    except Poisoned:
        return [Poison()] * len(node.outputs)
    fails = False
    if marked and batch is None:
        name = min(labels([step]))
        fails = _may_fail(follower, body, name)
        held = [_tainted(value, node, name, "its last state comes through the padding") for value in held]
    found = list(held)
    for value, at in zip(outputs[len(states) :], places, strict=True):
        axis = step
        if marked:
            wild = any(a.dim is not None and a.state.kind == "wild" for s in steps for a in s)
            wild = wild or any(a.dim is not None and a.state.kind == "masked" for s in steps for a in s)
            axis = (Atom(step[0].size, step[0].dim, WILD if wild or fails else GARBAGE),)
        found.append(_stacked(follower, value, axis, at))
    return found


def _may_fail(follower: Follower, body: Graph, dim: str) -> bool:
    """Whether padding may leave the domain of an operator of a body: there it is data like any other.

    Raises:
        Mixing: An operator may even refuse it.
    """
    fails = False
    for each in body.walk():
        if each.op_type in TOTAL and not each.domain:
            continue
        known = each.op_type == "Gather" and isinstance(follower.read(each.inputs[1]), np.ndarray)
        real = each.op_type == "Div" and follower.tensor(follower.read(each.inputs[1])).kind == "f"
        if not known and not real and (each.op_type not in PARTIAL or each.domain):
            raise Mixing(dim, f"its body holds {each.op_type} {each.name!r}, which may refuse what padding holds")
        fails = fails or not known
    return fails
