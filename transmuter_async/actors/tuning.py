"""The loop's book of tunings: what was compiled and may be compiled better, one after the other, behind all compiles.

Nobody's call waits for one: a segment is used as it was compiled until another takes its place. Plain data; the actor starts
what may start, in a compile thread that is there for nothing else.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import structlog

from transmuter_async.actors.reply import Reply
from transmuter_async.actors.threads import Threads
from transmuter_async.bridge import Loop
from transmuter_async.compiler import CompileJob, Observe, Prepared, Segment, SegmentCache, TuneJob

__all__ = ["Tuner", "swap", "to_tune", "tune"]

_log = structlog.get_logger("transmuter_async.autotune")

MOST = 16
"""Tunings that may wait, each with a copy of its inputs; what comes when there are more is tuned when it is compiled next."""


class Tuner:
    """What is to be tuned, and who waits for it. Owned by the loop."""

    def __init__(self) -> None:
        self._queue: deque[TuneJob] = deque()
        self._current: TuneJob | None = None
        self._ended = 0
        self._age = 0  # how often everything was forgotten
        self._waiting: list[tuple[int, Reply[None]]] = []

    @property
    def busy(self) -> bool:
        """Whether a tuning runs or waits."""
        return self._current is not None or bool(self._queue)

    def add(self, job: TuneJob) -> None:
        """Take one in, behind the others."""
        if len(self._queue) < MOST:
            self._queue.append(job)

    def start(
        self,
        compiling: Threads,
        run: Callable[[TuneJob], list[Segment]],
        running: Threads,
        put: Callable[[list[Segment]], tuple[int, int]],
        then: Callable[[tuple[int, int] | None], None],
    ) -> None:
        """Start the next one, unless one runs or there is none.

        Args:
            compiling: Where to `run` it.
            run: See `tune`.
            running: Where to `put` what it gave.
            put: See `swap`.
            then: Told, on the loop, when it is done with, well or not, what `put` returned. Not after `clear`.
        """
        if self._current is not None or not self._queue:
            return
        self._current = self._queue.popleft()
        age = self._age

        def tuned(box: list[Segment] | None, error: BaseException | None) -> None:
            if age != self._age:
                return
            if box:
                running.submit(put, box, done=finished)
            else:
                finished(None, error)

        def finished(sizes: tuple[int, int] | None, error: BaseException | None) -> None:
            if age != self._age:
                return
            if error is not None:
                raise error
            self._end()
            then(sizes)

        compiling.submit(run, self._current, done=tuned)

    def _end(self) -> None:
        self._current = None
        self._ended += 1
        due = [reply for count, reply in self._waiting if count <= self._ended]
        self._waiting = [entry for entry in self._waiting if entry[0] > self._ended]
        for reply in due:
            reply.settle(None, None)

    async def wait(self, loop: Loop, asks: set[Reply[Any]]) -> None:
        """Wait until all that runs and waits now has ended. `asks`: those that the end of the actor answers."""
        left = len(self._queue) + (self._current is not None)
        if not left:
            return
        reply: Reply[None] = Reply(loop)
        self._waiting.append((self._ended + left, reply))
        asks.add(reply)
        try:
            await reply.wait()
        finally:
            asks.discard(reply)

    def clear(self) -> None:
        """Forget what waits, and have what runs end before its next candidate. Whoever waits is answered by the actor."""
        if self._current is not None:
            self._current.stopped.set()
        self._age += 1
        self._current = None
        self._queue.clear()
        self._waiting.clear()


def to_tune(job: CompileJob, segment: Segment, facts: Mapping[str, Any]) -> TuneJob | None:
    """What is left to tune of a segment, in the thread that has just compiled it; its call never fails by that."""
    try:
        return TuneJob.of(job, segment)
    except Exception as error:  # no memory for a copy of the inputs
        _warn_failed(job, error, facts)
        return None


def _warn_failed(job: CompileJob, error: Exception, facts: Mapping[str, Any]) -> None:
    _log.warning("autotune: failed", position=job.position, reason=f"{type(error).__name__}: {error}", **facts)


def tune(job: TuneJob, observe: Observe, facts: Mapping[str, Any]) -> list[Segment]:
    """Tune, in a compile thread. What was thrown out, or failed, is logged as a warning.

    Args:
        job: What is tuned.
        observe: Is told of each compile, and how the disk cache fared.
        facts: Of the actor, for the log.

    Returns:
        The segment to use from now on, none where the job was stopped. A box, so that the thread that takes it out is the one
        that lets go of a program.
    """
    try:
        segment = job.run(observe, time.perf_counter_ns)
    except Exception as error:  # the segment in use goes on being used
        _warn_failed(job.job, error, facts)
        return []
    if segment is None:
        return []
    for trial in () if segment.tuning is None else segment.tuning.wrong:
        _log.warning(
            "autotune: a candidate is out, its results differ",
            position=segment.position,
            candidate=trial.name,
            reason=trial.out,
            **facts,
        )
    return [segment]


def swap(prepared: Prepared, cache: SegmentCache, box: list[Segment]) -> tuple[int, int]:
    """Put what was chosen into the place of what it was made from, in a run thread; bytes of weights and programs then."""
    while box:
        cache.swap(box.pop())
    return prepared.weight_bytes(), cache.code_bytes
