"""How sums of products treat followed axes; see `axes`. Sources: ai.onnx 1 to 24."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from transmuter_async.compiler.axes import (
    GARBAGE,
    Axis,
    Follower,
    Mixing,
    Rule,
    State,
    Tensor,
    Undecided,
    labels,
    plain,
)
from transmuter_async.compiler.axes_norms import reduced
from transmuter_async.compiler.axes_rules import attribute, combined, product_state, shape_key, taint_of
from transmuter_async.graph import Node

__all__ = ["PRODUCTS", "contract"]

PRODUCTS: dict[tuple[str, str], Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register a rule for some operators."""

    def register(function: Rule) -> Rule:
        for name in names:
            PRODUCTS["", name] = function
        return function

    return register


def contract(follower: Follower, left: Axis, right: Axis) -> None:
    """Judge a sum over an axis that two factors share."""
    marked = [axis for axis in (left, right) if labels([axis])]
    if not marked:
        return
    name = min(labels(marked))
    batch = follower.batch(marked)
    if batch is not None:
        raise Mixing(batch, "sums over the rows of the batch")
    if shape_key(left) != shape_key(right):
        raise Mixing(name, "sums over it together with an axis that is not the same dimension")
    for a, b in zip(left, right, strict=True):
        if a.dim is None:
            continue
        if not (a.state.is_constant(0) and b.state.finite) and not (b.state.is_constant(0) and a.state.finite):
            raise Mixing(
                name, "sums over the padding, which no mask makes zero" if a.dim == name else "sums over padding"
            )


def _kept(axis: Axis) -> Axis:
    return tuple(a if a.dim is None else replace(a, state=product_state([a.state]), level=False) for a in axis)


@rule("MatMul", "MatMulInteger", "QLinearMatMul")
def matmul(follower: Follower, node: Node, values: list[Any]) -> list[Any]:
    """Matrix products, also of integers: zero points are per tensor or per column."""
    a, b = (values[0], values[1]) if node.op_type != "QLinearMatMul" else (values[0], values[3])
    others = [v for v in values if v is not None and v is not a and v is not b]
    for other in others:
        if follower.tensor(other).dims:
            raise Mixing(min(follower.tensor(other).dims), "a scale or zero point depends on it")
    ta, tb = follower.as_data(follower.tensor(a)), follower.as_data(follower.tensor(b))
    la, lb = list(follower.ranked(ta)), list(follower.ranked(tb))
    squeeze_a, squeeze_b = len(la) == 1, len(lb) == 1
    la = [plain(1), *la] if squeeze_a else la
    lb = [*lb, plain(1)] if squeeze_b else lb
    if node.op_type == "MatMul":
        contract(follower, la[-1], lb[-2])
    elif labels([la[-1], lb[-2]]):
        raise Mixing(min(labels([la[-1], lb[-2]])), "sums over the padding of integers, whose zero point is not zero")
    axes = list(combined(follower, [la[:-2], lb[:-2]], product_state))
    if not squeeze_a:
        axes.append(_kept(la[-2]))
    if not squeeze_b:
        axes.append(_kept(lb[-1]))
    return [Tensor(tuple(axes), None, taint_of(ta, tb, *map(follower.tensor, others)), ta.fed or tb.fed)]


@rule("Gemm")
def gemm(follower: Follower, node: Node, values: list[Any]) -> list[Any]:
    """alpha A' B' + beta C."""
    ta, tb = follower.as_data(follower.tensor(values[0])), follower.as_data(follower.tensor(values[1]))
    la, lb = list(follower.ranked(ta)), list(follower.ranked(tb))
    if attribute(node, "transA", 0):
        la.reverse()
    if attribute(node, "transB", 0):
        lb.reverse()
    contract(follower, la[1], lb[0])
    axes: tuple[Axis, ...] = (_kept(la[0]), _kept(lb[1]))
    tensors = [ta, tb]
    if len(values) > 2 and values[2] is not None:
        tc = follower.as_data(follower.tensor(values[2]))
        tensors.append(tc)
        axes = combined(follower, [axes, follower.ranked(tc)], lambda states: _not_zero(product_state(states)))
    return [Tensor(axes, None, taint_of(*tensors), any(t.fed for t in tensors))]


def _not_zero(state: State) -> State:
    return GARBAGE if state.kind == "constant" else state


@rule("Einsum")
def einsum(follower: Follower, node: Node, values: list[Any]) -> list[Any]:
    """Letters that do not reach the output are summed over."""
    equation = str(attribute(node, "equation", "")).replace(" ", "")
    left, arrow, out = equation.partition("->")
    terms = left.split(",")
    tensors = [follower.as_data(follower.tensor(value)) for value in values]
    if "." in equation or not arrow or any(len(set(term)) < len(term) for term in terms) or len(terms) > 2:
        raise Undecided("an equation of this form is not followed")
    places: dict[str, list[Axis]] = {}
    for term, tensor in zip(terms, tensors, strict=True):
        for letter, axis in zip(term, follower.ranked(tensor), strict=True):
            places.setdefault(letter, []).append(axis)
    for letter, held in places.items():
        if letter in out:
            continue
        if len(held) == 2:
            contract(follower, held[0], held[1])
        elif labels(held):
            reduced(follower, held[0], "ReduceSum")
    axes = [combined(follower, [[axis] for axis in places[letter]], product_state)[0] for letter in out]
    return [Tensor(tuple(axes), None, taint_of(*tensors), any(t.fed for t in tensors))]
