"""A call on its way through the model actor: what the loop knows of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Any, Literal

from transmuter_async.actors.events import Observer
from transmuter_async.actors.messages import Run
from transmuter_async.actors.reply import AnyReply
from transmuter_async.compiler import Execution, Segment, SegmentCache
from transmuter_async.errors import DeadlineExceeded

__all__ = ["Call", "SharedCache", "deadline_exceeded"]

Place = Literal["waiting", "running", "compiling", "done"]


class Call:
    """A `Run` on its way. Owned by the loop, except for `execution`, which is the thread's that holds the slot.

    Attributes:
        place: Where it is.
        queued: Nanoseconds that it waited before it was taken up; None before.
        compiling: Nanoseconds that it waited for compiles.
        tier: Which tier answered; None before.
        heard: What `nonfinite="warn"` has to say; None for nothing.
    """

    __slots__ = (
        "began",
        "compiling",
        "execution",
        "heard",
        "installed",
        "message",
        "observer",
        "paused",
        "place",
        "queued",
        "reply",
        "tier",
    )

    def __init__(self, message: Run, reply: AnyReply, observer: Observer) -> None:
        self.message: Run | None = message
        self.reply = reply
        self.observer = observer
        self.place: Place = "waiting"
        self.execution: Execution | None = None
        self.began = time.monotonic_ns()
        self.queued: int | None = None
        self.compiling = 0
        self.paused = 0
        self.installed = 0
        self.tier: str | None = None
        self.heard: list[str] | None = None


class SharedCache(SegmentCache):
    """A cache for several run threads. The lock is held for look-ups, never while something runs or compiles."""

    def __init__(self, cache_size: int) -> None:
        super().__init__(cache_size)
        self._lock = threading.RLock()

    def kept(self, *arguments: Any) -> Segment | None:
        """See `SegmentCache.kept`."""
        with self._lock:
            return super().kept(*arguments)

    def find(self, *arguments: Any) -> Segment | None:
        """See `SegmentCache.find`."""
        with self._lock:
            return super().find(*arguments)

    def statics(self, *arguments: Any) -> frozenset[str]:
        """See `SegmentCache.statics`."""
        with self._lock:
            return super().statics(*arguments)

    def count(self, *arguments: Any, **options: Any) -> None:
        """See `SegmentCache.count`."""
        with self._lock:
            super().count(*arguments, **options)

    def put(self, *arguments: Any, **options: Any) -> None:
        """See `SegmentCache.put`."""
        with self._lock:
            super().put(*arguments, **options)

    def remember(self, segment: Segment, values: Mapping[str, Any], *, kept: bool) -> None:
        """See `SegmentCache.remember`. What another thread has swapped or dropped meanwhile is not remembered."""
        with self._lock:
            place = self._positions.get(segment.place)
            if kept:
                held = self._kept.get(segment.layout, {}).get(segment.key)
            else:
                held = None if place is None else place.segments.get((segment.layout, segment.key))
            if held is segment:
                super().remember(segment, values, kept=kept)

    def swap(self, *arguments: Any) -> bool:
        """See `SegmentCache.swap`."""
        with self._lock:
            return super().swap(*arguments)

    def clear(self) -> None:
        """See `SegmentCache.clear`."""
        with self._lock:
            super().clear()

    def segments(self) -> tuple[Segment, ...]:
        """See `SegmentCache.segments`."""
        with self._lock:
            return super().segments()


def deadline_exceeded(name: str, call: Call) -> DeadlineExceeded:
    """The error of a call whose deadline has passed: it says where the time went."""
    waited = time.monotonic_ns() - call.began
    compiling = call.compiling + (time.monotonic_ns() - call.paused if call.place == "compiling" else 0)
    where = {
        "waiting": "it was still in the queue",
        "compiling": "its program was being compiled; warm() compiles ahead of the traffic",
        "running": "it was being computed",
        "done": "it was being computed",
    }[call.place]
    return DeadlineExceeded(
        f"no answer from {name!r} within its timeout: {where}. {waited / 1e6:.1f} ms have passed, of them "
        f"{(waited if call.queued is None else call.queued) / 1e6:.1f} ms in the queue and {compiling / 1e6:.1f} ms for compiles"
    )
