"""The loop's book of compiles: which wait, which run, in what order, and what became of the last ones.

Three ranks. Calls wait for a CALL; they come first, one at a time. WARM is asked for ahead of traffic and uses the idle
cores. A BEHIND was missing to a call that was answered without it: one at a time, and only when nothing else is compiled
or installed. Plain data, without threads or events: the actor asks what may start, and starts it.
"""

from __future__ import annotations

import time
from enum import IntEnum
from typing import Any, Literal

from transmuter_async.actors.calls import Call
from transmuter_async.actors.events import Observer
from transmuter_async.actors.reply import Reply
from transmuter_async.compiler import CompileJob, Segment, TuneJob
from transmuter_async.telemetry import detached

__all__ = ["Compile", "CompileBook", "Rank"]

RETRY = 1_000_000_000
"""Nanoseconds for which a failed compile answers, before it is tried again."""

WANTED = 4096
"""Keys whose asks are counted at most, the ones asked for longest ago forgotten first."""

BEHIND = 64
"""Compiles behind that may wait; what is wanted beyond is counted on, and taken up when it is asked for again."""


class Rank(IntEnum):
    """Who goes first."""

    CALL = 0
    WARM = 1
    BEHIND = 2


class Compile:
    """One compile of one key, and who waits for it."""

    __slots__ = ("job", "keep", "observer", "place", "rank", "replies", "tuning", "waiters", "wanted")

    def __init__(self, job: CompileJob, observer: Observer, rank: Rank, *, keep: bool) -> None:
        self.job = job
        self.observer = observer
        self.rank = rank
        self.wanted = rank is Rank.BEHIND  # it is compiled also when nobody waits
        self.keep = keep
        self.place: Literal["queued", "running", "installing"] = "queued"
        self.waiters: dict[Call, None] = {}
        self.replies: list[Reply[Segment]] = []
        self.tuning: TuneJob | None = None  # set by the compile's thread


class CompileBook:
    """Everything about compiles that is not the compiling. Owned by the loop.

    Attributes:
        current: By key, what waits, runs or is being installed.
        installed: How many programs were installed so far.
    """

    def __init__(self) -> None:
        self.installed = 0
        self.clear()

    def clear(self) -> None:
        """Forget everything but the count of installs: the actor's generation has ended."""
        self.current: dict[Any, Compile] = {}
        self._queue: list[Compile] = []
        self._running: list[Compile] = []
        self._failed: dict[Any, tuple[int, BaseException]] = {}
        self._installs: dict[int, Any] = {}
        self._asked: dict[int, int] = {}  # by the key's hash: keys hold values, and a count that is too high does no harm

    def add(self, compile: Compile) -> None:
        """Take a compile in, behind those of its rank."""
        self.current[compile.job.key] = compile
        self._enqueue(compile)

    def promote(self, compile: Compile, rank: Rank) -> None:
        """Somebody else asks for it, too: it goes as soon as the more urgent of both ranks says."""
        if rank < compile.rank:
            compile.rank = rank
            if compile.place == "queued":
                self._queue.remove(compile)
                self._enqueue(compile)

    def _enqueue(self, compile: Compile) -> None:
        place = next((i for i, each in enumerate(self._queue) if each.rank > compile.rank), len(self._queue))
        self._queue.insert(place, compile)

    def start(self, limit: int) -> Compile | None:
        """The next compile, which runs from now on; None while none may. `limit`: threads that there are."""
        for place, compile in enumerate(self._queue):
            if compile.rank is Rank.BEHIND:
                ready = len(self.current) == len(self._queue)  # nothing runs, nothing is being installed
            else:
                calls = any(each.rank is Rank.CALL for each in self._running)
                ready = len(self._running) < limit and not (compile.rank is Rank.CALL and calls)
            if ready:
                del self._queue[place]
                compile.place = "running"
                self._running.append(compile)
                return compile
        return None

    def ended(self, compile: Compile) -> None:
        """Its thread is done; it is still in the book until `settle`."""
        compile.place = "installing"
        self._running.remove(compile)

    def settle(self, compile: Compile, error: BaseException | None) -> None:
        """It is installed, or has failed: then the error answers for `RETRY`."""
        key = compile.job.key
        del self.current[key]
        if error is None:
            self.installed += 1
            self._installs[self.installed] = key
            self._installs.pop(self.installed - 64, None)
        else:
            now = time.monotonic_ns()
            self._failed = {key: entry for key, entry in self._failed.items() if now - entry[0] < RETRY}
            self._failed[key] = (now, detached(error))

    def drop_unwanted(self, compile: Compile) -> None:
        """Take a compile out that nobody waits for any more, unless it has started."""
        if compile.place == "queued" and not compile.waiters and not compile.replies and not compile.wanted:
            self._queue.remove(compile)
            del self.current[compile.job.key]

    def failure(self, key: Any) -> BaseException | None:
        """Why the last compile of a key failed, if that was just now."""
        found = self._failed.get(key)
        return None if found is None or time.monotonic_ns() - found[0] >= RETRY else found[1]

    def came(self, key: Any, since: int) -> bool:
        """Whether the program was installed when `installed` was above `since`: another run thread looked meanwhile."""
        return self.installed > since and any(key == done for count, done in self._installs.items() if count > since)

    def want(self, key: Any, after: int) -> bool:
        """A call was answered without this program. Whether it is to be compiled now: asked for `after` times."""
        if key in self.current or self.failure(key) is not None:
            return False
        number = hash(key)
        asked = self._asked.pop(number, 0) + 1
        if asked >= after and sum(each.rank is Rank.BEHIND for each in self._queue) < BEHIND:
            return True
        self._asked[number] = asked
        if len(self._asked) > WANTED:
            del self._asked[next(iter(self._asked))]
        return False
