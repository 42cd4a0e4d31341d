"""Our programs against onnxruntime: in one process, in turns, after their outputs were compared.

onnxruntime runs with `intra_op_num_threads` 1 and 2, everything else as it comes; the better one counts. Ours runs as an actor's
thread runs it: numpy in, one call of the program (or segments and breaks), numpy out, without the loop around it; what that adds
is `overhead.call`.
"""

from __future__ import annotations

import io
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from tests.benchmarks.frame import Figure, quick
from transmuter_async.compiler import Finished, Options, SegmentCache, pinned, prepare, unobserved
from transmuter_async.sources import read_local

__all__ = ["Arrays", "Ours", "Ratio", "Wrong", "compare", "figures", "session"]

Arrays = dict[str, np.ndarray]
BLOCK = 0.03
"""Seconds that one side calls before the other's turn, four calls at least."""
SETTLE = 3
"""Calls before a block that do not count: the other side's threads may still spin, and the scheduler takes two calls or three to
spread a side's own over the cores again (measured: 29, 23, 17, 17, … ms)."""


class Wrong(AssertionError):
    """Our outputs are not onnxruntime's."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """Seconds of the first answer, by what they went into."""

    load: float
    prepare: float
    first: float
    xla: float

    @property
    def ours(self) -> float:
        """Planning, tracing, and lowering: what is not XLA's compiler."""
        return self.first - self.xla


@dataclass(frozen=True, slots=True)
class Ratio:
    """Seconds of a call, medians.

    Attributes:
        ours: Of ours.
        one: Of onnxruntime's with one thread.
        two: And with two.
        used: Processor time of ours and of onnxruntime's with one thread, all threads of the process together: what a machine that
            others use too does not change much.
        apart: The largest difference of any output, as a share of what is allowed.
        compiled: The first answer of ours.
        session: Making onnxruntime's session with two threads.
    """

    ours: float
    one: float
    two: float
    used: tuple[float, float]
    apart: float
    compiled: Compiled
    session: float

    @property
    def ratio(self) -> float:
        """Ours against the better setting of onnxruntime."""
        return self.ours / min(self.one, self.two)


