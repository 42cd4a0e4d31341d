"""One call: segment, break, segment, … to the outputs, resumable where a program is missing.

`Execution.advance` runs in the actor's run thread. It returns `Missing` with the job to compile, and goes on from there
when it is called again after the job's segment was put into the cache.

A call is a stack of frames. The lowest one walks the graph; where an If or a Loop breaks and its body is large enough to
be worth programs of its own, the body is a frame on top, compiled in segments like the graph itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, cast

import jax
import numpy as np

from transmuter_async.compiler.batching import Cut
from transmuter_async.compiler.cache import SegmentCache
from transmuter_async.compiler.facts import (
    BreakDone,
    BreakFailed,
    BreakStarted,
    CacheMiss,
    Observe,
)
from transmuter_async.compiler.frames import Frame, Hosted, hosted, run_key
from transmuter_async.compiler.job import CompileJob, forced_break
from transmuter_async.compiler.needs import depends_on_values
from transmuter_async.compiler.prepare import PreparedGraph
from transmuter_async.compiler.run import Run, Scope
from transmuter_async.compiler.segment import Segment, entry_key
from transmuter_async.compiler.trace import run_node
from transmuter_async.compiler.values import to_numpy
from transmuter_async.errors import BreakRefused
from transmuter_async.graph import Node

__all__ = ["Execution", "Finished", "Missing", "run_on_host"]


@dataclass(frozen=True, slots=True)
class Finished:
    """The outputs of a call.

    Attributes:
        outputs: In the graph's order.
        tier: What gave them: "compiled", "interpreted" (the host form), or "mixed".
        wanted: Programs that were missing and would have been used; only with `cold="interpret"`.
    """

    outputs: dict[str, Any]
    tier: str
    wanted: tuple[CompileJob, ...] = ()


@dataclass(frozen=True, slots=True)
class Missing:
    """A program is missing: run the job, put its segment into the cache, and advance again."""

    job: CompileJob


_NOTHING: frozenset[str] = frozenset()
_NOBODY: frozenset[int] = frozenset()
_START = (0,)  # where the graph begins


class Execution:
    """The progress of one call. Owned by whoever advances it.

    Attributes:
        waits: Whether it waits for a program that is missing; else it goes on on the host.
    """

    waits = True

    def __init__(
        self, prepared: PreparedGraph, inputs: Mapping[str, Any], *, seed: int, device: bool, cut: Cut | None = None
    ) -> None:
        self.prepared = prepared
        self.device = device
        self.waits = self.waits and prepared.options.cold == "compile"
        self._cut = cut  # how padded outputs become their true size
        self._inputs = inputs
        self._seed = seed
        self._frames: list[Frame] = []  # made when the first step is taken; a call of one whole program needs none
        self._breaks: list[Node] = []  # the open ones, outer before inner
        self._wanted: list[CompileJob] = []
        self._compiled = 0  # segments that ran from the cache
        self.given: Segment | None = None  # what was compiled for this call while it waited

    def advance(self, cache: SegmentCache, observe: Observe) -> Finished | Missing:
        """Go on until the outputs are there or a program is missing.

        Raises:
            IndexOutOfRange: An index was out of range.
            NonFiniteError: The alarm was asked for and rang.
            OperatorError: A break node refuses its inputs.
        """
        if not self._frames:
            finished = self._run_whole(cache, observe)
            if finished is not None:
                return finished
            self._frames.append(Frame(self.prepared, dict(self._inputs), _NOTHING, self._seed, None))
        try:
            return self._advance(cache, observe)
        except BaseException as error:
            while self._breaks:
                node = self._breaks.pop()
                observe(BreakFailed(node.position, node.name, node.op_type, error))
            raise

    def _run_whole(self, cache: SegmentCache, observe: Observe) -> Finished | None:
        """The path of most calls, with nothing on it that they do not need: numpy in, one program, numpy out.

        Returns:
            None where this call is not one of those; then nothing was done.
        """
        prepared, inputs = self.prepared, self._inputs
        if prepared.graph_break is not False or self.device or self._cut is not None or prepared.options.donate:
            return None
        segment = cache.like_last(inputs, observe)
        if segment is None:
            for value in inputs.values():
                if type(value) is not np.ndarray:
                    return None
            kept = cache.kept(inputs)
            segment = cache.find(_START, inputs) if kept is None else kept
            if segment is None or segment.program is None or segment.needs is not None or segment.host_outputs:
                return None
            if segment.outputs != prepared.outputs and prepared.output_names.symmetric_difference(segment.outputs):
                return None  # an output is an input or a weight
            if kept is None:
                cache.count(_START, hit=True)
                observe(segment.hit)
            cache.remember(segment, inputs, kept=kept is not None)
        outputs = _run_program(segment, inputs, run_key(self._seed) if segment.uses_seed else None)
        self._inputs = {}
        found = dict(zip(segment.outputs, outputs, strict=True))
        for name, value in found.items():
            found[name] = self._give(value, _NOBODY, owned=True) if type(value) is list else np.asarray(value)
        if segment.outputs != prepared.outputs:
            found = {name: found[name] for name in prepared.outputs}
        return Finished(found, "compiled")

    def _advance(self, cache: SegmentCache, observe: Observe) -> Finished | Missing:
        if self.prepared.options.compiler == "eager":
            run_on_host(self._frames[0], 0, len(self.prepared.nodes))
            return self._finish("interpreted")
        while True:
            frame = self._frames[-1]
            if frame.index == len(frame.prepared.nodes):
                if frame.host is None:
                    interpreted = "mixed" if self._compiled else "interpreted"
                    return self._finish(interpreted if self._wanted else "compiled")
                self._frames.pop()
                self._go_on(frame.host, frame.outputs(), observe)
            elif _breaks_here(frame):
                self._note_break(frame, cache)
                self._break(frame, observe)
            else:
                segment = cache.kept(frame.values) if frame.host is None and frame.index == 0 else None
                if segment is None:
                    place = (*frame.prepared.path, frame.index)
                    segment = cache.find(place, frame.values) or self._in_hand(place, frame.values)
                    if segment is None:
                        missing = _miss(frame, place, cache, observe)
                        if self.waits:
                            return missing
                        self._interpret(frame, missing, cache, observe)
                        continue
                    if not frame.missed:
                        cache.count(place, hit=True)
                        observe(segment.hit)
                    frame.missed = False
                _run_segment(frame, segment)
                self._compiled += 1
                frame.index = segment.stop
                if segment.needs is not None:
                    self._break(frame, observe)

    def _in_hand(self, place: tuple[Any, ...], values: Mapping[str, Any]) -> Segment | None:
        """The segment that was compiled for this call, if it is the one: it may have left the cache before the call came back."""
        found, self.given = self.given, None
        if found is None or found.place != place:
            return None
        if not all(name in values for name in found.layout.arguments + found.layout.values):
            return None
        return found if entry_key(found.layout, values) == found.key else None

    def _note_break(self, frame: Frame, cache: SegmentCache) -> None:
        """A break that no segment leads to: `explain` and `breaks="error"` must know it all the same."""
        prepared, node = frame.prepared, frame.prepared.nodes[frame.index]
        place = (*prepared.path, frame.index)
        if place in cache.bare_breaks:
            return
        if frame.index in prepared.options.force_breaks:
            needs = forced_break(node)
        else:
            value = next(name for name in node.inputs if name in frame.values and name not in frame.known)
            needs = depends_on_values(node, value, prepared.producers.get(value))
        refused = prepared.options.refuses_breaks
        if refused is not None:
            raise BreakRefused(f"the graph would break, which {refused} refuses: {needs}") from needs
        cache.bare_breaks[place] = needs
        prepared.root.graph_break = True

    def _interpret(self, frame: Frame, missing: Missing, cache: SegmentCache, observe: Observe) -> None:
        """Go on on the host: to the break that programs for other shapes found, or to the end where none is known."""
        self._wanted.append(missing.job)
        frame.missed = False
        end = len(frame.prepared.nodes)
        stop = cache.stop(missing.job.place) if self._compiled else None
        stop = end if stop is None else stop
        run_on_host(frame, frame.index, stop)
        frame.index = stop
        if stop < end:
            self._break(frame, observe)

    def _break(self, frame: Frame, observe: Observe) -> None:
        node = frame.prepared.nodes[frame.index]
        # The time until they are there is the segment's, not the break's.
        for name in frame.prepared.reads[frame.index]:
            value = frame.values.get(name)
            for each in value if isinstance(value, list) else (value,):
                if isinstance(each, jax.Array):
                    each.block_until_ready()
        observe(BreakStarted(node.position, node.name, node.op_type))
        self._breaks.append(node)
        found = hosted(frame, node)
        if found is None:
            run_on_host(frame, frame.index, frame.index + 1)
            self._leave(frame, observe)
        else:
            self._go_on(found, None, observe)

    def _go_on(self, hosted: Hosted, outputs: list[Any] | None, observe: Observe) -> None:
        """Start the next body of a hosted node, or finish the node."""
        body = hosted.step(outputs)
        if body is not None:
            self._frames.append(body)
            return
        frame = hosted.frame
        last_use = frame.prepared.last_use
        node = frame.prepared.nodes[frame.index]
        donates = frame.prepared.options.donate
        for name, value in zip(node.outputs, hosted.results, strict=False):
            if name and name in last_use:
                if donates and any(frame.values.get(each) is value for each in donates):
                    value = to_numpy(value)  # given back as it was, and the input may be consumed before this is read
                frame.values[name] = value
        self._leave(frame, observe)

    def _leave(self, frame: Frame, observe: Observe) -> None:
        node = self._breaks.pop()
        observe(BreakDone(node.position, node.name, node.op_type))
        frame.index += 1

    def _finish(self, tier: str) -> Finished:
        frame = self._frames[0]
        initializers = self.prepared.graph.initializers
        foreign = set(map(id, self._inputs.values()))
        outputs = {}
        cut = None if self._cut is None else self._cut.settled(frame.value)
        for name in self.prepared.outputs:
            value = frame.value(name)
            if cut is not None:
                value = cut.output(name, to_numpy(value))
            outputs[name] = self._give(value, foreign, owned=name not in initializers)
        if self.device:
            outputs = {name: self._put(value) for name, value in outputs.items()}
            for leaf in jax.tree.leaves(outputs):
                if isinstance(leaf, jax.Array):
                    leaf.block_until_ready()
        frame.values.clear()
        self._inputs = {}
        return Finished(outputs, tier, tuple(self._wanted))

    def _give(self, value: Any, foreign: AbstractSet[int], *, owned: bool) -> Any:
        """An output as the caller gets it: read-only, never the memory of an input or a weight."""
        if isinstance(value, jax.Array):
            if self.device:
                return value
            return np.array(value) if not owned or id(value) in foreign else np.asarray(value)
        if isinstance(value, list):
            return [self._give(item, foreign, owned=False) for item in value]
        if not isinstance(value, np.ndarray):
            return value
        if not owned or id(value) in foreign or value.base is not None or not value.flags.c_contiguous:
            value = value.copy()
        value.flags.writeable = False
        return value

    def _put(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self._put(item) for item in value]
        if isinstance(value, np.ndarray) and value.dtype != object:
            return jax.device_put(value, self.prepared.placement.home)
        return value


def _breaks_here(frame: Frame) -> bool:
    """A host-only node that meets a run-time value starts no segment of its own, nor does a forced break."""
    index = frame.index
    if index in frame.prepared.options.force_breaks:
        return True
    if index not in frame.prepared.host_only:
        return False
    return any(name in frame.values and name not in frame.known for name in frame.prepared.nodes[index].inputs)


def _miss(frame: Frame, place: tuple[Any, ...], cache: SegmentCache, observe: Observe) -> Missing:
    prepared = frame.prepared
    values = frame.live()
    job = CompileJob(
        prepared,
        frame.index,
        values,
        frame.known,
        cache.statics(place) | (frozenset(prepared.options.static_inputs) & values.keys()),
        first=frame.host is None and frame.index == 0,
    )
    if not frame.missed:  # else it came and went while this call waited for its turn: still one miss, and its span
        cache.count(place, hit=False)
        observe(CacheMiss(job.position, job.shapes, prepared.options.cold == "interpret"))
        advice = cache.advisor.missed(prepared, place, job.position, job.shapes)
        if advice is not None:
            observe(advice)
    frame.missed = True
    return Missing(job)


def _run_segment(frame: Frame, segment: Segment) -> None:
    if segment.eager:
        run_on_host(frame, segment.index, segment.stop)
        # What follows from shapes is known to the next segment, however small this one was.
        frame.known |= segment.host_outputs.keys()
        return
    values = frame.values
    if segment.program is not None:
        outputs = _run_program(segment, values, frame.seed if segment.uses_seed else None)
        values.update(zip(segment.outputs, outputs, strict=True))
    if segment.host_outputs:
        values.update(segment.host_outputs)
        frame.known |= segment.host_outputs.keys()


def _run_program(segment: Segment, values: Mapping[str, Any], seed: np.ndarray | None) -> Sequence[Any]:
    """The program's outputs in the segment's order; its alarm raises, or warns."""
    arguments = tuple(map(values.__getitem__, segment.arguments))
    outputs, alarm = segment.program(segment.weights, arguments, seed)
    if alarm is not None:
        number = int(alarm)
        if number > 0:
            raise segment.alarms[number - 1].error()
        if number < 0:
            segment.alarms[-number - 1].warn()
    return outputs  # type: ignore[no-any-return]


def run_on_host(frame: Frame, start: int, stop: int) -> None:
    """Nodes in numpy, on the frame's values; what later nodes read goes back into them."""
    prepared = frame.prepared
    options = prepared.options
    run = Run(
        tracing=False,
        seed=frame.seed,
        bounds=options.bounds,
        nonfinite=options.nonfinite,
        platform=prepared.platform,
        producers=prepared.producers,
    )
    scope = Scope(outer=_HostValues(frame.values, outer=Scope(cast("dict[str, Any]", prepared.graph.initializers))))
    last_use = prepared.last_use
    for index in range(start, stop):
        run_node(run, prepared.nodes[index], scope)
        for name in prepared.reads[index]:
            if last_use[name] == index:
                scope.values.pop(name, None)
    for name, value in scope.values.items():
        if last_use.get(name, -1) >= stop:
            frame.values[name] = value


class _HostValues(Scope):
    """A frame's values, brought to the host as they are read, without changing where they live."""

    __slots__ = ("_copies",)

    def __init__(self, values: dict[str, Any], *, outer: Scope) -> None:
        super().__init__(values, outer=outer)
        self._copies: dict[str, Any] = {}

    def read(self, name: str) -> Any:
        """The value of a name as numpy."""
        if name not in self._copies:
            self._copies[name] = to_numpy(super().read(name))
        return self._copies[name]
