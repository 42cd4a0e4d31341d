"""A compiler that a test controls: each key is a letter, each compile and each computation can be held.

A call of `{"keys": "ab", "x": 3}` needs the programs "a" and "b", one after the other, and answers `{"y": 103}`. The
actor around it is the real one.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import anyio

from transmuter_async.actors import ActorStatistics, Compiled, ModelActor
from transmuter_async.bridge import Waker, current_loop
from transmuter_async.compiler import (
    CacheEvict,
    CacheHit,
    CacheMiss,
    Finished,
    Missing,
    SegmentFailed,
    SegmentReady,
    SegmentStarted,
)
from transmuter_async.errors import InputError
from transmuter_async.telemetry import Telemetry


class Gate:
    """Threads stop here while it is shut. Counts who came, who is inside, and the most that ever were."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._open = True
        self._passes = 0
        self._changed = anyio.Event()
        self._waker = Waker(current_loop(), self._wake)
        self.came: list[Any] = []
        self.inside = 0
        self.peak = 0

    def shut(self) -> None:
        with self._condition:
            self._open = False

    def open(self) -> None:
        with self._condition:
            self._open = True
            self._condition.notify_all()

    def let(self, count: int = 1) -> None:
        """Let `count` of those who wait (or come) pass."""
        with self._condition:
            self._passes += count
            self._condition.notify_all()

    def pass_through(self, what: Any) -> None:
        with self._condition:
            self.came.append(what)
            self.inside += 1
            self.peak = max(self.peak, self.inside)
            self._waker.wake()
            self._condition.wait_for(lambda: self._open or self._passes)
            if not self._open:
                self._passes -= 1
            self.inside -= 1
            self._waker.wake()

    async def wait_came(self, count: int) -> None:
        while len(self.came) < count:
            await self._changed.wait()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()


class FakeCompiler:
    """What the fakes of one test share.

    Attributes:
        compiles, computes: The gates.
        failing: Error by key: such compiles fail.
        cold: Whether calls go on without a program that is missing.
    """

    def __init__(self) -> None:
        self.compiles = Gate()
        self.computes = Gate()
        self.failing: dict[str, Exception] = {}
        self.cold = False
        self.released = 0


class FakeJob:
    def __init__(self, compiler: FakeCompiler, position: int, key: str) -> None:
        self.compiler = compiler
        self.key = (position, key)
        self.place = (position,)
        self.position = position
        self.shapes = ((key, ((), "int64")),)
        self.light = False

    def lighten(self) -> None:
        self.light = True

    def run(self, observe: Any) -> Any:
        observe(SegmentStarted(self.position, self.shapes))
        self.compiler.compiles.pass_through(self.key)
        error = self.compiler.failing.get(self.key[1])
        if error is not None:
            observe(SegmentFailed(self.position, self.shapes, error))
            raise error
        observe(SegmentReady(self.position, self.shapes, "end", True, None, (), None))
        return SimpleNamespace(key=self.key, position=self.position, shapes=self.shapes, program=None)


class FakeCache:
    """The segment cache's rules over fake segments. Remembers which threads touched it."""

    def __init__(self, cache_size: int) -> None:
        self.cache_size = cache_size
        self.code_bytes = 0
        self.held: OrderedDict[Any, Any] = OrderedDict()
        self.keeps: dict[Any, Any] = {}
        self.threads: set[str] = set()

    def get(self, key: Any) -> Any:
        self.threads.add(threading.current_thread().name)
        if key in self.keeps:
            return self.keeps[key]
        if key in self.held:
            self.held.move_to_end(key)
        return self.held.get(key)

    def kept(self, values: Any) -> Any:
        return None

    def find(self, place: Any, values: Any) -> Any:
        return self.get((place[0], values["keys"]))

    def put(self, segment: Any, observe: Any, *, keep: bool = False) -> None:
        self.threads.add(threading.current_thread().name)
        if keep:
            self.keeps[segment.key] = segment
            return
        self.held[segment.key] = segment
        while len(self.held) > self.cache_size:
            _, out = self.held.popitem(last=False)
            observe(CacheEvict(out.position, out.shapes, self.cache_size))

    def clear(self) -> None:
        self.threads.add(threading.current_thread().name)
        self.held.clear()
        self.keeps.clear()

    def segments(self) -> tuple[Any, ...]:
        return (*self.keeps.values(), *self.held.values())

    def statistics(self) -> Any:
        return SimpleNamespace(segments=len(self.held), kept=len(self.keeps))


