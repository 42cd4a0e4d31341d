"""What telemetry costs nobody who listens: the guarded emit of every call site, and the end of an actor that is busy."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

import anyio
import anyio.lowlevel
import numpy as np
from onnx import helper

import transmuter_async as tm
from tests.benchmarks.frame import Figure, benchmark
from tests.test_runtime import model_bytes
from transmuter_async.telemetry import Telemetry
from transmuter_async.testing import HeldCompiler

ROUNDS, EMITS = 20, 20_000
LIMIT = 0.1e-6
"""Seconds that an emit may cost that nobody listens to."""

ANSWERED = 0.05
"""Seconds within which `aclose` answers who waits."""


@dataclass(frozen=True)
class Emit:
    """Seconds of one guarded emit without a subscriber: with nobody on the bus, and with a listener for other events."""

    nobody: float
    elsewhere: float


def _guarded(bus: Telemetry) -> float:
    began = time.perf_counter()
    for number in range(EMITS):
        if bus.wants("transmuter.cache.hit"):
            bus.emit("transmuter.cache.hit", {"count": 1}, {"position": number})
    return time.perf_counter() - began


def _empty() -> float:
    began = time.perf_counter()
    for _ in range(EMITS):
        pass
    return time.perf_counter() - began


def _best(bus: Telemetry) -> float:
    guarded, empty = (min(measure() for _ in range(ROUNDS)) for measure in (lambda: _guarded(bus), _empty))
    return (guarded - empty) / EMITS


async def emit() -> Emit:
    """Best of several rounds, less the loop around it."""
    bus = Telemetry()
    nobody = _best(bus)
    async with bus.subscribe("transmuter.hub"):
        return Emit(nobody, _best(bus))


async def closing() -> dict[str, float]:
    """Seconds until the last of three callers is answered by an `aclose` in the middle of a compile and of a compute."""
    names = ["x", *(f"h{i}" for i in range(59)), "y"]
    nodes = [helper.make_node("MatMul", [a, "w"], [b]) for a, b in zip(names, names[1:], strict=False)]
    dims = [768, 768]
    model = model_bytes(nodes, {"x": dims}, {"y": dims}, w=np.eye(768, dtype=np.float32))
    x = np.ones(dims, np.float32)
    found = {}
    for where in ("compile", "compute"):
        answered: list[float] = []

        async def one(compiled: tm.Compiled, answered: list[float]) -> None:
            try:
                await compiled.run({"x": x})
            except tm.ActorStopped:
                answered.append(time.perf_counter())

        async with tm.Runtime() as runtime:
            compiled = await runtime.compile(model)
            with HeldCompiler(compiled) as held:
                if where == "compute":
                    held.release()
                    await compiled.run({"x": x})
                async with anyio.create_task_group() as group:
                    for _ in range(3):
                        group.start_soon(one, compiled, answered)
                    await anyio.wait_all_tasks_blocked()
                    began = time.perf_counter()
                    group.start_soon(compiled.aclose)
                    while len(answered) < 3:
                        await anyio.lowlevel.checkpoint()
                    held.release()
        found[where] = answered[-1] - began
    return found


@benchmark
async def emits() -> AsyncIterator[Figure]:
    """What a guarded emit costs that nobody listens to."""
    cost = await emit()
    yield Figure("an emit with nobody on the bus", cost.nobody * 1e9, "ns", bound=LIMIT * 1e9)
    yield Figure("an emit with a listener for other events", cost.elsewhere * 1e9, "ns", bound=LIMIT * 1e9)


@benchmark
async def closes() -> AsyncIterator[Figure]:
    """How soon `aclose` answers callers who wait."""
    for where, took in (await closing()).items():
        yield Figure(f"aclose in the middle of a {where}", took * 1e3, "ms", bound=ANSWERED * 1e3)
