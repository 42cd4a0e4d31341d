"""What listeners cost the model they listen to: none, one that keeps up, one that is slow, one that never reads.

An event that somebody wants has to be made, which is some µs of a call; how slowly it is read must not matter. So the smallest call
is held against one with a listener that keeps up, and a model of some milliseconds against one that nobody listens to.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import anyio
import numpy as np
from onnx import helper

import transmuter_async as tm
from tests.benchmarks.frame import Figure, benchmark
from tests.benchmarks.overhead import three_nodes
from tests.test_runtime import model_bytes
from transmuter_async.telemetry import Subscription

SIZE, LAYERS = 256, 40
LISTENERS = ("nobody", "keeps up", "slow", "never reads")


async def _read(events: Subscription, pause: float) -> None:
    async for _ in events:
        if pause:
            await anyio.sleep(pause)


def chain() -> bytes:
    """LAYERS products of SIZE × SIZE: some milliseconds."""
    names = ["x", *(f"h{i}" for i in range(LAYERS - 1)), "y"]
    nodes = [helper.make_node("MatMul", [a, "w"], [b]) for a, b in zip(names, names[1:], strict=False)]
    return model_bytes(nodes, {"x": [SIZE, SIZE]}, {"y": [SIZE, SIZE]}, w=np.eye(SIZE, dtype=np.float32))


async def latencies(model: bytes, x: np.ndarray, blocks: int, calls: int) -> tuple[dict[str, float], int, int]:
    """Seconds of a cached call by listener, medians; and what was emitted to the slow ones, received and dropped.

    The four take turns in blocks of calls, so that they meet the same neighbours on the processor.
    """
    times: dict[str, list[float]] = {name: [] for name in LISTENERS}
    emitted = counted = 0
    async with tm.Runtime() as runtime:
        compiled = await runtime.compile(model, {"x": tm.Spec(x.shape, "float32")})
        await compiled.run({"x": x})
        for _ in range(blocks):
            for name in LISTENERS:
                async with AsyncExitStack() as stack:
                    if name != "nobody":
                        buffer = 1024 if name == "keeps up" else 8
                        events = await stack.enter_async_context(
                            runtime.telemetry.subscribe("transmuter", buffer=buffer)
                        )
                    if name in ("keeps up", "slow"):
                        group = await stack.enter_async_context(anyio.create_task_group())
                        group.start_soon(_read, events, 0.01 if name == "slow" else 0.0)
                    for number in range(calls):
                        began = time.perf_counter()
                        await compiled.run({"x": x})
                        if number:  # the first finds who listens
                            times[name].append(time.perf_counter() - began)
                    if name in ("keeps up", "slow"):
                        group.cancel_scope.cancel()
                if name in ("slow", "never reads"):
                    emitted += 2 * calls
                    counts = events.statistics()
                    counted += counts.received + counts.dropped + counts.buffered
    return {name: statistics.median(found) for name, found in times.items()}, emitted, counted


@benchmark
async def listeners() -> AsyncIterator[Figure]:
    """What a call costs by who listens."""
    found, emitted, counted = await latencies(three_nodes(), np.ones((4, 8), np.float32), 40, 50)
    for name in LISTENERS:
        yield Figure(f"three nodes: {name}", found[name] * 1e6, "µs")
    for name in ("slow", "never reads"):
        yield Figure(f"three nodes: {name} against keeps up", found[name] / found["keeps up"], "×", bound=1.0)
    yield Figure("events neither received nor counted as dropped", emitted - counted, "", bound=0)
    found, emitted, counted = await latencies(chain(), np.ones((SIZE, SIZE), np.float32), 20, 10)
    yield Figure("40 products: nobody", found["nobody"] * 1e3, "ms")
    for name in ("slow", "never reads"):
        yield Figure(f"40 products: {name} against nobody", found[name] / found["nobody"], "×", bound=1.05)
