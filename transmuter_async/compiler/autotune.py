"""Autotuning: a segment compiled in a few other ways, compared, and timed next to the program that is used already.

What is tried: the sets of operations that XLA gives to its library on a CPU (`operators.FUSIONS`), then each form that the
segment's operators take (`operators.LOWERINGS`) left out, and all of them left out. Nothing that may round otherwise than the
graph says is among them. A candidate must first give the default program's results, up to the order of float sums, on the
same inputs; then both are called in turns, and the shortest calls decide. One that is faster is measured once more before it is
taken: of many candidates, one is fast by chance.

Time is bounded: no candidate is begun that would, by what the last one took, end after `BUDGET`.
"""

from __future__ import annotations

import dataclasses
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from transmuter_async.compiler.facts import Observe
from transmuter_async.compiler.frames import run_key
from transmuter_async.compiler.job import Built, CompileJob
from transmuter_async.compiler.placement import unwrapped
from transmuter_async.compiler.segment import Segment
from transmuter_async.compiler.settings import pinned
from transmuter_async.compiler.stored import Stored
from transmuter_async.compiler.tuning import Trial, Tuning, Variant
from transmuter_async.errors import TransmuterError
from transmuter_async.graph import Node

__all__ = ["BUDGET", "TuneJob"]

BUDGET = 60_000_000_000
"""Nanoseconds in which the candidates of one segment must be tried."""

TURNS = 400_000_000
"""Nanoseconds of calls in turns, after which a candidate is judged; the second judgement takes twice as many."""

LEAST = 10
"""Turns that there are at least, unless they take five times as long."""

GAIN = 0.97
"""Time over the default's from which on a candidate is faster: below that it may be chance."""

