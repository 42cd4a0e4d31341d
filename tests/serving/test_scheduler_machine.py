"""Any order of arrivals, endings, failures, compiles, cancellations and time: each request is answered exactly once."""

from __future__ import annotations

import itertools
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
)

from transmuter_async.serving.decisions import Batch, Limits, Request
from transmuter_async.serving.scheduler import BREAKER_LONGEST, PATIENCE, Scheduler

KEYS = {"short": 4, "long": 16, "longer": 20, "other": 4}


class Machine(RuleBasedStateMachine):
    running = Bundle("running")
    compiling = Bundle("compiling")

    @initialize(
        sizes=st.sets(st.integers(1, 8), min_size=1, max_size=3),
        timeout=st.integers(0, 10),
        max_padded=st.none() | st.integers(1, 64),
        queue_size=st.integers(1, 20),
        concurrency=st.integers(1, 3),
    )
    def start(self, sizes: set[int], timeout: int, max_padded: int | None, queue_size: int, concurrency: int) -> None:
        self.limits = Limits(tuple(sorted(sizes)), timeout, max_padded, queue_size, concurrency)
        self.scheduler = Scheduler(self.limits)
        self.now = 0
        self.ids = itertools.count()
        self.open: dict[int, Request] = {}
        self.answers: dict[int, str] = {}
        self.computed: dict[int, set[tuple[int, int]]] = {}
        self.alive: dict[int, Batch] = {}
        self.held: set[int] = set()
        self.taken = 0
        self.compiled_since: dict[Any, int] = {}

    def answer(self, number: int, how: str) -> None:
        assert number in self.open, f"{number} was answered before, {self.answers.get(number)}"
        del self.open[number]
        self.answers[number] = how

    @rule(
        key=st.sampled_from(sorted(KEYS)),
        rows=st.integers(1, 20),
        patience=st.none() | st.integers(0, 30),
        nowait=st.booleans(),
        caller=st.sampled_from([None, "a", "b"]),
        alone=st.booleans(),
        bulk=st.booleans(),
    )
    def submit(
        self, key: str, rows: int, patience: int | None, nowait: bool, caller: Any, alone: bool, bulk: bool
    ) -> None:
        number = next(self.ids)
        deadline = None if patience is None else self.now + patience
        place: Any = (key, number) if alone else key
        request = Request(number, place, rows, KEYS[key], self.now, deadline, caller, alone, bulk)
        was_open = self.scheduler.breaker(self.now) == "open"
        maps, share = self.rows_of_maps(), self.limits.share
        before = self.scheduler.waiting - maps
        entry = self.scheduler.submit(request, self.now, nowait=nowait)
        assert (entry == "open") == was_open
        assert entry != "line" or not nowait
        if entry == "queued" and bulk:
            assert not maps or maps + rows <= share
            assert before + min(maps + rows, share) <= self.limits.queue_size
        elif entry == "queued":
            assert not before + maps or before + min(maps, share) + rows <= self.limits.queue_size
        elif entry != "open" and not bulk and not before and rows <= self.limits.queue_size - share:
            assert self.scheduler.lined > (entry == "line"), "maps alone kept out somebody else"
        if entry in ("queued", "line"):
            self.open[number] = request
            self.computed[number] = set()

    def rows_of_maps(self) -> int:
        pieces = [piece for queue in self.scheduler._queues.values() for piece in queue.by_age if piece.waiting]
        return sum(piece.part.rows for piece in pieces if piece.request.bulk)

    @rule(data=st.data())
    @precondition(lambda self: self.open)
    def cancel(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.open)))
        self.answer(number, "cancelled")
        self.useless(self.scheduler.cancel(number, self.now))

    def useless(self, batches: tuple[int, ...]) -> None:
        for each in batches:
            assert not any(part.request in self.open for part in self.alive[each].parts)

    @rule(passes=st.integers(1, 20))
    def time_passes(self, passes: int) -> None:
        self.now += passes
        for number in self.scheduler.expired(self.now):
            deadline = self.open[number].deadline
            assert deadline is not None
            assert deadline <= self.now
            self.answer(number, "expired")
            self.useless(self.scheduler.cancel(number, self.now))

    @rule(target=running, hold=st.booleans())
    def next(self, hold: bool) -> Any:
        """Take one decision; some batches find no program and wait for it."""
        batch = self.scheduler.next(self.now)
        if batch is None:
            return multiple()
        if batch.id in self.held:
            self.held.discard(batch.id)
            return batch.id
        assert len(self.alive) - len(self.held) < self.limits.concurrency
        rows = 0
        for part in batch.parts:
            request = self.open[part.request]
            assert request.key == batch.key
            span = (part.start, part.rows)
            assert span not in self.computed[part.request]
            self.computed[part.request].add(span)
            assert part.start + part.rows <= request.rows
            rows += part.rows
        assert rows == batch.rows
        request = self.open[batch.parts[0].request]
        if request.alone:
            assert len(batch.parts) == 1
            assert batch.rows == request.rows
        else:
            assert batch.program in self.limits.batch_sizes
            assert batch.rows <= batch.program <= self.limits.rows(request.elements)
        self.alive[batch.id] = batch
        if hold:
            self.scheduler.hold(batch.id, self.now)
            self.held.add(batch.id)
            self.to_compile = batch.id
            return multiple()
        return batch.id

    @rule(data=st.data())
    @precondition(lambda self: self.held)
    def compiled(self, data: st.DataObject) -> None:
        waiting = sorted(self.held - {running.batch.id for running in self.scheduler._ready})
        if waiting:
            self.scheduler.ready(data.draw(st.sampled_from(waiting)), self.now)

    @rule(batch=consumes(running), data=st.data(), blamed=st.booleans())
    def finish(self, batch: int, data: st.DataObject, blamed: bool) -> None:
        decided = self.alive.pop(batch)
        wanted = [self.scheduler.alive(part.request) for part in decided.parts]
        assert wanted == [part.request in self.open for part in decided.parts]
        if not any(wanted) and data.draw(st.booleans()):
            self.scheduler.withdrawn(batch, self.now)
            return
        outcomes = [data.draw(st.booleans()) if each else None for each in wanted]
        done, failed, opened = self.scheduler.finished(batch, outcomes, self.now, blamed=blamed)
        for number in done:
            request = self.open[number]
            assert sum(rows for _, rows in self.computed[number]) == request.rows
            self.answer(number, "done")
        for number in failed:
            self.answer(number, "failed")
        assert not opened or not any(outcomes)
        if any(outcomes):
            assert self.scheduler.breaker(self.now) == "closed"

    @invariant()
    def counts_agree(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        scheduler = self.scheduler
        assert scheduler.unanswered == len(self.open)
        assert scheduler.running == len(self.alive)
        assert scheduler._slots == len(self.alive) - len(self.held)
        queues = scheduler._queues.values()
        for queue in queues:
            waiting = [piece for piece in queue.by_age if piece.waiting]
            assert queue.count == len(waiting)
            assert queue.rows == sum(piece.part.rows for piece in waiting)
            turns = [entry[2] for entry in queue.by_turn if entry[2].waiting]
            assert {id(piece) for piece in turns} == {id(piece) for piece in waiting}
            assert queue.held or waiting
        assert scheduler.waiting == sum(scheduler.depths().values()) == sum(queue.rows for queue in queues)
        assert scheduler.lined == sum(not state.pieces for state in scheduler._states.values())
        assert scheduler._bulk == self.rows_of_maps()

    @invariant()
    def the_order_is_what_looking_at_all_queues_gives(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        order, found = self.scheduler._order, {}
        for queue in self.scheduler._queues.values():
            oldest = queue.oldest()
            if not queue.held and oldest is not None:
                found[queue.number] = (queue, oldest.request.arrived)
        for why in (None, "idle"):
            ranked = []
            for queue, arrived in found.values():
                full, waited = queue.rows >= queue.limit, self.now - arrived >= self.limits.timeout
                if full or waited or why:
                    reason = "full" if full else "timeout" if waited else why
                    passed = order._gone - queue.since
                    rank = (0, -passed) if passed >= PATIENCE else (1 if full else 2, arrived)
                    ranked.append((rank, queue.number, reason))
            chosen, reason = order.choose(self.now, why)
            if chosen is None:
                assert not ranked
            else:
                assert (chosen.number, reason) == min(ranked)[1:]
        wake = min((arrived + self.limits.timeout for _, arrived in found.values()), default=None)
        assert order.wake() == wake

    def teardown(self) -> None:
        """Left alone, everything ends."""
        if not hasattr(self, "scheduler"):
            return
        scheduler = self.scheduler
        scheduler.draining = True
        for batch in sorted(self.held - {running.batch.id for running in scheduler._ready}):
            scheduler.ready(batch, self.now)
        for _ in range(10_000):
            self.now += BREAKER_LONGEST
            self.time_passes(1)
            while (batch := scheduler.next(self.now)) is not None:
                self.held.discard(batch.id)
                self.alive[batch.id] = batch
            if not self.alive:
                break
            for number in sorted(self.alive.keys() - self.held):
                decided = self.alive.pop(number)
                outcomes = [scheduler.alive(part.request) or None for part in decided.parts]
                for each in scheduler.finished(number, outcomes, self.now)[0]:
                    self.answer(each, "done")
        assert not self.open
        assert not scheduler._queues
        assert (scheduler.waiting, scheduler.lined, scheduler.running, scheduler._slots) == (0, 0, 0, 0)


Machine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestScheduler = Machine.TestCase