class FakeExecution:
    def __init__(self, compiler: FakeCompiler, inputs: dict[str, Any]) -> None:
        self.compiler = compiler
        self.inputs = inputs
        self.position = 0
        self.missed = False
        self.given: Any = None

    def advance(self, cache: FakeCache, observe: Any) -> Finished | Missing:
        keys = self.inputs["keys"]
        compiled = False
        wanted: list[Any] = []
        while self.position < len(keys):
            job = FakeJob(self.compiler, self.position, keys[self.position])
            found = cache.get(job.key)
            given, self.given = self.given, None
            if found is None and given is not None and given.key == job.key:
                found = given
            if found is None:
                observe(CacheMiss(job.position, job.shapes, cold=self.compiler.cold))
                if not self.compiler.cold:
                    self.missed = True
                    return Missing(job)  # type: ignore[arg-type]
                wanted.append(job)
            else:
                compiled = True
                if not self.missed and job.key not in cache.keeps:
                    observe(CacheHit(job.position, job.shapes))
            self.missed = False
            self.compiler.computes.pass_through((self.position, self.inputs["x"]))
            if self.inputs.get("fails"):
                raise ValueError(f"the graph refuses {self.inputs['x']}")
            self.position += 1
        tier = "compiled" if not wanted else "mixed" if compiled else "interpreted"
        return Finished({"y": 100 + self.inputs["x"]}, tier, tuple(wanted))


class FakePrepared:
    platform = "cpu"
    device = None

    def __init__(self, compiler: FakeCompiler) -> None:
        self.compiler = compiler
        self.model: Any = SimpleNamespace(source="fake.onnx")
        self.options = SimpleNamespace(compiler="xla", precision="highest", nonfinite="ignore", autotune=False)
        self.graph_break: bool | None = False

    def take_inputs(self, inputs: Any, copy: bool | None = None) -> dict[str, Any]:
        if "x" not in inputs:
            raise InputError("'x' is missing, expected int64")
        return {"keys": "a", **inputs}

    def start(self, inputs: Any, *, seed: int, device: bool) -> FakeExecution:
        return FakeExecution(self.compiler, inputs)

    def find_break(self) -> None:
        pass

    def spec_job(self, specs: Any) -> FakeJob:
        return FakeJob(self.compiler, 0, specs["keys"])

    def _samples(self, specs: Any) -> Any:
        return specs

    def weight_bytes(self) -> int:
        return 64

    def release(self) -> None:
        self.compiler.released += 1


class FakeActor(ModelActor):
    """The real actor with a cache that knows fake segments."""

    def _new_cache(self) -> Any:
        return FakeCache(self._cache_size)


@asynccontextmanager
async def fake_model(
    *, kind: type[FakeActor] = FakeActor, telemetry: Telemetry | None = None, **options: Any
) -> AsyncIterator[tuple[Compiled, FakeCompiler]]:
    """A compiled fake, and its compiler. Leaving lets everything go and waits for the actor's end."""
    compiler = FakeCompiler()
    options = {"source": "fake.onnx", "specs": None, "cache_size": 16, **options}
    bus = Telemetry() if telemetry is None else telemetry
    async with anyio.create_task_group() as group:
        actor = kind("fake", bus, lambda: FakePrepared(compiler), **options)  # type: ignore[arg-type, return-value]
        group.start_soon(actor.serve)
        await actor.ready.wait()
        compiled = Compiled(actor)
        try:
            yield compiled, compiler
        finally:
            compiler.compiles.open()
            compiler.computes.open()
            actor.stop()
    assert actor.state == "stopped"


async def quiet(compiled: Compiled) -> ActorStatistics:
    """The counts when no thread has a call any more: one that was left holds its slot until its thread is done."""
    with anyio.fail_after(10):
        while (statistics := await compiled.statistics()).running:
            pass
    return statistics


def own_threads() -> list[str]:
    """Threads of ours that live now."""
    return [each.name for each in threading.enumerate() if each.name.startswith(("fake-", "transmuter-"))]