TOLERANCES = {"float64": 1e-9, "float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}
"""Relative to an element and the mean magnitude of its tensor, for what the order of sums may change. Complex numbers as their
parts; floats of 8 and 4 bits, integers, booleans: not at all."""

Clock = Callable[[], int]


class TuneJob:
    """The work of tuning one segment that was just compiled; runs in a thread, once.

    It keeps no program, and of the call only copies: what the caller gives may be written to once it is answered.

    Args:
        job: That compiled the segment. Its values are still the caller's.
        segment: What it gave, with a program.

    Attributes:
        stopped: Set by whoever ends it: no further candidate is begun.
    """

    def __init__(self, job: CompileJob, segment: Segment) -> None:
        self.job = job.lightened()
        self.stopped = threading.Event()
        self._given = {name: _owned(job.values[name]) for name in segment.arguments}
        self._drawn = any(_lacks(value) for value in self._given.values())

    @classmethod
    def of(cls, job: CompileJob, segment: Segment) -> TuneJob | None:
        """For a segment that is to be tuned; None for one that is already, has no program, or may not be."""
        wanted = job.prepared.options.autotune and segment.program is not None and segment.tuning is None
        return cls(job, segment) if wanted else None

    def run(self, observe: Observe, clock: Clock) -> Segment | None:
        """Try, choose, and write the choice to the disk cache.

        Args:
            observe: Is told of each compile, and how the disk cache fared.
            clock: Nanoseconds.

        Returns:
            The segment to be used from now on; None where it was stopped.

        Raises:
            CompileError: The default program, which this compiles anew, was refused this time.
        """
        prepared = self.job.prepared
        with pinned(device=prepared.device, precision=prepared.options.precision):
            noted = prepared.root.noted_weights()
            used: frozenset[int] = frozenset()
            try:
                search = _Search(self, observe, clock)
                built = search.run()
                if built is not None:
                    used = frozenset(map(id, built.weights))
            finally:
                prepared.root.forget_weights(noted, used)
            if built is None:
                return None
            if prepared.root.disk is not None and not search.note:
                Stored(self.job, prepared.root.disk).save(built, observe)
            return built.segment

    def inputs(self) -> Iterator[tuple[Any, ...]]:
        """Arguments to compare and measure with: a call's, or two that are drawn for its shapes."""
        draws: Sequence[Callable[[Any, tuple[int, ...]], Any]] = (
            lambda random, shape: random.standard_normal(shape, np.float32),
            lambda random, shape: random.random(shape, np.float32),
        )
        for draw in draws if self._drawn else draws[:1]:
            random = np.random.default_rng(0)
            yield tuple(_filled(value, draw, random) for value in self._given.values())

    @property
    def drawn(self) -> bool:
        """Whether some input was only known by its shape."""
        return self._drawn


class _Search:
    def __init__(self, job: TuneJob, observe: Observe, clock: Clock) -> None:
        self.job = job
        self.note = ""
        self._observe = observe
        self._clock = clock
        self._began = clock()
        self._trials: list[Trial] = []
        self._longest = 0  # of the last candidates, compile and turns

    def run(self) -> Built | None:
        job = self.job.job
        default = job.variant
        base = job.trial(default, "default", self._observe)
        self._longest = self._clock() - self._began
        nodes = job.prepared.nodes[base.segment.index : base.segment.stop]
        if self.job.drawn and any(map(_may_not_end, nodes)):
            self.note = "a loop may never end on values that are drawn, and no call had given any"
            return self._chosen(base, "default")
        calls = list(self.job.inputs())
        wanted = [_outputs(base.segment, arguments) for arguments in calls]
        taken = tuple(dict.fromkeys(name for _, _, name in base.segment.lowerings))
        best, best_ratio, best_built = default, 1.0, base

        def attempt(variant: Variant) -> None:
            nonlocal best, best_ratio, best_built
            found = self._attempt(variant, variant.named(default, taken), base, calls, wanted)
            if found is None:
                return
            ratio = self._trials[-1].ratio
            if ratio is not None and ratio < GAIN * best_ratio:
                ratio = self._again(found, base, calls[0], GAIN * best_ratio)
                if ratio < GAIN * best_ratio:
                    best, best_ratio, best_built = variant, ratio, found

        for variant in self._fusions(default, base):
            attempt(variant)
        for name in taken:
            attempt(best.without(name))
        if len(taken) > 1:
            attempt(Variant(default.lowerings - set(taken), best.fusions))
        if self.job.stopped.is_set():
            return None
        return self._chosen(best_built, best.named(default, taken))

    def _again(self, found: Built, base: Built, arguments: tuple[Any, ...], least: float) -> float:
        """Measure the last candidate once more; the less favourable ratio of the two, which is what its trial tells."""
        trial = self._trials[-1]
        ours, theirs = measured(found.segment, base.segment, arguments, self._clock, 2 * TURNS)
        out = "measured once more, it was not that fast" if ours / theirs >= least else None
        second = dataclasses.replace(trial, nanoseconds=ours, default_nanoseconds=theirs, out=out)
        first_ratio, ratio = trial.ratio or 0.0, second.ratio or 0.0
        self._trials[-1] = second if ratio >= first_ratio else trial
        return max(first_ratio, ratio)

    def _chosen(self, built: Built, name: str) -> Built:
        values = "drawn" if self.job.drawn else "call"
        tuning = Tuning(name, tuple(self._trials), values, self._clock() - self._began, self.note)
        return dataclasses.replace(built, segment=dataclasses.replace(built.segment, tuning=tuning))

    def _fusions(self, default: Variant, base: Built) -> Iterator[Variant]:
        """On a CPU each set that makes another program: a set differs from the next by what the graph may not have."""
        if self.job.job.prepared.platform != "cpu":
            return
        yield dataclasses.replace(default, fusions="none")
        if self._trials[-1].out != SAME:  # there are products
            yield dataclasses.replace(default, fusions="products and convolutions")
            if self._trials[-1].out == SAME:  # and no convolutions
                return
        yield dataclasses.replace(default, fusions="convolutions")

    def _attempt(
        self, variant: Variant, name: str, base: Built, calls: Sequence[tuple[Any, ...]], wanted: Sequence[Any]
    ) -> Built | None:
        """Compile, compare, measure; the trial is noted. None where it is out."""
        began = self._clock()
        if self.job.stopped.is_set() or began + self._longest > self._began + BUDGET:
            self._trials.append(Trial(name, out="not tried: the time was up"))
            return None
        compiled = 0
        try:
            built = self.job.job.trial(variant, name, self._observe)
            compiled = self._clock() - began
            why, wrong = _unlike(built.segment, base.segment), False
            if why is None:
                for arguments, want in zip(calls, wanted, strict=True):
                    why = why or _difference(_outputs(built.segment, arguments), want)
                wrong = why is not None
            if why is None:
                times = measured(built.segment, base.segment, calls[0], self._clock, TURNS)
                self._trials.append(Trial(name, *times, compile_nanoseconds=compiled))
                return built
        except (TransmuterError, RuntimeError, ValueError, TypeError) as error:
            why, wrong = f"{type(error).__name__}: {error}".splitlines()[0], False
        finally:
            self._longest = max(self._longest, self._clock() - began)
        self._trials.append(Trial(name, compile_nanoseconds=compiled, out=why, wrong=wrong))
        return None


SAME = "the same program"


def measured(one: Segment, other: Segment, arguments: tuple[Any, ...], clock: Clock, limit: int) -> tuple[int, int]:
    """Nanoseconds of the shortest call of each, which take turns for about `limit` nanoseconds."""
    shortest = [0, 0]
    spent = turns = 0
    while turns == 0 or (turns < LEAST and spent < 5 * limit) or spent < limit:
        for at, segment in enumerate((one, other)):
            began = clock()
            _outputs(segment, arguments)
            took = clock() - began
            spent += took
            shortest[at] = min(shortest[at] or took, took)
        turns += 1
    return shortest[0], shortest[1]


def _outputs(segment: Segment, arguments: tuple[Any, ...]) -> Any:
    """Outputs and alarm of a program, when they are there."""
    seed = run_key(0) if segment.uses_seed else None
    return jax.block_until_ready(segment.program(segment.weights, arguments, seed))  # type: ignore[no-untyped-call]


def _unlike(found: Segment, base: Segment) -> str | None:
    """Why a segment can't take the place of another, before anything is computed; None where it can."""
    for part in ("stop", "layout", "key", "arguments", "outputs", "alarms", "uses_seed", "host_values", "donated"):
        if getattr(found, part) != getattr(base, part):
            return f"its {part} are not those of the default program"
    if found.host_outputs.keys() != base.host_outputs.keys():
        return "its host_outputs are not those of the default program"
    if _text(found) == _text(base):
        return SAME
    return None


_PLACES = re.compile(r", metadata=\{[^}]*\}|^(?:\d.*|FileNames|FunctionNames|FileLocations|StackFrames)$", re.MULTILINE)


def _text(segment: Segment) -> str:
    """The program without where in Python each of its operations comes from, which differs from trace to trace."""
    return "\n".join(filter(None, _PLACES.sub("", str(unwrapped(segment.program).as_text())).splitlines()))


def _difference(found: Any, want: Any) -> str | None:
    """How outputs and alarm differ beyond the tolerance, in words; None where they do not."""
    if str(jax.tree.structure(found)) != str(jax.tree.structure(want)):
        return "it gives other outputs"
    for number, (one, other) in enumerate(zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True)):
        got, expected = np.asarray(one), np.asarray(other)
        if got.shape != expected.shape or got.dtype != expected.dtype:
            return f"result {number} is {got.dtype}{list(got.shape)}, not {expected.dtype}{list(expected.shape)}"
        bad = _beyond(got, expected)
        if bad:
            return f"results differ: {bad} of {got.size} elements of result {number}"
    return None


