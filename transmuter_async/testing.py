"""Helpers for tests, ours and yours: recorded events, and a compile that the test holds and releases.

Nothing here is imported by the library itself.
"""

from __future__ import annotations

from types import TracebackType
from typing import Self

import anyio

from transmuter_async.telemetry import Event, Subscription, Telemetry

__all__ = ["Recorder"]


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
