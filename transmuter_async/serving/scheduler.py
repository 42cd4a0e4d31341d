"""Which rows run together, and when: decisions of the batch worker, as plain code on values.

No clock, no loop, no arrays: whoever drives it says what time it is (integers, nanoseconds) and does what it decides.

    submit ──► line ──► a queue for each bucket ──► next() a Batch ──► finished()
              (no room)      │      held while its program compiles
                             └──► cancel(), expire(): never run

Rules:

- Rows are counted. Maps may fill a share of the room only (`Limits.share`), so that they never keep single callers out, and
  wait for it in a line of their own; of both lines who came first goes first, as far as that share allows. A request stays whole where it fits into a batch of its bucket, else it is split into parts.
- A queue is due when a batch of it would be full, when its oldest part has waited for `timeout`, or at once while nothing
  runs. Of several that are due a full one goes first, then the one with the oldest part; but none is passed over more than
  `PATIENCE` times, whatever fits better meanwhile.
- Within a queue parts are taken by fair turns: a caller with many rows waiting is behind one with few (start-time fair
  queueing over rows). But once the oldest part was left behind by `PATIENCE` batches of its queue, it starts the next one
  (every other one where that whose turn it is would not fit beside it), so waiting is bounded.
- Rows that fill no batch size run in the next larger one, with spare rows; or as many of them as fill a smaller one, where
  batches of these sizes were seen to compute more rows in the same time that way (a processor that takes time for each
  row, not for each batch).
- A part whose deadline has passed, or whose request is gone, is never put into a batch.
- While a program of a queue compiles, its queue takes parts in but gives none out, and the deadlines in it stand still.
- The breaker opens when everything in a batch failed, and lets one batch try after a moment. Callers who share a batch by
  chance and whose requests are all bad hurt nobody else: it takes several such batches in a row.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Hashable, Sequence
from typing import Literal

from transmuter_async.serving.costs import Costs
from transmuter_async.serving.decisions import Batch, Limits, Part, Request
from transmuter_async.serving.line import Line
from transmuter_async.serving.order import PATIENCE, Order
from transmuter_async.serving.queues import Pending, Queue, Running, Waiting

__all__ = ["BREAKER_FIRST", "BREAKER_LONGEST", "PATIENCE", "Scheduler"]

SKIPS = 64
"""Parts that are looked at and left for a later batch, when none of them fits into what is left of this one."""

BREAKER_FIRST = 1_000_000_000
"""How long the breaker stays open the first time, in nanoseconds; then twice as long each time it opens again …"""

BREAKER_LONGEST = 30_000_000_000
"""… up to this."""

BREAKER_FAILURES = 3
"""Batches that fail one after the other until the breaker opens, where it takes more than one: of one request, or of several
for reasons that lie in the requests. Of one request for reasons that lie in it no number does."""

Entry = Literal["queued", "line", "full", "open"]


class Scheduler:
    """The queues, the line in front of them, the deadlines, and the breaker. One owner, no locks.

    Attributes:
        draining: Nothing comes any more: everything is due.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.draining = False
        self._queues: dict[Hashable, Queue] = {}
        self._order = Order(limits.timeout)
        self._line = Line()
        self._states: dict[int, Pending] = {}
        self._deadlines: list[tuple[int, int]] = []
        self._running: dict[int, Running] = {}
        self._ready: deque[Running] = deque()  # their program has been compiled, and they wait for a slot
        self._slots = 0
        self._sequence = 0
        self._batches = 0
        self._numbers = 0
        self._waiting = 0
        self._bulk = 0  # of these, rows of maps
        self._costs = Costs()
        self._opened_until: int | None = None
        self._span = 0
        self._failures = 0
        self._probing: int | None = None

    # What it holds.

    @property
    def waiting(self) -> int:
        """Rows in the queues."""
        return self._waiting

    @property
    def lined(self) -> int:
        """Requests that wait for room in the queues."""
        return len(self._line)

    @property
    def running(self) -> int:
        """Batches that run now, or wait for their program."""
        return len(self._running)

    @property
    def unanswered(self) -> int:
        """Requests that were accepted and are not answered."""
        return len(self._states)

    def depths(self) -> dict[Hashable, int]:
        """Rows that wait, by queue."""
        return {queue.key: queue.rows for queue in self._queues.values() if queue.rows}

    def alive(self, request: int) -> bool:
        """Whether somebody still waits for a request."""
        return request in self._states

    def lines_up(self, request: int) -> bool:
        """Whether a request waits for room in the queues."""
        state = self._states.get(request)
        return state is not None and not state.pieces

    def breaker(self, now: int) -> Literal["closed", "open", "half-open"]:
        """Its state."""
        if self._opened_until is None:
            return "closed"
        return "open" if now < self._opened_until else "half-open"

    def retry_after(self, now: int) -> int:
        """Nanoseconds until it lets work through again."""
        return 0 if self._opened_until is None else max(0, self._opened_until - now)

    # What comes in.

    def submit(self, request: Request, now: int, *, nowait: bool = False) -> Entry:
        """Take a request in.

        Returns:
            "queued"; "line" when there is no room and it waits for some; with `nowait` "full" then; "open" when the breaker is:
            neither of the last two was taken in.
        """
        if self.breaker(now) == "open":
            return "open"
        fits = self._fits(request) and self._first_in_line() is None
        if request.bulk and self._line.first(bulk=True) is not None:
            fits = False  # it waits for the share of maps, and so does this one
        if nowait and not fits:
            return "full"
        state = Pending(request, request.deadline, request.rows)
        self._states[request.id] = state
        if request.deadline is not None:
            if len(self._deadlines) > 64 + 4 * len(self._states):
                self._deadlines = [each for each in self._deadlines if each[1] in self._states]
                heapq.heapify(self._deadlines)
            heapq.heappush(self._deadlines, (request.deadline, request.id))
        if fits:
            self._enqueue(state, now)
            return "queued"
        queue = self._queues.get(request.key)
        if queue is not None and queue.held:
            self._stop_clock(queue, state, now)
        self._line.add(state)
        return "line"

    def _fits(self, request: Request) -> bool:
        """Whether there is room. What waits of maps counts as their share at most, so a quarter is always left to others."""
        share, size = self.limits.share, self.limits.queue_size
        single = self._waiting - self._bulk
        if request.bulk:
            return self._has_share(request) and single + min(self._bulk + request.rows, share) <= size
        return not self._waiting or single + min(self._bulk, share) + request.rows <= size

    def _has_share(self, request: Request) -> bool:
        return not request.bulk or not self._bulk or self._bulk + request.rows <= self.limits.share

    def _first_in_line(self) -> Pending | None:
        """Who goes in as soon as there is room; None where nobody waits, or only for the share of maps."""
        if not self._line:
            return None
        single, bulk = self._line.first(bulk=False), self._line.first(bulk=True)
        if bulk is None or not self._has_share(bulk.request):
            return single
        return bulk if single is None or bulk.place < single.place else single

    def _queue(self, key: Hashable, limit: int) -> Queue:
        self._numbers += 1
        queue = self._queues[key] = Queue(key, self._numbers, limit)
        self._order.add(queue)
        return queue

    def _enqueue(self, state: Pending, now: int) -> None:
        request = state.request
        queue = self._queues.get(request.key)
        if queue is None:
            limit = max(request.rows, 1) if request.alone else self.limits.rows(request.elements)
            queue = self._queue(request.key, limit)
        start = 0
        while True:
            rows = min(queue.limit, request.rows - start)
            piece = Waiting(Part(request.id, start, rows), request, queue.batches)
            state.pieces.append(piece)
            self._sequence += 1
            queue.by_age.append(piece)
            queue.count += 1
            heapq.heappush(queue.by_turn, (queue.turn(request.caller, rows), self._sequence, piece))
            start += rows
            if start >= request.rows:
                break
        before, queue.rows = queue.rows, queue.rows + request.rows
        self._waiting += request.rows
        if request.bulk:
            self._bulk += request.rows
        if queue.held:
            self._stop_clock(queue, state, now)
        elif not before or before < queue.limit <= queue.rows:  # else it stands where it stood
            self._order.update(queue)

    def _admit(self, now: int) -> None:
        while (state := self._first_in_line()) is not None and self._fits(state.request):
            self._line.remove(state)
            self._enqueue(state, now)

    # Who leaves.

    def cancel(self, request: int, now: int) -> tuple[int, ...]:
        """Nobody waits for a request any more. Its parts that wait are never run.

        Returns:
            Batches that run for nobody now.
        """
        state = self._states.pop(request, None)
        if state is None:
            return ()
        if state.place:
            self._line.remove(state)
        self._drop(state)
        useless = []
        for number in state.batches:
            running = self._running.get(number)
            if running is not None and request in running.live:
                running.live.discard(request)
                if not running.live:
                    useless.append(number)
        self._admit(now)
        return tuple(useless)

    def _drop(self, state: Pending) -> None:
        queue = self._queues.get(state.request.key)
        for piece in state.pieces:
            if piece.waiting:
                assert queue is not None
                self._remove(queue, piece)
        if queue is not None:
            self._tidy(queue)

    def _tidy(self, queue: Queue) -> None:
        self._order.update(queue)
        if queue.oldest() is None and not queue.held:
            del self._queues[queue.key]
            return
        if len(queue.by_turn) > 64 + 4 * queue.count:
            queue.by_turn = [entry for entry in queue.by_turn if entry[2].waiting]
            heapq.heapify(queue.by_turn)
        if len(queue.by_age) > 64 + 4 * queue.count:
            queue.by_age = deque(piece for piece in queue.by_age if piece.waiting)

    def expired(self, now: int) -> tuple[int, ...]:
        """Requests whose deadline has passed and does not stand still. They are for `cancel`, and an answer."""
        found = []
        while self._deadlines and self._deadlines[0][0] <= now:
            deadline, request = heapq.heappop(self._deadlines)
            state = self._states.get(request)
            if state is not None and state.deadline == deadline and state.paused is None:
                found.append(request)
        return tuple(dict.fromkeys(found))

    # What runs.

    def next(self, now: int) -> Batch | None:
        """The batch that is to run now, or None. To be asked until it is None."""
        if self._slots >= self.limits.concurrency or self._probing is not None:
            return None
        breaker = self.breaker(now)
        if breaker == "open":
            return None
        while self._ready:
            running = self._ready.popleft()
            if running.batch.id not in self._running:
                continue  # given up meanwhile
            running.held = False
            running.began = now
            self._slots += 1
            if breaker == "half-open":
                self._probing = running.batch.id
            return running.batch
        batch = self._decide(now, probe=breaker == "half-open")
        if batch is None:
            return None
        self._slots += 1
        if batch.probe:
            self._probing = batch.id
        self._running[batch.id] = Running(batch, {part.request for part in batch.parts}, now)
        for part in batch.parts:
            self._states[part.request].batches.append(batch.id)
        return batch

    def _decide(self, now: int, *, probe: bool) -> Batch | None:
        while True:
            self._admit(now)
            queue, reason = self._order.choose(now, "idle" if self._slots == 0 else "drain" if self.draining else None)
            if queue is None:
                return None
            batch = self._take(queue, now, reason, probe=probe)
            if batch is not None:
                self._order.went(queue)
            self._tidy(queue)
            if batch is not None:
                self._admit(now)
                return batch

    def _take(self, queue: Queue, now: int, reason: str, *, probe: bool) -> Batch | None:
        taken: list[Waiting] = []
        room = self._room(queue)
        while (first := queue.oldest()) is not None and self._late(first, now):
            self._remove(queue, first)  # `expired` answers it
        if first is None:
            return None
        crowded = queue.favoured and queue.limit - first.part.rows < queue.next_rows()
        queue.favoured = queue.batches - first.entered >= PATIENCE and not crowded
        if queue.favoured:
            self._remove(queue, first)
            taken.append(first)
            room -= first.part.rows
        if not taken and room < first.part.rows:
            room = queue.limit  # requests that stay whole may be larger than what pays
        left: list[tuple[int, int, Waiting]] = []
        while room > 0 and queue.by_turn and len(left) < SKIPS:
            entry = heapq.heappop(queue.by_turn)
            turn, _, piece = entry
            if not piece.waiting:
                continue
            if self._late(piece, now):
                self._remove(queue, piece)
            elif piece.part.rows <= room:
                self._remove(queue, piece)
                taken.append(piece)
                room -= piece.part.rows
                queue.now = max(queue.now, turn)
            else:
                left.append(entry)
        for entry in left:
            heapq.heappush(queue.by_turn, entry)
        rows = sum(piece.part.rows for piece in taken)
        queue.batches += 1
        self._batches += 1
        alone = taken[0].request.alone
        return Batch(
            self._batches,
            queue.key,
            tuple(piece.part for piece in taken),
            rows,
            rows if alone else self.limits.program(rows),
            self._waiting,
            now - min(piece.request.arrived for piece in taken),
            reason,
            probe,
        )

    def _room(self, queue: Queue) -> int:
        """Rows that the next batch of a queue is to have at most."""
        rows = min(queue.rows, queue.limit)
        up = self.limits.program(rows)
        oldest = queue.oldest()
        if up <= rows or oldest is None or oldest.request.alone:
            return queue.limit
        fewer = self._costs.fewer(oldest.request.elements, rows, up, self.limits.batch_sizes)
        return queue.limit if fewer is None else fewer

    def _cost(self, running: Running, now: int) -> None:
        state = self._states.get(running.batch.parts[0].request)
        if state is not None and not state.request.alone and not running.compiling and now > running.began:
            self._costs.seen(state.request.elements, running.batch.program, now - running.began)

    def _late(self, piece: Waiting, now: int) -> bool:
        state = self._states.get(piece.request.id)
        return state is None or (state.deadline is not None and state.deadline <= now and state.paused is None)

    def _remove(self, queue: Queue, piece: Waiting) -> None:
        piece.waiting = False
        queue.count -= 1
        queue.rows -= piece.part.rows
        self._waiting -= piece.part.rows
        if piece.request.bulk:
            self._bulk -= piece.part.rows

    # Compiles: of a program that no batch has run in yet.

    def hold(self, batch: int, now: int) -> None:
        """The program of a batch is compiled first: it gives its slot back, and its queue waits with it."""
        running = self._running[batch]
        pausing = running.compiling  # for another program, before
        running.held = running.compiling = True
        self._slots -= 1
        if self._probing == batch:
            self._probing = None
        if not pausing:
            self._pause(running.batch, now)

    def ready(self, batch: int, now: int) -> None:
        """The program is there; the batch goes next."""
        running = self._running[batch]
        running.compiling = False
        self._resume(running.batch, now)
        self._ready.append(running)

    def first(self, batch: int, now: int) -> None:
        """A batch runs for the first time in a program that may compile on the way: deadlines stand still until it ends."""
        running = self._running[batch]
        if not running.compiling:
            running.compiling = True
            self._pause(running.batch, now)

    def _pause(self, batch: Batch, now: int) -> None:
        queue = self._queues.get(batch.key)
        if queue is None:  # this batch took all that was in it
            state = self._states.get(batch.parts[0].request)
            alone = state is not None and state.request.alone
            limit = 1 if state is None else max(batch.rows, 1) if alone else self.limits.rows(state.request.elements)
            queue = self._queue(batch.key, limit)
        self._order.hold(queue)
        waiting = [piece.request.id for piece in queue.by_age if piece.waiting]
        parts = [part.request for part in batch.parts]
        lined = [state.request.id for state in self._line.of(queue.key)]
        for number in (*waiting, *lined, *parts):
            if (state := self._states.get(number)) is not None:
                self._stop_clock(queue, state, now)

    def _stop_clock(self, queue: Queue, state: Pending, now: int) -> None:
        """The deadline of a request stands still until no program of its queue compiles any more."""
        if state.paused is None:
            state.paused = now
            queue.paused.append(state)

    def _resume(self, batch: Batch, now: int) -> None:
        queue = self._queues[batch.key]
        self._order.release(queue)
        if not queue.held:
            for state in queue.paused:  # also of batches whose program was there before
                if state.paused is not None and state.deadline is not None and state.request.id in self._states:
                    state.deadline += now - state.paused
                    heapq.heappush(self._deadlines, (state.deadline, state.request.id))
                state.paused = None
            queue.paused.clear()
        self._tidy(queue)

    # How it ended.

    def finished(
        self, batch: int, outcomes: Sequence[bool | None], now: int, *, blamed: bool = False
    ) -> tuple[tuple[int, ...], tuple[int, ...], bool]:
        """A batch has ended, tries of its single parts included.

        Args:
            batch: Its id.
            outcomes: For each part, whether there is a result; None where nobody waited for it any more.
            now: The time.
            blamed: Whether all errors lie in the requests, by their kind.

        Returns:
            Requests that are complete, requests that failed (also those of which only a part did), and whether the breaker
            opened now. Each request is told once, and is not known any more then.
        """
        running = self._running.pop(batch)
        if all(outcomes):
            self._cost(running, now)
        if not running.held:
            self._slots -= 1
        if running.compiling:
            self._resume(running.batch, now)
        done: list[int] = []
        failed: list[int] = []
        for part, good in zip(running.batch.parts, outcomes, strict=True):
            state = self._states.get(part.request)
            if state is None or good is None:
                continue
            if good:
                state.left -= part.rows
                if state.left > 0:
                    continue
                done.append(part.request)
            else:
                failed.append(part.request)
            del self._states[part.request]
            self._drop(state)
            for number in state.batches:
                if (other := self._running.get(number)) is not None:
                    other.live.discard(part.request)
        opened = self._judge(running.batch, outcomes, now, blamed=blamed)
        self._admit(now)
        return tuple(done), tuple(failed), opened

    def _judge(self, batch: Batch, outcomes: Sequence[bool | None], now: int, *, blamed: bool) -> bool:
        tried = [each for each in outcomes if each is not None]
        probe = self._probing == batch.id
        if probe:
            self._probing = None
        if any(outcomes):
            self._failures = 0
            self._span = 0
            self._opened_until = None
            return False
        if not tried or (blamed and len(tried) == 1):
            return False
        self._failures += 1
        if not probe and (blamed or len(tried) == 1) and self._failures < BREAKER_FAILURES:
            return False
        if not probe and self.breaker(now) == "open":
            return False  # of before it opened
        self._span = min(BREAKER_LONGEST, 2 * self._span) or BREAKER_FIRST
        self._opened_until = now + self._span
        return True

    def withdrawn(self, batch: int, now: int) -> None:
        """A batch that ran for nobody was given up: it says nothing about the model."""
        running = self._running.pop(batch)
        if not running.held:
            self._slots -= 1
        if running.compiling:
            self._resume(running.batch, now)
        if self._probing == batch:
            self._probing = None
        self._admit(now)

    def wake(self, now: int) -> int | None:
        """When something is due by itself; None: nothing before somebody calls."""
        times: list[int] = []
        while self._deadlines:
            deadline, request = self._deadlines[0]
            state = self._states.get(request)
            if state is not None and state.deadline == deadline and state.paused is None:
                times.append(deadline)
                break
            heapq.heappop(self._deadlines)
        if self._slots < self.limits.concurrency and self._probing is None and (self._waiting or self._ready):
            if self.breaker(now) == "open":
                assert self._opened_until is not None
                times.append(self._opened_until)
            else:
                due = self._order.wake()
                if due is not None:
                    times.append(due)
        return min(times, default=None)

    def close(self) -> tuple[int, ...]:
        """Give everything up. The requests that were not answered."""
        left = tuple(self._states)
        self._states.clear()
        self._queues.clear()
        self._order = Order(self.limits.timeout)
        self._line = Line()
        self._deadlines.clear()
        self._running.clear()
        self._ready.clear()
        self._slots = self._waiting = self._bulk = 0
        self._probing = None
        return left
