"""A virtual clock, a pretended model, and random traffic around the real scheduler. Nothing waits; time is a number."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from transmuter_async.serving.decisions import Batch, Limits, Request
from transmuter_async.serving.scheduler import Scheduler

MS = 1_000_000
NEVER = 1 << 62


@dataclass
class Fate:
    """What became of a request."""

    request: Request
    ended: int | None = None
    how: str = ""
    paused: int = 0
    batches: int = 0
    """Batches that started while it waited."""
    computed: int = 0
    """Rows of it that were computed."""
    starts: set[int] = field(default_factory=set)


@dataclass
class Simulation:
    """Drives a scheduler as the actor does, and checks each decision.

    Attributes:
        cost: Nanoseconds that a batch takes.
        compile: Nanoseconds that a new program takes; 0: none is compiled.
        bad: Requests that fail, in a batch and alone.
    """

    limits: Limits
    cost: Callable[[Batch], int] = lambda batch: MS + batch.program * MS // 10
    compile: int = 0
    bad: set[int] = field(default_factory=set)
    now: int = 0
    broken: bool = False

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(self.limits)
        self.fates: dict[int, Fate] = {}
        self.started: list[Batch] = []
        self.opened: list[int] = []
        self.refused: Counter[str] = Counter()
        self.programs: set[tuple[Any, int]] = set()
        self.elements: dict[Any, int] = {}
        self.pauses: dict[Any, list[tuple[int, int]]] = {}
        self._held: dict[int, int] = {}
        self._began: dict[int, int] = {}
        self._events: list[tuple[int, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._ids = itertools.count()
        self._alive: dict[int, Batch] = {}
        self._busy = 0
        self._waking: int | None = None

    def at(self, time: int, what: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time, next(self._numbers), what))

    def submit(
        self,
        key: Any,
        rows: int = 1,
        *,
        elements: int = 1,
        timeout: int | None = None,
        nowait: bool = False,
        **facts: Any,
    ) -> int:
        number = next(self._ids)
        deadline = None if timeout is None else self.now + timeout
        request = Request(number, key, rows, elements, self.now, deadline, **facts)
        self.elements[key] = elements
        entry = self.scheduler.submit(request, self.now, nowait=nowait)
        if entry in ("full", "open"):
            self.refused[entry] += 1
        else:
            self.fates[number] = Fate(request)
        return number

    def leave(self, number: int) -> None:
        fate = self.fates.get(number)
        if fate is not None and fate.ended is None:
            self._answer(number, "cancelled")
            self._useless(self.scheduler.cancel(number, self.now))

    def run(self, until: int | None = None) -> None:
        """Let time pass until nothing happens any more."""
        self._pump()
        while self._events and (until is None or self._events[0][0] <= until):
            time, _, what = heapq.heappop(self._events)
            self.now = max(self.now, time)
            what()
            self._pump()
        if until is not None:
            self.now = max(self.now, until)
            self._pump()

    def _answer(self, number: int, how: str) -> None:
        fate = self.fates[number]
        assert fate.ended is None, f"request {number} was answered twice: {fate.how}, then {how}"
        fate.ended, fate.how = self.now, how

    def _useless(self, batches: tuple[int, ...]) -> None:
        for each in batches:
            batch = self._alive.pop(each)
            if each in self._held:
                self._unpause(batch)
            else:
                self._busy -= 1
            self.scheduler.withdrawn(each, self.now)

    def _pump(self) -> None:
        for number in self.scheduler.expired(self.now):
            fate = self.fates[number]
            assert fate.request.deadline is not None
            overlap = sum(
                max(0, min(end, self.now) - max(begin, fate.request.arrived))
                for begin, end in self.pauses.get(fate.request.key, [])
            )
            # What runs already, beside the compile of another program of its bucket, does not wait for that.
            assert fate.computed or self.now >= fate.request.deadline + overlap, "a compile was charged to a deadline"
            self._answer(number, "expired")
            self._useless(self.scheduler.cancel(number, self.now))
        while (batch := self.scheduler.next(self.now)) is not None:
            if batch.id in self._held:
                self._held.pop(batch.id)
                self._busy += 1
                self._start(batch)
                continue
            self._check(batch)
            self.started.append(batch)
            self._alive[batch.id] = batch
            place = (batch.key, batch.program)
            if self.compile and place not in self.programs:
                self.programs.add(place)
                self.scheduler.hold(batch.id, self.now)
                self._held[batch.id] = self.now
                self._began[batch.id] = self.now
                self.pauses.setdefault(batch.key, []).append((self.now, NEVER))
                self.at(self.now + self.compile, lambda batch=batch: self._compiled(batch))
            else:
                self._busy += 1
                self._start(batch)
        wake = self.scheduler.wake(self.now)
        if wake is not None and (self._waking is None or wake < self._waking or self._waking <= self.now):
            self._waking = wake
            self.at(max(wake, self.now), lambda: None)

    def _unpause(self, batch: Batch) -> None:
        self._held.pop(batch.id, None)
        self._end_pause(batch)

    def _compiled(self, batch: Batch) -> None:
        if batch.id in self._alive:
            self._end_pause(batch)
            self.scheduler.ready(batch.id, self.now)

    def _end_pause(self, batch: Batch) -> None:
        began = self._began.pop(batch.id, None)
        if began is not None:
            pauses = self.pauses[batch.key]
            pauses[pauses.index((began, NEVER))] = (began, self.now)

    def _check(self, batch: Batch) -> None:
        limits = self.limits
        assert self._busy < limits.concurrency
        rows = 0
        for part in batch.parts:
            fate = self.fates[part.request]
            assert fate.ended is None, f"{part.request} was {fate.how} and is computed"
            assert fate.request.key == batch.key
            assert part.start not in fate.starts, "computed twice"
            fate.starts.add(part.start)
            fate.computed += part.rows
            rows += part.rows
        assert rows == batch.rows
        one = len(batch.parts) == 1
        elements = self.elements[batch.key]
        if not self.fates[batch.parts[0].request].request.alone:
            assert batch.program in limits.batch_sizes
            assert batch.rows <= batch.program <= limits.rows(elements)
            assert (
                limits.max_padded is None
                or batch.program == limits.batch_sizes[0]
                or batch.program * elements <= limits.max_padded
            )
            for part in batch.parts:
                whole = self.fates[part.request].request.rows
                assert part.rows == whole or whole > limits.rows(elements), "split although it fits"
        else:
            assert one
        for fate in self.fates.values():
            if fate.ended is None and not fate.computed:
                fate.batches += 1

    def _start(self, batch: Batch) -> None:
        took = self.cost(batch)
        bad = self.broken or any(part.request in self.bad for part in batch.parts)
        if bad and len(batch.parts) > 1:
            took *= 1 + len(batch.parts)
        self.at(self.now + took, lambda: self._ended(batch))

    def _ended(self, batch: Batch) -> None:
        if batch.id not in self._alive:
            return
        del self._alive[batch.id]
        self._busy -= 1
        outcomes: list[bool | None] = [
            None if not self.scheduler.alive(part.request) else not (self.broken or part.request in self.bad)
            for part in batch.parts
        ]
        done, failed, opened = self.scheduler.finished(batch.id, outcomes, self.now)
        for each in done:
            fate = self.fates[each]
            assert fate.computed == fate.request.rows
            self._answer(each, "done")
        for each in failed:
            self._answer(each, "failed")
        if opened:
            self.opened.append(self.now)

    def settled(self) -> None:
        """Everything was answered, once, and nothing is left inside."""
        assert all(fate.ended is not None for fate in self.fates.values()), [
            f for f in self.fates.values() if f.ended is None
        ]
        scheduler = self.scheduler
        assert (scheduler.unanswered, scheduler.waiting, scheduler.lined, scheduler.running) == (0, 0, 0, 0)
        assert not scheduler._queues
        assert scheduler._slots == 0
        assert self._busy == 0

    def how(self) -> Counter[str]:
        return Counter(fate.how for fate in self.fates.values())


def limits(**changes: Any) -> Limits:
    return replace(Limits((1, 2, 4, 8), 5 * MS, None, 64, 1), **changes)


def traffic(simulation: Simulation, seed: int, count: int, keys: dict[str, int], gap: int) -> None:
    """Random arrivals, sizes, lengths, deadlines, callers, cancellations and failures."""
    rng = random.Random(seed)
    time = 0
    for _ in range(count):
        time += int(rng.expovariate(1) * gap)

        def come() -> None:
            key = rng.choice(list(keys))
            rows = rng.choice([1, 1, 1, 2, 3, 5, 20])
            timeout = rng.choice([None, None, 3 * MS, 30 * MS, 200 * MS])
            caller = rng.choice([None, None, "a", "b"])
            number = simulation.submit(
                key,
                rows,
                elements=keys[key],
                timeout=timeout,
                nowait=rng.random() < 0.1,
                caller=caller,
                bulk=caller == "b",
            )
            if rng.random() < 0.05:
                simulation.bad.add(number)
            if rng.random() < 0.3:
                simulation.at(simulation.now + int(rng.expovariate(1) * 20 * MS), lambda: simulation.leave(number))

        simulation.at(time, come)
