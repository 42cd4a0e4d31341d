"""What a call is on its way through: the graph or a body with its values, and control flow that runs one body after another.

Where an If, a Loop or a search breaks and its body is large enough to be worth programs of its own, the body is a frame on top
of the graph's, compiled in segments like the graph itself.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import Any

import numpy as np

from transmuter_async.compiler.flow import never_stops
from transmuter_async.compiler.prepare import PreparedGraph
from transmuter_async.compiler.run import Run
from transmuter_async.compiler.searches import begin_search
from transmuter_async.compiler.values import to_numpy
from transmuter_async.errors import OperatorError
from transmuter_async.graph import Graph, Node
from transmuter_async.operators import HOST_TRIPS, SEARCHES, Call, fold_in

__all__ = ["Frame", "Hosted", "hosted", "run_key"]


def run_key(seed: int) -> np.ndarray:
    """The random key of a run, (2,) uint32, from its integer seed."""
    seed &= 0xFFFFFFFFFFFFFFFF
    return np.array([seed >> 32, seed & 0xFFFFFFFF], np.uint32)


class Frame:
    """A graph or body on its way: its values, and the index of the next node."""

    __slots__ = ("_seed", "host", "index", "known", "missed", "prepared", "values")

    def __init__(
        self,
        prepared: PreparedGraph,
        values: dict[str, Any],
        known: frozenset[str],
        seed: int | np.ndarray,
        host: Hosted | None,
    ) -> None:
        self.prepared = prepared
        self.values = values
        self.known = known
        self._seed = seed
        self.host = host
        self.index = 0
        self.missed = False

    @property
    def seed(self) -> np.ndarray:
        """The random key of the frame, (2,) uint32; made when it is first needed."""
        if isinstance(self._seed, int):
            self._seed = run_key(self._seed)
        return self._seed

    def value(self, name: str) -> Any:
        """A value of the frame, or a weight."""
        return self.values[name] if name in self.values else self.prepared.graph.initializers[name]

    def outputs(self) -> list[Any]:
        """The values of the outputs, in order."""
        return [self.value(name) for name in self.prepared.outputs]

    def live(self) -> dict[str, Any]:
        """The values that nodes from here on read."""
        last_use = self.prepared.last_use
        return {name: value for name, value in self.values.items() if last_use.get(name, -1) >= self.index}


class Hosted:
    """A control-flow node that runs on the host and asks for one body after another.

    Attributes:
        frame: The frame of the node.
        results: The node's outputs, once `step` returned None.
    """

    def __init__(self, frame: Frame, node: Node) -> None:
        self.frame = frame
        self.node = node
        self.results: list[Any] = []

    def step(self, outputs: list[Any] | None) -> Frame | None:
        """The next body to run, given the outputs of the one before; None when the node is done."""
        raise NotImplementedError

    def body(self, attribute: str, inputs: Mapping[str, Any], seed: np.ndarray) -> Frame:
        """A frame for the body, with the values that it takes from around it."""
        frame = self.frame
        prepared = frame.prepared.subgraph(frame.index, attribute)
        captured = {name: frame.values[name] for name in frame.prepared.reads[frame.index] if name in frame.values}
        return Frame(prepared, {**captured, **inputs}, frame.known & captured.keys() - inputs.keys(), seed, self)


class _HostedIf(Hosted):
    def step(self, outputs: list[Any] | None) -> Frame | None:
        if outputs is not None:
            self.results = outputs
            return None
        condition = _single(self.node, self.frame.value(self.node.inputs[0]), "condition")
        branch = "then_branch" if condition else "else_branch"
        return self.body(branch, {}, self.frame.seed)


class _HostedLoop(Hosted):
    """Loop (1 and up): carried values stay where they are, scan outputs are stacked on the host at the end."""

    def __init__(self, frame: Frame, node: Node) -> None:
        super().__init__(frame, node)
        graph = node.attributes["body"]
        assert isinstance(graph, Graph)
        self.names = [value.name for value in graph.inputs]
        trips = frame.value(node.inputs[0]) if node.inputs and node.inputs[0] else None
        self.trips = None if trips is None else int(_single(node, trips, "trip count"))
        given = len(node.inputs) > 1 and node.inputs[1]
        self.going = True if not given else bool(_single(node, frame.value(node.inputs[1]), "condition"))
        self.carried = [frame.value(name) for name in node.inputs[2:]]
        self.scanned: list[list[Any]] = []
        self.iteration = 0
        if self.going and self.trips is not None and self.trips > HOST_TRIPS and never_stops(graph, frame.value):
            raise _too_many_trips(node, self.trips)

    def empty(self) -> bool:
        """No iteration at all: the shapes of empty scan outputs are the host form's business."""
        return not self.going or (self.trips is not None and self.trips <= 0)

    def step(self, outputs: list[Any] | None) -> Frame | None:
        count = len(self.carried)
        if outputs is not None:
            self.going = bool(_single(self.node, outputs[0], "condition"))
            self.carried = outputs[1 : 1 + count]
            scans = [np.asarray(value) for value in outputs[1 + count :]]
            self.scanned = [[value] for value in scans] if not self.scanned else self.scanned
            if self.iteration > 1:
                for gathered, value in zip(self.scanned, scans, strict=True):
                    gathered.append(value)
        if not self.going or (self.trips is not None and self.iteration >= self.trips):
            self.results = [*self.carried, *(_stack(self.node, gathered) for gathered in self.scanned)]
            return None
        if self.iteration >= HOST_TRIPS:
            raise _too_many_trips(self.node, self.trips)
        values = [np.asarray(self.iteration, np.int64), np.asarray(self.going), *self.carried]
        seed = np.asarray(fold_in(self.frame.seed, self.iteration))
        self.iteration += 1
        return self.body("body", dict(zip(self.names, values, strict=True)), seed)