def _beyond(got: np.ndarray, want: np.ndarray) -> int:
    """How many elements differ beyond the tolerance."""
    if got.dtype.kind == "c":
        return _beyond(got.real, want.real) + _beyond(got.imag, want.imag)
    rtol = TOLERANCES.get(got.dtype.name)
    if rtol is None:
        if got.dtype.kind == "V":  # floats of 8 and 4 bits: by their bits, since NaN is no NaN's equal
            got, want = got.view(np.uint8), want.view(np.uint8)
        return int(np.count_nonzero(got != want))
    got, want = got.astype(np.float64), want.astype(np.float64)
    finite = np.isfinite(want)
    same = (got == want) | (np.isnan(got) & np.isnan(want))
    scale = float(np.abs(want[finite]).mean()) if finite.any() else 0.0
    with np.errstate(invalid="ignore"):
        near = finite & (np.abs(got - want) <= rtol * (np.abs(want) + scale))
    return int(np.count_nonzero(~(same | near)))


def _may_not_end(node: Node) -> bool:
    inner = (each for graph in node.subgraphs() for each in graph.walk())
    return any(each.op_type == "Loop" for each in (node, *inner))


def _lacks(value: Any) -> bool:
    """Whether a value only stands for a shape: a view of one zero, as `Spec`s and jobs without their arrays have."""
    if isinstance(value, list):
        return any(map(_lacks, value))
    return isinstance(value, np.ndarray) and value.size > 1 and not any(value.strides)


def _owned(value: Any) -> Any:
    """A copy that nobody else writes to; what only stands for a shape stays as it is."""
    if isinstance(value, list):
        return [_owned(item) for item in value]
    return value if _lacks(value) else np.array(value)


def _filled(value: Any, draw: Callable[[Any, tuple[int, ...]], Any], random: np.random.Generator) -> Any:
    """Floats that are drawn, and zeros for the rest, which are valid indices, where only a shape is known."""
    if isinstance(value, list):
        return [_filled(item, draw, random) for item in value]
    if not _lacks(value):
        return value
    known = value.dtype.name in TOLERANCES
    return draw(random, value.shape).astype(value.dtype) if known else np.zeros(value.shape, value.dtype)
