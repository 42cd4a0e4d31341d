"""Questions about which nodes a value comes through, answered by the graph alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from transmuter_async.graph import Graph, Node

__all__ = ["never_stops", "nodes_between"]


def never_stops(body: Graph, read: Callable[[str], Any]) -> bool:
    """Whether a Loop's body hands on the condition that it was given, or one that is always true.

    Args:
        body: The loop's body.
        read: Gives the value of a name of the graphs around it, KeyError for one that they do not have.
    """
    producers = {name: node for node in body.nodes for name in node.outputs}
    name = body.outputs[0].name
    while name in producers and producers[name].op_type == "Identity":
        name = producers[name].inputs[0]
    if name == body.inputs[1].name:
        return True
    if name in producers:
        value = producers[name].attributes.get("value") if producers[name].op_type == "Constant" else None
    elif name in {value.name for value in body.inputs}:
        return False
    else:
        try:
            value = body.initializers[name] if name in body.initializers else read(name)
        except KeyError:
            return False
    return isinstance(value, np.ndarray) and bool(value.all())


def nodes_between(producers: Mapping[str, Node], names: Sequence[str], result: str) -> list[Node]:
    """The nodes through which `result` depends on `names`, in an order in which they can run."""
    ordered: list[Node] = []
    depends: dict[str, bool] = dict.fromkeys(names, True)

    def visit(name: str) -> bool:
        stack = [name]
        while stack:
            current = stack[-1]
            node = producers.get(current)
            if current in depends or node is None:
                depends.setdefault(current, False)
                stack.pop()
                continue
            waiting = [each for each in node.inputs if each and each not in depends]
            if waiting:
                stack.extend(waiting)
                continue
            found = any(depends[each] for each in node.inputs if each)
            if found:
                ordered.append(node)
            depends.update((output, found) for output in node.outputs if output not in names)
            stack.pop()
        return depends[name]

    visit(result)
    return ordered
