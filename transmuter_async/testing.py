"""Helpers for tests, ours and yours: recorded events, and a compile that the test holds and releases.

Nothing here is imported by the library itself.
"""

from __future__ import annotations

import threading
from collections import deque
from types import TracebackType
from typing import Any, Self

import anyio

from transmuter_async.actors import Compiled, ModelActor
from transmuter_async.bridge import Waker, current_loop
from transmuter_async.compiler import CompileJob, Fact, Observe, Segment, SegmentFailed, SegmentStarted
from transmuter_async.telemetry import Event, Subscription, Telemetry

__all__ = ["HeldCompiler", "Recorder"]


class Recorder:
    """Keeps every event of a bus, in order, from entering `async with` on.

    ```python
    async with Recorder(runtime.telemetry) as recorder:
        await compiled.run(inputs)
    assert recorder.names() == ["transmuter.call.start", "transmuter.call.stop"]
    ```

    Args:
        telemetry: The bus.
        prefixes: As for `subscribe`; none means all.
    """

    def __init__(self, telemetry: Telemetry, *prefixes: str) -> None:
        self._subscription: Subscription = telemetry.subscribe(*prefixes, buffer=1 << 20)
        self._events: list[Event] = []

    @property
    def events(self) -> list[Event]:
        """Everything emitted so far. No waiting: an event is there as soon as its `emit` has returned."""
        try:
            while True:
                self._events.append(self._subscription.receive_nowait())
        except (anyio.WouldBlock, anyio.EndOfStream):
            return list(self._events)

    def names(self) -> list[str]:
        """The events' names."""
        return [event.name for event in self.events]

    def named(self, name: str) -> list[Event]:
        """The events of one name."""
        return [event for event in self.events if event.name == name]

    def clear(self) -> None:
        """Forget what was recorded so far."""
        _ = self.events
        self._events.clear()

    async def __aenter__(self) -> Self:
        await self._subscription.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _ = self.events
        await self._subscription.__aexit__(kind, error, trace)


class HeldCompiler:
    """Holds the compiles of one model, so that a test can look at what happens meanwhile.

    ```python
    with HeldCompiler(compiled) as held:
        tasks.start_soon(compiled.run, inputs)
        await held.wait_started()
        ...  # cancel, close, send more calls
        held.release()
    ```

    Enter it in the model's own loop. Leaving it lets everything go.

    Attributes:
        started: `(position, shapes)` of each compile that has started.
        finished: How many have ended, whether well or not.
    """

    def __init__(self, compiled: Compiled | ModelActor) -> None:
        self._actor = compiled._actor if isinstance(compiled, Compiled) else compiled
        self._condition = threading.Condition()
        self._allowed = 0
        self._open = False
        self._errors: deque[BaseException] = deque()
        self._before: Any = None
        self._changed: anyio.Event | None = None
        self._waker: Waker | None = None
        self.started: list[tuple[int, Any]] = []
        self.finished = 0

    def hold(self) -> None:
        """Hold what starts from now on."""
        with self._condition:
            self._open = False
            self._allowed = 0

    def release(self, count: int | None = None) -> None:
        """Let `count` compiles go, those that are held first; None lets all go, also those that start later."""
        with self._condition:
            if count is None:
                self._open = True
            else:
                self._allowed += count
            self._condition.notify_all()

    def fail(self, error: BaseException) -> None:
        """Let one compile go, to fail with `error`."""
        with self._condition:
            self._errors.append(error)
            self._condition.notify_all()

    async def wait_started(self, count: int = 1) -> None:
        """Wait until `count` compiles have started in all."""
        while len(self.started) < count:
            await self._change()

    async def wait_finished(self, count: int = 1) -> None:
        """Wait until `count` compiles have ended in all."""
        while self.finished < count:
            await self._change()

    def __enter__(self) -> Self:
        self._changed = anyio.Event()
        self._waker = Waker(current_loop(), self._wake)
        self._before, self._actor.run_job = self._actor.run_job, self._run
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._actor.run_job = self._before
        self.release()

    async def _change(self) -> None:
        assert self._changed is not None
        await self._changed.wait()

    def _wake(self) -> None:
        if self._changed is not None:
            self._changed.set()
        self._changed = anyio.Event()

    def _run(self, job: CompileJob, observe: Observe) -> Segment:
        failed: list[BaseException] = []

        def held(fact: Fact) -> None:
            if failed and isinstance(fact, SegmentFailed):
                return  # told already
            observe(fact)
            if isinstance(fact, SegmentStarted):
                error = self._hold_one(fact)
                if error is not None:
                    failed.append(error)
                    observe(SegmentFailed(fact.position, fact.shapes, error))
                    raise error

        try:
            return job.run(held)
        finally:
            with self._condition:
                self.finished += 1
            self._tell()

    def _hold_one(self, fact: SegmentStarted) -> BaseException | None:
        with self._condition:
            self.started.append((fact.position, fact.shapes))
            self._tell()
            self._condition.wait_for(lambda: self._open or self._allowed or self._errors)
            if self._errors:
                return self._errors.popleft()
            if not self._open:
                self._allowed -= 1
            return None

    def _tell(self) -> None:
        if self._waker is not None:
            self._waker.wake()
