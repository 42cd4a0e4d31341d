"""One call: segment, break, segment, … to the outputs, resumable where a program is missing.

`Execution.advance` runs in the actor's run thread. It returns `Missing` with the job to compile, and goes on from there
when it is called again after the job's segment was put into the cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from transmuter_async.compiler.cache import SegmentCache
from transmuter_async.compiler.facts import (
    BreakDone,
    BreakFailed,
    BreakStarted,
    CacheHit,
    CacheMiss,
    Observe,
)
from transmuter_async.compiler.prepare import PreparedGraph, is_host_only
from transmuter_async.compiler.segment import CompileJob, Segment
from transmuter_async.compiler.trace import Run, Scope, run_node
from transmuter_async.compiler.values import to_numpy

__all__ = ["Execution", "Finished", "Missing", "run_key"]


@dataclass(frozen=True, slots=True)
class Finished:
    """The outputs in the graph's order, and which tier gave them: "compiled" or "interpreted"."""

    outputs: dict[str, Any]
    tier: str


@dataclass(frozen=True, slots=True)
class Missing:
    """A program is missing: run the job, put its segment into the cache, and advance again."""

    job: CompileJob


def run_key(seed: int) -> np.ndarray:
    """The random key of a run, (2,) uint32, from its integer seed."""
    seed &= 0xFFFFFFFFFFFFFFFF
    return np.array([seed >> 32, seed & 0xFFFFFFFF], np.uint32)


class Execution:
    """The progress of one call. Owned by whoever advances it."""

    def __init__(self, prepared: PreparedGraph, inputs: Mapping[str, Any], *, seed: int, device: bool) -> None:
        self.prepared = prepared
        self.device = device
        self.seed = run_key(seed)
        self._inputs = dict(inputs)
        self._values: dict[str, Any] = dict(inputs)
        self._known: frozenset[str] = frozenset()
        self._index = 0
        self._missed = False

    def advance(self, cache: SegmentCache, observe: Observe) -> Finished | Missing:
        """Go on until the outputs are there or a program is missing.

        Raises:
            IndexOutOfRange: An index was out of range.
            NonFiniteError: The alarm was asked for and rang.
            OperatorError: A break node refuses its inputs.
        """
        prepared = self.prepared
        if prepared.options.compiler == "eager":
            self._run_on_host(0, len(prepared.nodes))
            return self._finish("interpreted")
        end = len(prepared.nodes)
        while self._index < end:
            if self._breaks_here():
                self._break(observe)
                continue
            segment = cache.kept(self._values) if self._index == 0 else None
            if segment is None:
                segment = cache.find(self._index, self._values)
                if segment is None:
                    return self._miss(cache, observe)
                if not self._missed:
                    cache.count(self._index, hit=True)
                    observe(CacheHit(segment.position, segment.shapes))
                self._missed = False
            self._run(segment)
            self._index = segment.stop
            if segment.stop < end:
                self._break(observe)
        return self._finish("compiled")

    def _breaks_here(self) -> bool:
        """A host-only node that meets a run-time value starts no segment of its own."""
        node = self.prepared.nodes[self._index]
        if not is_host_only(node):
            return False
        return any(name in self._values and name not in self._known for name in node.inputs)

    def _miss(self, cache: SegmentCache, observe: Observe) -> Missing:
        job = CompileJob(
            self.prepared,
            self._index,
            self._live(),
            self._known,
            cache.statics(self._index) | (frozenset(self.prepared.options.static_inputs) & self._values.keys()),
            first=self._index == 0,
        )
        cache.count(self._index, hit=False)
        observe(CacheMiss(job.position, job.shapes))
        self._missed = True
        return Missing(job)

    def _live(self) -> dict[str, Any]:
        last_use = self.prepared.last_use
        return {name: value for name, value in self._values.items() if last_use.get(name, -1) >= self._index}

    def _run(self, segment: Segment) -> None:
        if segment.eager:
            self._run_on_host(segment.index, segment.stop)
        elif segment.program is not None:
            values = self._values
            arguments = tuple([values[name] for name in segment.arguments])
            outputs, alarm = segment.program(segment.weights, arguments, self.seed)
            if alarm is not None:
                number = int(alarm)
                if number:
                    raise segment.alarms[number - 1].error()
            values.update(zip(segment.outputs, outputs, strict=True))
        if not segment.eager:
            self._values.update(segment.host_outputs)
            self._known |= frozenset(segment.host_outputs)

    def _break(self, observe: Observe) -> None:
        node = self.prepared.nodes[self._index]
        position = node.position
        observe(BreakStarted(position, node.name, node.op_type))
        try:
            self._run_on_host(self._index, self._index + 1)
        except BaseException as error:
            observe(BreakFailed(position, node.name, node.op_type, error))
            raise
        observe(BreakDone(position, node.name, node.op_type))
        self._index += 1
        self._missed = False

    def _run_on_host(self, start: int, stop: int) -> None:
        """Nodes in numpy, on this call's values; what later nodes read goes back into the call's values."""
        prepared = self.prepared
        options = prepared.options
        run = Run(
            tracing=False,
            seed=self.seed,
            bounds=options.bounds,
            nonfinite=options.nonfinite,
            platform=prepared.platform,
            producers=prepared.producers,
        )
        scope = Scope(outer=_HostValues(self._values, outer=Scope(dict(prepared.graph.initializers))))
        last_use = prepared.last_use
        for index in range(start, stop):
            node = prepared.nodes[index]
            run_node(run, node, scope)
            for name in prepared.reads[index]:
                if last_use[name] == index:
                    scope.values.pop(name, None)
        for name, value in scope.values.items():
            if last_use.get(name, -1) >= stop:
                self._values[name] = value

    def _finish(self, tier: str) -> Finished:
        prepared = self.prepared
        initializers = prepared.graph.initializers
        foreign = {id(value) for value in self._inputs.values()} | {id(value) for value in initializers.values()}
        outputs = {}
        for name in prepared.outputs:
            value = self._values[name] if name in self._values else initializers[name]
            outputs[name] = self._give(value, foreign)
        if self.device:
            outputs = {name: self._put(value) for name, value in outputs.items()}
            jax.block_until_ready([leaf for leaf in jax.tree.leaves(outputs) if isinstance(leaf, jax.Array)])
        self._values.clear()
        self._inputs.clear()
        return Finished(outputs, tier)

    def _give(self, value: Any, foreign: set[int]) -> Any:
        """An output as the caller gets it: read-only, never the memory of an input or a weight."""
        if isinstance(value, list):
            return [self._give(item, foreign) for item in value]
        if isinstance(value, jax.Array):
            if id(value) in foreign:
                return np.array(value) if not self.device else value
            return value if self.device else np.asarray(value)
        if not isinstance(value, np.ndarray):
            return value
        if id(value) in foreign or value.base is not None or not value.flags.c_contiguous:
            value = value.copy()
        value.flags.writeable = False
        return value

    def _put(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self._put(item) for item in value]
        if isinstance(value, np.ndarray) and value.dtype != object:
            return jax.device_put(value, self.prepared.device)
        return value


class _HostValues(Scope):
    """A call's values, brought to the host as they are read, without changing where they live."""

    __slots__ = ("_copies",)

    def __init__(self, values: dict[str, Any], *, outer: Scope) -> None:
        super().__init__(values, outer=outer)
        self._copies: dict[str, Any] = {}

    def read(self, name: str) -> Any:
        """The value of a name as numpy."""
        if name in self._copies:
            return self._copies[name]
        value = to_numpy(super().read(name))
        self._copies[name] = value
        return value

