"""What a call costs beyond the program: `await compiled.run` against an empty hop to a thread and the bare jitted call."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import anyio
import jax
import numpy as np
from onnx import TensorProto, helper

import transmuter_async as tm
from tests.benchmarks.frame import Figure, benchmark
from transmuter_async.bridge import Waker, current_loop

ROUNDS, CALLS = 7, 300


@dataclass(frozen=True)
class Overhead:
    """Seconds per call, the best of several rounds each."""

    hop: float
    bare: float
    call: float


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


async def _best(call: Callable[[], Awaitable[Any]]) -> float:
    times = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        for _ in range(CALLS):
            await call()
        times.append((time.perf_counter() - began) / CALLS)
    return min(times)


async def measure() -> Overhead:
    """All three in one loop, one after the other."""
    x = np.random.default_rng(0).standard_normal((4, 8)).astype(np.float32)
    w = b = np.linspace(0.1, 1, 8).astype(np.float32)
    jitted = jax.jit(lambda x, w, b: jax.numpy.tanh(x * w + b))

    async def bare() -> None:
        np.asarray(jitted(x, w, b))

    async with tm.Runtime() as runtime:
        compiled = await runtime.compile(three_nodes(), {"x": tm.Spec(x.shape, "float32")})
        await bare()
        await compiled.run({"x": x})
        echo = Echo()
        try:
            return Overhead(await _best(echo), await _best(bare), await _best(lambda: compiled.run({"x": x})))
        finally:
            echo.close()


@benchmark
async def call() -> AsyncIterator[Figure]:
    """A cached call of three nodes against an empty hop to a thread and the bare jitted call."""
    found = await measure()
    yield Figure("an empty hop to a thread and back", found.hop * 1e6, "µs")
    yield Figure("the bare jitted call", found.bare * 1e6, "µs")
    yield Figure("await compiled.run", found.call * 1e6, "µs")
    yield Figure("await compiled.run against hop and bare call", found.call / (found.hop + found.bare), "×")