class _HostedSearch(Hosted):
    """Text generation that is too long for one program: a program for each step, the choice of tokens on the host."""

    def __init__(self, frame: Frame, node: Node, calls: Generator[Call, Sequence[Any], tuple[Any, ...]]) -> None:
        super().__init__(frame, node)
        self.calls = calls

    def step(self, outputs: list[Any] | None) -> Frame | None:
        try:
            call = next(self.calls) if outputs is None else self.calls.send([to_numpy(each) for each in outputs])
        except StopIteration as end:
            self.results = list(end.value)
            return None
        except (ValueError, TypeError, IndexError) as error:
            raise _refuse(self.node, str(error)) from error
        graph = self.node.attributes[call.attribute]
        assert isinstance(graph, Graph)
        seed = self.frame.seed
        if call.iteration is not None:
            seed = np.asarray(fold_in(seed, call.iteration))
        names = [value.name for value in graph.inputs]
        return self.body(call.attribute, dict(zip(names, call.inputs, strict=True)), seed)


def _hosted_search(frame: Frame, node: Node) -> _HostedSearch | None:
    options = frame.prepared.options
    run = Run(tracing=False, seed=frame.seed, bounds=options.bounds, platform=frame.prepared.platform)
    values = {name: frame.value(name) for name in node.inputs if name}
    calls = begin_search(node, values, run, options.cache_size)
    return None if calls is None else _HostedSearch(frame, node, calls)


def hosted(frame: Frame, node: Node) -> Hosted | None:
    """How the bodies of a control-flow node become frames; None where the host form serves it better."""
    searches = (node.domain, node.op_type) in SEARCHES
    if not searches and (node.domain or node.op_type not in ("If", "Loop")):
        return None
    bodies = list(node.subgraphs())
    if max((sum(1 for _ in body.walk()) for body in bodies), default=0) < frame.prepared.options.min_segment_nodes:
        return None
    if searches:
        return _hosted_search(frame, node)
    if node.op_type == "If":
        return _HostedIf(frame, node)
    loop = _HostedLoop(frame, node)
    return None if loop.empty() else loop


def _stack(node: Node, values: list[np.ndarray]) -> np.ndarray:
    shapes = {value.shape for value in values}
    if len(shapes) > 1:
        raise _refuse(node, f"a scan output has different shapes in different iterations: {sorted(shapes)}")
    return np.stack(values)


def _single(node: Node, value: Any, what: str) -> np.ndarray:
    """The one element of a value, as an array without dimensions."""
    array = np.asarray(value)
    if array.size != 1:
        raise _refuse(node, f"the {what} has shape {array.shape}, expected one element")
    return array.reshape(())


def _too_many_trips(node: Node, trips: int | None) -> OperatorError:
    return _refuse(node, f"the loop makes more than {HOST_TRIPS} trips on the host; its trip count is {trips}")


def _refuse(node: Node, message: str) -> OperatorError:
    return OperatorError(f"{node.operator} {node.name!r}: {message}", node=node.name, operator=node.operator)
