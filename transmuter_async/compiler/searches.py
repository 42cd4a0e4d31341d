"""Text generation that ended a segment: its loop on the host, its decoder run by somebody else."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import Any

import numpy as np

from transmuter_async.compiler.context import NodeContext
from transmuter_async.compiler.run import Run, Scope
from transmuter_async.compiler.trace import run_nodes
from transmuter_async.compiler.values import to_numpy
from transmuter_async.errors import TransmuterError
from transmuter_async.graph import Graph, Node
from transmuter_async.operators import Call, Outside, Search, conversation, invoke, resolve

__all__ = ["begin_search"]

_REFUSALS = (ValueError, TypeError, IndexError, ArithmeticError)


def begin_search(
    node: Node, values: Mapping[str, Any], run: Run, most_steps: int
) -> Generator[Call, Sequence[Any], tuple[Any, ...]] | None:
    """The search of a node, as a generator of subgraph runs that is sent their outputs.

    Args:
        node: Of an operator that generates text.
        values: Of its inputs.
        run: On the host, for the node's random key.
        most_steps: A decoder's past is longer at each step, and so a program is needed for each. Where a search may make
            more steps than this, they would push one another out of the cache.

    Returns:
        None where the host form serves better: the search may be too long, or it refuses its inputs and has to say so.
    """
    definition = resolve(node.domain, node.op_type, node.opset)
    assert definition is not None
    inputs = [to_numpy(values[name]) if name else None for name in node.inputs]
    attributes = {
        key: Outside(value.inputs, value.outputs) if isinstance(value, Graph) else value
        for key, value in node.attributes.items()
    }
    context = NodeContext(run, node, definition, Scope(), folding=False, walk=run_nodes)
    try:
        (search,) = invoke(definition, inputs, attributes, {"n_outputs": len(node.outputs), "context": context})
        assert isinstance(search, Search)
        return _quiet(conversation(search)) if search.steps <= most_steps else None
    except (TransmuterError, *_REFUSALS):
        return None


def _quiet(
    calls: Generator[Call, Sequence[Any], tuple[Any, ...]],
) -> Generator[Call, Sequence[Any], tuple[Any, ...]]:
    """The same without numpy's warnings: what overflows is told by the result, as in a program."""
    outputs: Sequence[Any] | None = None
    while True:
        with np.errstate(all="ignore"):
            try:
                call = calls.send(outputs)  # type: ignore[arg-type]
            except StopIteration as end:
                return tuple(end.value)
        outputs = yield call
