"""Calls of shapes that have no program: answered on the host form at once, or when the program is compiled.

All ratios are of times in one process. `cold="interpret"` answers while nothing else runs: the compile behind the call before
has ended.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from typing import Any

import anyio
import jax
import numpy as np

import transmuter_async as tm
from tests.benchmarks.frame import Figure, benchmark
from tests.benchmarks.models import CLASSIFIER, MAGIKA, MINILM, PIPER, SILERO, Subject
from tests.models import test_references as references

CALLS = 200


async def _timed(compiled: tm.Compiled, inputs: dict[str, np.ndarray]) -> tuple[float, dict[str, Any]]:
    began = time.perf_counter()
    outputs = await compiled.run(inputs)
    return time.perf_counter() - began, outputs


async def _until_compiled(runtime: tm.Runtime, compiled: tm.Compiled, inputs: dict[str, np.ndarray]) -> dict[str, Any]:
    """Call until programs alone answer: the outputs then."""
    bus = runtime.telemetry
    async with (
        bus.subscribe("transmuter.call.stop") as calls,
        bus.subscribe("transmuter.segment.compile.stop") as compiles,
    ):
        while True:
            outputs = await compiled.run(inputs)
            if (await anext(aiter(calls))).metadata["tier"] == "compiled":
                return outputs
            with anyio.move_on_after(2):  # calls would only keep the compile behind them from its cores
                await anext(aiter(compiles))


def _apart(a: dict[str, Any], b: dict[str, Any]) -> float:
    assert all(a[name].shape == b[name].shape for name in a)
    return max(float(np.max(np.abs(a[name] - b[name]), initial=0)) for name in a)


async def measure(subject: Subject) -> list[Figure]:
    """First answers of new shapes in both ways, and what the host form takes against programs."""
    path = subject.source()
    seen, *new = [subject.make(size) for size in subject.sizes]
    waited, answered, warm, apart = [], [], [], 0.0
    async with tm.Runtime() as runtime:
        waits = await runtime.compile(path, cold="compile")
        at_once = await runtime.compile(path, cold="interpret")
        await waits.run(seen)
        await _until_compiled(runtime, at_once, seen)
        for inputs in new:
            took, programs = await _timed(waits, inputs)
            waited.append(took)
            warm.append(min([(await _timed(waits, inputs))[0] for _ in range(5)]))
            took, host = await _timed(at_once, inputs)
            answered.append(took)
            swapped = await _until_compiled(runtime, at_once, inputs)
            apart = max(apart, _apart(programs, host), _apart(host, swapped))
    ratio = statistics.median(b / a for a, b in zip(waited, answered, strict=True))
    name = subject.name
    return [
        Figure(f'{name}: first answer with cold="compile"', statistics.median(waited) * 1e3, "ms"),
        Figure(f'{name}: first answer with cold="interpret"', statistics.median(answered) * 1e3, "ms"),
        Figure(f"{name}: interpreted against compiled first answer", ratio, "×", bound=subject.cold),
        Figure(f"{name}: host form against a cached call", statistics.median(map(_ratio, answered, warm)), "×"),
        Figure(f"{name}: outputs before and after the swap, apart", apart, "", bound=subject.tolerance),
    ]


def _ratio(a: float, b: float) -> float:
    return a / b


@benchmark
def silero() -> Iterator[Figure]:
    """The first answer of a new shape: silero."""
    yield from anyio.run(measure, SILERO)


@benchmark
def magika() -> Iterator[Figure]:
    """The first answer of a new shape: magika."""
    yield from anyio.run(measure, MAGIKA)


@benchmark
def minilm() -> Iterator[Figure]:
    """The first answer of a new shape: MiniLM of 1 × 16 to 1 × 64."""
    yield from anyio.run(measure, MINILM)


@benchmark
def classifier() -> Iterator[Figure]:
    """The first answer of a new shape: the rapidocr classifier."""
    yield from anyio.run(measure, CLASSIFIER)


@benchmark
def piper() -> Iterator[Figure]:
    """The first answer of a new shape: Piper."""
    yield from anyio.run(measure, PIPER)


@benchmark
def storm() -> Iterator[Figure]:
    """200 calls, each of a new shape, with compile_after=2: nothing is compiled."""

    async def calls() -> tuple[int, float]:
        async with tm.Runtime() as runtime:
            compiled = await runtime.compile(MINILM.source(), cold="interpret", compile_after=2)
            began = time.perf_counter()
            for number in range(CALLS):
                batch, length = 1 + number // 50, 4 + number % 50
                await compiled.run(references.tokens(batch, length)(np.random.default_rng(number)))
            took = time.perf_counter() - began
            await compiled.statistics()  # what a call asked for behind it is in the book by now
            return (await compiled.statistics()).compiles, took

    events: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(lambda name, seconds, **more: events.append(name))
    compiles, took = anyio.run(calls)
    yield Figure("programs compiled", compiles, "", bound=0)
    yield Figure("XLA compiles of any kind", sum("backend_compile" in name for name in events), "", bound=0)
    yield Figure("a call", took / CALLS * 1e3, "ms")
