"""A model that a test holds: the real worker in front of it, the real proof, and numpy instead of programs.

The graph doubles `x` (batch, length) and adds each row up. A row that begins with `BAD` raises what the test says.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import anyio
import numpy as np
from onnx import TensorProto, helper

from transmuter_async.compiler import Batching, Options, Prepared, prepare
from transmuter_async.errors import ActorStopped
from transmuter_async.graph import read_model
from transmuter_async.operators import known
from transmuter_async.serving import Serving, ServingActor, ServingOptions
from transmuter_async.telemetry import Telemetry

BAD = -13.0
BUCKETS = Batching("batch", {"length": [4, 8, 16]})


def doubling(*, batch: Any = "batch", length: Any = "length") -> bytes:
    """y = x + x; total = the sum of each row of y."""
    nodes = [
        helper.make_node("Add", ["x", "x"], ["y"], name="double"),
        helper.make_node("ReduceSum", ["y", "one"], ["total"], name="add_up", keepdims=0),
    ]
    graph = helper.make_graph(
        nodes,
        "doubling",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [batch, length])],
        [
            helper.make_tensor_value_info("y", TensorProto.FLOAT, [batch, length]),
            helper.make_tensor_value_info("total", TensorProto.FLOAT, [batch]),
        ],
        [helper.make_tensor("one", TensorProto.INT64, [1], [1])],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8).SerializeToString()


@functools.cache
def prepared(batching: Batching | None = BUCKETS, **options: Any) -> Prepared:
    """Made once: it takes time, and tests must not hold the loop."""
    options = {"cache_size": 64, **options}
    return prepare(read_model(doubling(), known=known), Options(batching=batching, **options))


class FakeModel:
    """What a serving sees of a compiled model.

    Attributes:
        calls: Inputs `x` of the calls that were started, in order.
        warmed: Shapes of `x` that were compiled ahead.
        error: What a row that begins with `BAD` raises; every call where `broken`.
        mixes: Let each row see the one before it, as a graph would of which the proof is wrong.
    """

    name = "fake"
    graph_break = False

    def __init__(self, ready: Prepared, max_concurrency: int = 1) -> None:
        self._prepared = ready
        self._actor = SimpleNamespace(max_concurrency=max_concurrency, losses=0)
        self.model = SimpleNamespace(source="fake.onnx")
        self.state = "running"
        self.calls: list[np.ndarray] = []
        self.warmed: list[tuple[int, ...]] = []
        self.cancelled = 0
        self.running = self.peak = 0
        self.error: Callable[[], Exception] = lambda: RuntimeError("the row is bad")
        self.broken = False
        self.mixes = False
        self.compile_error: Exception | None = None
        self._open = self._compiles_open = True
        self._passes = 0
        self._changed = anyio.Event()

    def shut(self) -> None:
        self._open = False

    def open(self) -> None:
        self._open = True
        self._wake()

    def let(self, count: int = 1) -> None:
        self._passes += count
        self._wake()

    def shut_compiles(self) -> None:
        self._compiles_open = False

    def open_compiles(self) -> None:
        self._compiles_open = True
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()

    async def wait_calls(self, count: int) -> None:
        while len(self.calls) < count:
            await self._changed.wait()

    async def wait_warmed(self, count: int) -> None:
        while len(self.warmed) < count:
            await self._changed.wait()

    async def warm(self, specs: Any) -> None:
        for each in (specs,) if isinstance(specs, Mapping) else specs:
            self.warmed.append(tuple(each["x"].shape))
        self._wake()
        await anyio.lowlevel.checkpoint()
        while not self._compiles_open:
            await self._changed.wait()
        if self.compile_error is not None:
            raise self.compile_error

    async def run(
        self, inputs: Mapping[str, Any], *, copy: bool | None = None, seed: int | None = None
    ) -> dict[str, Any]:
        if self.state != "running":
            raise ActorStopped("the actor 'fake' was closed")
        x = inputs["x"]
        self.calls.append(x.copy())
        self.running += 1
        self.peak = max(self.peak, self.running)
        self._wake()
        try:
            await anyio.lowlevel.checkpoint()
            while not self._open and not self._passes:
                await self._changed.wait()
            if not self._open:
                self._passes -= 1
            if self.state != "running":
                raise ActorStopped("the actor 'fake' was closed")
            if self.broken or (x[:, :1] == BAD).any():
                raise self.error()
            y = x + x
            if self.mixes:
                y = y + np.roll(x, 1, axis=0)
            found = {"y": y, "total": y.sum(1)}
            for value in found.values():
                value.flags.writeable = False
            return found
        except anyio.get_cancelled_exc_class():
            self.cancelled += 1
            raise
        finally:
            self.running -= 1


class Clock:
    """Time that stands still until it is told."""

    def __init__(self, actor: ServingActor) -> None:
        self._actor = actor
        self.now = 1_000_000_000
        actor.clock = lambda: self.now

    def advance(self, seconds: float) -> None:
        self.now += int(seconds * 1e9)
        self._actor._kick.set()


@asynccontextmanager
async def fake_serving(
    ready: Prepared, *, max_concurrency: int = 1, telemetry: Telemetry | None = None, **options: Any
) -> AsyncIterator[tuple[Serving, FakeModel, ServingActor]]:
    """A serving of the fake. Leaving lets everything go and waits for the end."""
    model = FakeModel(ready, max_concurrency)
    chosen = ServingOptions(**{"batch_size": 4, "batch_timeout": 1000.0, **options})
    actor = ServingActor("fake-serving", telemetry or Telemetry(), model, chosen)  # type: ignore[arg-type]
    refused: Exception | None = None
    async with anyio.create_task_group() as group:
        group.start_soon(actor.serve)
        try:
            await actor.ready.wait()
        except Exception as error:
            refused = error  # raised outside of the group
        else:
            try:
                yield Serving(actor), model, actor
            finally:
                model.open()
                model.open_compiles()
                actor.stop()
                with anyio.CancelScope(shield=True):
                    await actor.wait_stopped()
    if refused is not None:
        raise refused
    assert actor.state == "stopped"
    assert not actor._tickets
    assert not actor._runs
    assert not [each.name for each in threading.enumerate() if each.name.startswith("fake")]


async def settle(turns: int = 12) -> None:
    """Let everything that can go on go on: a few turns of the loop, no time."""
    for _ in range(turns):
        await anyio.lowlevel.checkpoint()


def row(value: float, length: int = 4, rows: int = 1) -> dict[str, np.ndarray]:
    """`rows` rows that count up from `value`."""
    return {"x": np.float32(value) + np.arange(rows * length, dtype=np.float32).reshape(rows, length) / 8}


def right(inputs: Mapping[str, Any], outputs: Mapping[str, Any]) -> bool:
    """Whether the outputs are those of these inputs."""
    y = inputs["x"] * 2
    return np.array_equal(outputs["y"], y) and np.allclose(outputs["total"], y.sum(1), rtol=1e-6)
