"""What a call costs beyond the program: `await compiled.run` against an empty hop to a thread and the bare jitted call.

The three take turns, call by call, so that they meet the same caches, clock rates and neighbours; medians. In blocks of
one kind, an idle machine settles differently for each of them; that ratio is stated beside the other.
"""

from __future__ import annotations

import queue
import statistics
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import anyio
import jax
import numpy as np
from onnx import TensorProto, helper

import transmuter_async as tm
from tests.benchmarks.frame import Figure, benchmark
from transmuter_async.bridge import Waker, current_loop

CALLS = 2000


@dataclass(frozen=True)
class Overhead:
    """Seconds per call, medians."""

    hop: float
    bare: float
    call: float

    @property
    def ratio(self) -> float:
        """The call against hop and bare call together."""
        return self.call / (self.hop + self.bare)

    def __str__(self) -> str:
        return f"{self.call * 1e6:.0f} µs against {self.hop * 1e6:.0f} + {self.bare * 1e6:.0f} µs"


def three_nodes() -> bytes:
    """tanh(x * w + b), float32 (4, 8)."""
    nodes = [
        helper.make_node("Mul", ["x", "w"], ["m"]),
        helper.make_node("Add", ["m", "b"], ["s"]),
        helper.make_node("Tanh", ["s"], ["y"]),
    ]
    weights = [helper.make_tensor(name, TensorProto.FLOAT, [8], np.linspace(0.1, 1, 8)) for name in "wb"]
    info = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [4, 8]) for name in "xy"]
    graph = helper.make_graph(nodes, "three", info[:1], info[1:], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8).SerializeToString()


class Echo:
    """The empty round trip: a thread of its own, a queue there, one wake back."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[anyio.Event | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[anyio.Event] = queue.SimpleQueue()
        self._waker = Waker(current_loop(), self._wake)
        self._thread = threading.Thread(target=self._main, name="echo")
        self._thread.start()

    def _main(self) -> None:
        while (event := self._work.get()) is not None:
            self._done.put(event)
            self._waker.wake()

    def _wake(self) -> None:
        while not self._done.empty():
            self._done.get_nowait().set()

    async def __call__(self) -> None:
        event = anyio.Event()
        self._work.put(event)
        await event.wait()

    def close(self) -> None:
        self._work.put(None)
        self._thread.join()


async def _medians(calls: Sequence[Callable[[], Awaitable[Any]]], block: int) -> Overhead:
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(CALLS // block):
        for call, taken in zip(calls, times, strict=True):
            for _ in range(block):
                began = time.perf_counter()
                await call()
                taken.append(time.perf_counter() - began)
    return Overhead(*map(statistics.median, times))


async def measure() -> tuple[Overhead, Overhead]:
    """All three in one loop: call by call, and in blocks."""
    x = np.random.default_rng(0).standard_normal((4, 8)).astype(np.float32)
    w = b = np.linspace(0.1, 1, 8).astype(np.float32)
    jitted = jax.jit(lambda x, w, b: jax.numpy.tanh(x * w + b))

    async def bare() -> None:
        np.asarray(jitted(x, w, b))

    async with tm.Runtime() as runtime:
        compiled = await runtime.compile(three_nodes(), {"x": tm.Spec(x.shape, "float32")})
        echo = Echo()
        calls = (echo, bare, lambda: compiled.run({"x": x}))
        try:
            await _medians(calls, CALLS // 10)  # to warm up
            return await _medians(calls, 1), await _medians(calls, CALLS // 10)
        finally:
            echo.close()


@benchmark
async def call() -> AsyncIterator[Figure]:
    """A cached call of three nodes against an empty hop to a thread and the bare jitted call."""
    turns, blocks = await measure()
    yield Figure("an empty hop to a thread and back", turns.hop * 1e6, "µs")
    yield Figure("the bare jitted call", turns.bare * 1e6, "µs")
    yield Figure("await compiled.run", turns.call * 1e6, "µs")
    yield Figure("await compiled.run against hop and bare call, in turns", turns.ratio, "×", bound=1.7)
    yield Figure("the same in blocks of 200 calls", blocks.ratio, "×", note=str(blocks))
