"""How control flow treats followed axes; see `axes`. Sources: ai.onnx 1 to 24."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from transmuter_async.compiler.axes import Follower, Mixing, Rule, Tensor, Undecided, labels, plain
from transmuter_async.compiler.axes_rules import attribute, joined, shape_key, taint_of
from transmuter_async.graph import Graph, Node

__all__ = ["CONTROL"]

CONTROL: dict[tuple[str, str], Rule] = {}


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
    return [follower.read(v.name) if v.name not in graph.initializers else graph.initializers[v.name] for v in graph.outputs]


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
            axes.append(tuple(
                p if p.dim is None else replace(p, state=joined([p.state, q.state])) for p, q in zip(x, y, strict=True)
            ))
        else:
            axes.append(x if shape_key(x) == shape_key(y) else plain(follower.fresh("branch")))
    return Tensor(tuple(axes), None, taint, a.fed or b.fed)