class Ours:
    """Calls of a model in this thread, programs kept. Enter `pinned()` around them, as an actor's thread does."""

    def __init__(self, source: Path | bytes, *, cache_dir: str | None = None) -> None:
        began = time.perf_counter()
        self.model = read_local(io.BytesIO(source) if isinstance(source, bytes) else source)
        loaded = time.perf_counter()
        self.prepared = prepare(self.model, Options(cache_dir=cache_dir))
        self.cache = SegmentCache(16)
        self.load, self.prepare = loaded - began, time.perf_counter() - loaded

    def pinned(self) -> AbstractContextManager[None]:
        """The settings that we trace and call with."""
        return pinned(device=self.prepared.device, precision=self.prepared.options.precision)

    def __call__(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        execution = self.prepared.start(self.prepared.take_inputs(inputs), seed=0, device=False)
        while True:
            step = execution.advance(self.cache, unobserved)
            if isinstance(step, Finished):
                return step.outputs
            self.cache.put(step.job.run(unobserved), unobserved)


def session(source: Path | bytes, threads: int) -> Any:
    """An onnxruntime session with that many threads for one operator."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])


@contextmanager
def xla_seconds() -> Iterator[list[float]]:
    """What XLA's compiler takes meanwhile, compile by compile."""
    found: list[float] = []

    def told(name: str, seconds: float, **more: Any) -> None:
        if "backend_compile" in name:
            found.append(seconds)

    jax.monitoring.register_event_duration_secs_listener(told)
    yield found
    found = []  # a listener can't be taken off in public: it goes on into a list that nobody reads


def apart(found: Any, expected: Any, tolerance: float) -> float:
    """The largest difference as a share of what is allowed: `tolerance` times the largest expected magnitude, at least 1."""
    if isinstance(expected, list):
        return max((apart(a, b, tolerance) for a, b in zip(found, expected, strict=True)), default=0.0)
    found, expected = np.asarray(found), np.asarray(expected)
    if found.shape != expected.shape or found.dtype != expected.dtype:
        raise Wrong(f"{found.dtype}{found.shape} instead of {expected.dtype}{expected.shape}")
    if expected.dtype.kind in "OUSb":
        return 0.0 if np.array_equal(found, expected) else np.inf
    if expected.size == 0:
        return 0.0
    if expected.dtype.kind in "iu" and expected.dtype.itemsize > 1:
        return 0.0 if np.array_equal(found, expected) else np.inf
    allowed = 1.0 if expected.dtype.kind in "iu" else tolerance * max(1.0, float(np.nanmax(np.abs(expected))))
    with np.errstate(invalid="ignore"):
        same = (found == expected) | (np.isnan(found) & np.isnan(expected))
        gaps = np.where(same, 0.0, np.abs(found.astype(np.float64) - expected.astype(np.float64)))
    worst = float(np.max(gaps))
    return np.inf if np.isnan(worst) else worst / allowed


def compare(source: Path | bytes, inputs: Arrays, *, seconds: float, tolerance: float = 1e-4) -> Ratio:
    """Compare outputs, then take times for about `seconds`.

    Args:
        source: The model's file or bytes.
        inputs: By name, as both take them.
        seconds: For all sides together, and a fourth of it more for processor time; a fourth of it with `--quick`.
        tolerance: See `apart`.

    Raises:
        Wrong: The outputs differ by more.
    """
    one = session(source, 1)
    names = [each.name for each in one.get_outputs()]
    expected = dict(zip(names, one.run(None, inputs), strict=True))
    ours = Ours(source)
    with ours.pinned():
        with xla_seconds() as xla:
            began = time.perf_counter()
            found = ours(inputs)
            first = time.perf_counter() - began
        if list(found) != names:
            raise Wrong(f"outputs {list(found)} instead of {names}")
        worst = 0.0
        for name, value in expected.items():
            worst = max(worst, gap := apart(found[name], value, tolerance))
            if gap > 1:
                raise Wrong(f"{name!r} is {gap:.3g} times what is allowed away from onnxruntime's")
        seconds = seconds / 4 if quick() else seconds
        calls = [lambda: ours(inputs), lambda: one.run(None, inputs)]
        # Before there is a session with a second thread, which goes on for a while after each call.
        used = [statistics.median(each) for each in turns(calls, seconds / 4, time.process_time)]
        began = time.perf_counter()
        two = session(source, 2)
        made = time.perf_counter() - began
        calls.append(lambda: two.run(None, inputs))
        times = [statistics.median(each) for each in turns(calls, seconds)]
    compiled = Compiled(ours.load, ours.prepare, first, sum(xla))
    return Ratio(times[0], times[1], times[2], (used[0], used[1]), worst, compiled, made)


def turns(
    calls: Sequence[Callable[[], Any]], seconds: float, clock: Callable[[], float] = time.perf_counter
) -> list[list[float]]:
    """What `clock` tells of every call, taken in turns of blocks."""
    counts = []
    for call in calls:
        call()
        began = time.perf_counter()
        call()
        counts.append(max(4, min(200, int(BLOCK / max(1e-6, time.perf_counter() - began)))))
    taken: list[list[float]] = [[] for _ in calls]
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(taken[0]) < 3:
        # The last one first: after two threads comes one, not ours.
        for call, count, times in list(zip(calls, counts, taken, strict=True))[::-1]:
            for _ in range(SETTLE):
                call()
            for _ in range(count):
                began = clock()
                call()
                times.append(clock() - began)
    return taken


def figures(
    what: str, found: Ratio, *, bound: float | None = None, note: str = "", more: bool = True
) -> Iterator[Figure]:
    """A comparison as figures; the first is the ratio."""
    sides = f"{_ms(found.ours)} against {_ms(found.one)} with one thread, {_ms(found.two)} with two"
    yield Figure(f"{what}: against onnxruntime", found.ratio, "×", bound, note="; ".join(filter(None, (sides, note))))
    used = f"{_ms(found.used[0])} against {_ms(found.used[1])}"
    yield Figure(
        f"{what}: processor time against one thread of onnxruntime", found.used[0] / found.used[1], "×", note=used
    )
    if more:
        yield Figure(f"{what}: a call", found.ours * 1e3, "ms")
        yield Figure(f"{what}: difference, as a share of what is allowed", found.apart, "", 1.0)
        compiled = found.compiled
        yield Figure(
            f"{what}: first answer",
            compiled.prepare + compiled.first,
            "s",
            note=f"folding {compiled.prepare:.2f} s, tracing {compiled.ours:.2f} s, XLA {compiled.xla:.2f} s",
        )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
