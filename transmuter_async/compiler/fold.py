"""Constant folding of a graph: what can be computed from weights alone is computed once, on the host, for all programs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from transmuter_async.compiler.context import TooLargeToFold
from transmuter_async.compiler.run import Run, Scope
from transmuter_async.compiler.trace import run_node
from transmuter_async.errors import TransmuterError
from transmuter_async.graph import Graph, Node
from transmuter_async.operators import resolve

__all__ = ["fold_constants"]


def fold_constants(graph: Graph, *, budget: int, keep: frozenset[str] = frozenset()) -> Graph:
    """Replace nodes whose inputs are all known by initializers, in the graph and in the bodies of its control flow.

    A node is left alone where it is random, carries subgraphs, is about strings or sequences, or refuses its inputs
    (the error belongs to the call that reaches it). Weights that no node needs any more are dropped.

    Args:
        graph: A sorted graph.
        budget: Bytes by which the initializers may grow in all.
        keep: Names that must stay defined (the outputs).
    """
    folded, _ = _folded(graph, {}, budget, keep)
    return folded


def _folded(graph: Graph, around: Mapping[str, np.ndarray], room: int, keep: frozenset[str]) -> tuple[Graph, int]:
    """The graph folded, and the bytes that are left. `around`: known values of the graphs around it."""
    known = {**around, **graph.initializers}
    uses = Counter(keep)
    for node in graph.nodes:
        uses.update(_reads(node))
    computed: dict[str, np.ndarray] = {}
    left: list[Node] = []
    for node in graph.nodes:
        outputs = _fold_node(node, known, room)
        if outputs is None:
            left.append(node)
            continue
        known.update(outputs)
        computed.update(outputs)
        room -= sum(array.nbytes for name, array in outputs.items() if uses[name])
        for name in _reads(node):  # what nobody reads any more gives its room back
            uses[name] -= 1
            if not uses[name] and name not in around:
                room += known[name].nbytes
                if computed.pop(name, None) is not None:  # and its memory, before the next one is computed
                    del known[name]
    changed = bool(computed)
    for index, node in enumerate(left):
        if not any(True for _ in node.subgraphs()):
            continue
        attributes = dict(node.attributes)
        for name, value in node.attributes.items():
            if isinstance(value, Graph):
                outputs_of_body = frozenset(output.name for output in value.outputs)
                attributes[name], room = _folded(value, known, room, outputs_of_body)
                changed = changed or attributes[name] is not value
        left[index] = replace(node, attributes=attributes)
    if not changed:
        return graph, room
    used = set(keep).union(*map(_reads, left))
    initializers = {name: array for name, array in (dict(graph.initializers) | computed).items() if name in used}
    return replace(graph, nodes=tuple(left), initializers=initializers), room


def _reads(node: Node) -> set[str]:
    return {name for name in node.inputs if name}.union(*(subgraph.outer_names() for subgraph in node.subgraphs()))


def _fold_node(node: Node, known: dict[str, np.ndarray], room: int) -> dict[str, np.ndarray] | None:
    if any(name and name not in known for name in node.inputs) or any(True for _ in node.subgraphs()):
        return None
    definition = resolve(node.domain, node.op_type, node.opset)
    if definition is None or definition.random:
        return None
    freed = sum(known[name].nbytes for name in _reads(node))
    run = Run(tracing=False, fold_limit=max(0, room) + freed)
    scope = Scope({name: known[name] for name in node.inputs if name})
    try:
        run_node(run, node, scope)
    except (TransmuterError, TooLargeToFold):
        return None
    outputs = {name: scope.values[name] for name in node.outputs if name}
    grown = -freed
    for name, value in outputs.items():
        if not isinstance(value, np.ndarray) or value.dtype == object:
            return None
        grown += value.nbytes
        if value.flags.writeable:
            value = np.ascontiguousarray(value)
            value.flags.writeable = False
        outputs[name] = value
    return outputs if grown <= room else None
