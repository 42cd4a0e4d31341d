"""The compiler's facts made into events: here they get a clock, ids, and the actor's name.

One observer belongs to one call (or one compile) and is called in the one thread that works on it. It counts for the
actor's statistics, and it is where work that nobody waits for any more is stopped: between two steps, never inside one.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import structlog

from transmuter_async.compiler import (
    BreakDone,
    BreakFailed,
    BreakStarted,
    CacheAdvice,
    CacheEvict,
    CacheHit,
    CacheMiss,
    DiskEvicted,
    DiskFailed,
    DiskRejected,
    Fact,
    SegmentFailed,
    SegmentReady,
    SegmentStarted,
)
from transmuter_async.telemetry import Span, Telemetry

_log = structlog.get_logger("transmuter_async.disk_cache")

__all__ = ["Abandoned", "Observer", "Untouched"]


class Abandoned(BaseException):
    """Raised through the compiler to end a call that nobody waits for. Seen outside of the actor in events only."""


class Untouched(Abandoned):
    """The same, before the thread has done anything for the call."""


class Observer:
    """Turns facts into events.

    Args:
        telemetry: The bus.
        facts: Metadata of every event: `source` and `actor`.
        call: The call that this is part of, None for work of no call.
        parent: The span around, None for none.
        extra: Metadata of the segment's events: `background`.

    Attributes:
        stopped: Set by the loop when the caller has left: the next step is not taken.
        left: Why it has left a call that a thread had then: "cancelled" or "deadline".
        deadline: `time.monotonic_ns()` after which the next step is not taken.
        position: Of the segment that runs now, None while none does.
        timings: What ended: ("segment" | "break" | "compile", position, nanoseconds). A segment's time is that of its thread;
            a device may work on into what comes after.
    """

    __slots__ = (
        "_breaks",
        "_extra",
        "_facts",
        "_missed",
        "_segment",
        "_segment_began",
        "_since",
        "_telemetry",
        "call",
        "compile_failures",
        "compile_time",
        "compiles",
        "deadline",
        "evictions",
        "hits",
        "left",
        "misses",
        "parent",
        "position",
        "stopped",
        "timings",
    )

    def __init__(
        self,
        telemetry: Telemetry,
        facts: Mapping[str, Any],
        *,
        call: int | None = None,
        parent: int | None = None,
        deadline: int | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        self._telemetry = telemetry
        self._facts = facts
        self._extra = extra
        self.call = call
        self.parent = parent
        self.deadline = deadline
        self.stopped = False
        self.left: str | None = None
        self.hits = self.misses = self.evictions = 0
        self.compiles = self.compile_failures = self.compile_time = 0
        self._segment: Span | None = None
        self._segment_began = 0
        # With when each began; no span where nobody listens. An If or a Loop that breaks may hold further breaks.
        self._breaks: list[tuple[Span | None, int]] = []
        self.position: int | None = None
        self._since = 0
        self._missed: int | None = None
        self.timings: list[tuple[str, int, int]] = []

    def resumed(self) -> None:
        """The program that was missing is there, and runs now."""
        self.position, self._since = self._missed, time.monotonic_ns()

    def ended(self) -> int:
        """The segment that ran, if one did, has ended: now, which is returned."""
        now = time.monotonic_ns()
        if self.position is not None:
            self.timings.append(("segment", self.position, now - self._since))
            self.position = None
        return now

    def check(self, error: type[Abandoned] = Abandoned) -> None:
        """Raise `error` when the caller has left or its deadline has passed."""
        if self.stopped:
            raise error("the caller has left")
        if self.deadline is not None and time.monotonic_ns() >= self.deadline:
            raise error("the deadline of the call has passed")

    def leave(self) -> None:
        """The call has ended while no thread had it: so have the breaks that it was in."""
        while self._breaks:
            span, _ = self._breaks.pop()
            if span is not None:
                span.fail(Abandoned("the call has ended, and its break with it"), cancelled=True)

    def __call__(self, fact: Fact) -> None:
        """Take a fact. Raises `Abandoned` where the next step must not be taken."""
        if isinstance(fact, CacheHit):
            now = time.monotonic_ns()
            if self.stopped or (self.deadline is not None and now >= self.deadline):
                self.check()
            self.hits += 1
            if self.position is not None:
                self.timings.append(("segment", self.position, now - self._since))
            self._since = now
            self.position = fact.position
            if self._telemetry.wants("transmuter.cache.hit"):
                self._telemetry.emit("transmuter.cache.hit", {"count": 1, "monotonic_time": now}, self._placed(fact))
        elif isinstance(fact, CacheMiss):
            self.check()
            self.misses += 1
            now = self.ended()
            self._missed = None if fact.cold else fact.position
            if self._telemetry.wants("transmuter.cache.miss"):
                metadata = self._placed(fact)
                if fact.cold:
                    metadata["cold"] = True
                self._telemetry.emit("transmuter.cache.miss", {"count": 1, "monotonic_time": now}, metadata)
        elif isinstance(fact, CacheEvict):
            self.evictions += 1
            if self._telemetry.wants("transmuter.cache.evict"):
                self._telemetry.emit(
                    "transmuter.cache.evict", {"count": 1}, {**self._placed(fact), "cache_size": fact.cache_size}
                )
        elif isinstance(fact, CacheAdvice):
            if self._telemetry.wants("transmuter.cache.advice"):
                advice = {"position": fact.position, "axis": fact.axis, "advice": fact.advice}
                self._telemetry.emit(
                    "transmuter.cache.advice", {"count": fact.count}, {**self._facts, **self.where(), **advice}
                )
        elif isinstance(fact, (BreakStarted, BreakDone, BreakFailed)):
            self._broke(fact)
        elif isinstance(fact, (DiskRejected, DiskFailed, DiskEvicted)):
            self._on_disk(fact)
        else:
            self._compiled(fact)

    def _on_disk(self, fact: DiskRejected | DiskFailed | DiskEvicted) -> None:
        if isinstance(fact, DiskRejected):
            _log.warning("disk cache: file rejected, compiled again and replaced", reason=fact.reason, **self._facts)
        elif isinstance(fact, DiskFailed):
            _log.warning("disk cache: a program could not be kept", reason=fact.reason, **self._facts)
            if self._telemetry.wants("transmuter.disk_cache.error"):
                self._telemetry.emit(
                    "transmuter.disk_cache.error", {"count": 1}, {**self._facts, **self.where(), "reason": fact.reason}
                )
        elif self._telemetry.wants("transmuter.disk_cache.evict"):
            self._telemetry.emit(
                "transmuter.disk_cache.evict",
                {"bytes": fact.bytes},
                {**self._facts, **self.where(), "reason": fact.reason},
            )

    def _broke(self, fact: BreakStarted | BreakDone | BreakFailed) -> None:
        now = self.ended()
        if isinstance(fact, BreakStarted):
            self.check()
            span = None
            if self._telemetry.traces("transmuter.break.*"):
                facts = {**self._facts, "position": fact.position, "node": fact.node, "op_type": fact.op_type}
                span = self._span("transmuter.break", facts).start()
            self._breaks.append((span, time.monotonic_ns()))
        elif self._breaks:
            span, began = self._breaks.pop()
            if isinstance(fact, BreakDone):
                self.timings.append(("break", fact.position, now - began))
                if span is not None:
                    span.stop()
            elif span is not None:
                span.fail(fact.error, cancelled=True if isinstance(fact.error, Abandoned) else None)

    def _compiled(self, fact: SegmentStarted | SegmentReady | SegmentFailed) -> None:
        if isinstance(fact, SegmentStarted):
            if self._telemetry.traces("transmuter.segment.compile.*"):
                facts = {**self._facts, "position": fact.position, "shapes": list(fact.shapes)}
                if self._extra is not None:
                    facts.update(self._extra)
                if fact.tuning is not None:
                    facts["tuning"] = fact.tuning
                self._segment = self._span("transmuter.segment.compile", facts).start()
            self._segment_began = time.monotonic_ns()
            return
        took = time.monotonic_ns() - self._segment_began
        self.compile_time += took
        self.timings.append(("compile", fact.position, took))
        span, self._segment = self._segment, None
        if isinstance(fact, SegmentReady):
            self.compiles += fact.compiled
            if span is not None:
                span.metadata.update(
                    shapes=list(fact.shapes),
                    stop=fact.stop,
                    compiled=fact.compiled,
                    disk_cache=fact.disk_cache,
                    reason=fact.reason,
                    host_values=list(fact.host_values),
                )
                span.stop()
        else:
            self.compile_failures += 1
            if span is not None:
                span.fail(fact.error)

    def _span(self, name: str, facts: Mapping[str, Any]) -> Span:
        return self._telemetry.span(name, facts, parent=self.inner, call=self.call)

    @property
    def inner(self) -> int | None:
        """The innermost span that is open."""
        return next((span.id for span, _ in reversed(self._breaks) if span is not None), self.parent)

    def _placed(self, fact: CacheHit | CacheMiss | CacheEvict) -> dict[str, Any]:
        return {**self._facts, **self.where(), "position": fact.position, "shapes": list(fact.shapes)}

    def where(self) -> dict[str, Any]:
        """Metadata that tie an event to its call, and to the break it is in; empty for work of no call."""
        if self.call is None:
            return {}
        return {"call": self.call, "parent": self.inner}
