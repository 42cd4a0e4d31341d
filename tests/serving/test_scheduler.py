"""The scheduler under a virtual clock: when batches close, who goes first, and that everybody is answered once."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.serving.simulation import MS, Simulation, limits, traffic
from transmuter_async.serving.decisions import Limits, Request
from transmuter_async.serving.queues import Queue
from transmuter_async.serving.scheduler import BREAKER_FIRST, PATIENCE, Scheduler


def shown(simulation: Simulation) -> list[list[tuple[int, int, int]]]:
    return [[(part.request, part.start, part.rows) for part in batch.parts] for batch in simulation.started]


# When a batch closes.


def test_a_lone_request_runs_at_once() -> None:
    simulation = Simulation(limits())
    simulation.submit("a")
    simulation._pump()
    assert simulation.started[0].reason == "idle"
    assert simulation.started[0].oldest == 0


def test_what_comes_while_the_model_runs_waits_together() -> None:
    simulation = Simulation(limits())
    for _ in range(5):
        simulation.submit("a")
        simulation._pump()
    simulation.run()
    assert [batch.rows for batch in simulation.started] == [1, 4]
    simulation.settled()


def test_requests_of_one_turn_share_the_first_batch() -> None:
    simulation = Simulation(limits())
    for _ in range(5):
        simulation.submit("a")
    simulation.run()
    assert [(batch.rows, batch.program) for batch in simulation.started] == [(5, 8)]


def test_with_a_free_slot_a_batch_closes_by_size_or_by_time() -> None:
    simulation = Simulation(limits(concurrency=2), cost=lambda batch: 100 * MS)
    simulation.submit("a")
    simulation.run(until=0)
    simulation.submit("a")
    simulation.run(until=4 * MS)
    assert len(simulation.started) == 1  # one runs; the second waits for others
    simulation.run(until=5 * MS)
    assert (simulation.started[1].reason, simulation.started[1].rows) == ("timeout", 1)
    simulation.run(until=200 * MS)
    simulation.submit("a")
    simulation.run(until=200 * MS)
    for _ in range(8):
        simulation.submit("a")
    simulation.run(until=200 * MS)
    assert (simulation.started[3].reason, simulation.started[3].rows) == ("full", 8)
    simulation.run()
    simulation.settled()


def test_the_budget_of_padded_elements_closes_a_batch() -> None:
    simulation = Simulation(limits(max_padded=64))
    for _ in range(8):
        simulation.submit("short", elements=8)
        simulation.submit("long", elements=16)
        simulation.submit("huge", elements=100)
    simulation.run()
    sizes = {
        key: [batch.program for batch in simulation.started if batch.key == key] for key in ("short", "long", "huge")
    }
    assert sizes == {"short": [8], "long": [4, 4], "huge": [1] * 8}


@pytest.mark.parametrize("each_row", [True, False], ids=["by row", "by batch"])
def test_spare_rows_are_computed_where_they_cost_nothing(each_row: bool) -> None:
    """Five rows: four and one where a batch takes time for each of its rows, one batch of eight where it does not."""
    simulation = Simulation(limits(), cost=lambda batch: batch.program * MS if each_row else 2 * MS)
    for rows in (1, 2, 4, 8):  # what they cost is seen
        simulation.submit("a", rows)
        simulation.run()
    seen = len(simulation.started)
    for _ in range(5):
        simulation.submit("a")
    simulation.run()
    assert [(batch.rows, batch.program) for batch in simulation.started[seen:]] == (
        [(4, 4), (1, 1)] if each_row else [(5, 8)]
    )
    simulation.submit("a", 5)  # stays whole
    simulation.run()
    assert (simulation.started[-1].rows, simulation.started[-1].program) == (5, 8)
    simulation.settled()


# Rows.


def test_rows_are_counted_and_a_request_stays_whole() -> None:
    simulation = Simulation(limits())
    for rows in (5, 5, 3, 3):
        simulation.submit("a", rows)
    simulation.run()
    assert shown(simulation) == [[(0, 0, 5), (2, 0, 3)], [(1, 0, 5), (3, 0, 3)]]


def test_an_oversize_request_is_split_in_order() -> None:
    simulation = Simulation(limits())
    simulation.submit("a", 20)
    simulation.submit("a", 2)
    simulation.run()
    parts = [part for batch in simulation.started for part in batch.parts if part.request == 0]
    assert [(part.start, part.rows) for part in parts] == [(0, 8), (8, 8), (16, 4)]
    simulation.settled()


def test_a_part_that_fails_fails_its_request_and_drops_the_rest() -> None:
    simulation = Simulation(limits(), bad={0})
    simulation.submit("a", 80)
    simulation.run()
    assert len(simulation.started) == 1
    assert simulation.how() == {"failed": 1}
    simulation.settled()


# Room.


def test_what_finds_no_room_waits_in_line_in_order() -> None:
    simulation = Simulation(limits(queue_size=8))
    for rows in (8, 6, 4, 1):
        simulation.submit("a", rows)
    assert (simulation.scheduler.waiting, simulation.scheduler.lined) == (8, 3)
    assert simulation.submit("a", nowait=True) not in simulation.fates
    assert simulation.refused == {"full": 1}
    simulation.run()
    assert simulation.how() == {"done": 4}
    assert [part.request for batch in simulation.started for part in batch.parts] == [0, 1, 2, 3]
    simulation.settled()


def test_a_request_larger_than_the_queue_comes_in_when_it_is_empty() -> None:
    simulation = Simulation(limits(queue_size=4))
    simulation.submit("a", 3)
    simulation.submit("a", 30)
    simulation.submit("a", 1)
    simulation.run()
    assert simulation.how() == {"done": 3}
    simulation.settled()


# Fairness.


def test_a_caller_with_few_rows_is_not_behind_one_with_many() -> None:
    simulation = Simulation(limits(queue_size=10_000))
    for _ in range(1000):
        simulation.submit("a", caller="flood")
    simulation.run(until=0)
    number = simulation.submit("a", caller="one")
    simulation.run()
    assert simulation.fates[number].batches == 0
    simulation.settled()


@pytest.mark.parametrize("size", [1, 2, 8])
def test_nobody_starves_under_a_stream_of_small_callers(size: int) -> None:
    """A large caller waits for its turns, but never longer than its age allows."""
    simulation = Simulation(limits(batch_sizes=(size,), queue_size=10_000))
    for _ in range(20):
        simulation.submit("a", caller="large")

    def stream() -> None:
        if simulation.now < 2000 * MS:
            for _ in range(size):
                simulation.submit("a")
            simulation.at(simulation.now + MS, stream)

    stream()
    simulation.run(until=2000 * MS)
    waited = [simulation.fates[each].batches for each in range(20)]
    assert all(fate.ended is not None for fate in list(simulation.fates.values())[:20])
    assert max(waited) <= 2 * 20 + PATIENCE


def test_a_full_batch_of_one_caller_is_not_behind_all_that_another_has_waiting() -> None:
    """Where much waits, the oldest is always due by its age; the large one does not fit beside it."""
    simulation = Simulation(limits(queue_size=1000))
    largest = simulation.limits.batch_sizes[-1]
    for _ in range(100 * largest):
        simulation.submit("a", caller="map")
    simulation.run(until=50 * MS)
    before = len(simulation.started)
    assert PATIENCE < before < 90
    number = simulation.submit("a", rows=4 * largest)
    simulation.run()
    waited = [at for at, batch in enumerate(simulation.started[before:]) if batch.parts[0].request == number]
    assert len(waited) == 4
    assert waited[-1] <= 2 * 4


def test_no_bucket_starves_under_a_stream_that_fills_batches_better() -> None:
    simulation = Simulation(limits(queue_size=100_000))

    def stream() -> None:
        if simulation.now < 1000 * MS:
            for key in ("full", "full too"):
                for _ in range(8):
                    simulation.submit(key)
            simulation.at(simulation.now + MS, stream)

    stream()
    simulation.run(until=10 * MS)
    rare = [simulation.submit("rare") for _ in range(3)]
    rarer = simulation.submit("rarer")
    simulation.run(until=1000 * MS)
    assert all(simulation.fates[each].batches <= PATIENCE + 3 for each in (*rare, rarer))


def test_a_full_bucket_goes_before_one_that_is_not() -> None:
    simulation = Simulation(limits())
    simulation.submit("other")
    simulation.run(until=0)
    simulation.submit("few")
    for _ in range(8):
        simulation.submit("full")
    simulation.run()
    assert [batch.key for batch in simulation.started] == ["other", "full", "few"]


# Deadlines and cancellation.


def test_what_expired_or_left_is_never_run() -> None:
    simulation = Simulation(limits(), cost=lambda batch: 10 * MS)
    simulation.submit("a")
    simulation.run(until=0)
    late = simulation.submit("a", timeout=3 * MS)
    left = simulation.submit("a")
    kept = simulation.submit("a")
    simulation.at(2 * MS, lambda: simulation.leave(left))
    simulation.run()
    assert [simulation.fates[each].how for each in (late, left, kept)] == ["expired", "cancelled", "done"]
    assert simulation.fates[late].ended == 3 * MS
    assert simulation.fates[late].computed == simulation.fates[left].computed == 0
    simulation.settled()


def test_the_deadline_of_a_running_request_passes_too() -> None:
    simulation = Simulation(limits(), cost=lambda batch: 10 * MS)
    number = simulation.submit("a", timeout=3 * MS)
    simulation.run()
    assert simulation.fates[number].ended == 3 * MS
    simulation.settled()


def test_a_compile_is_not_charged_and_other_buckets_go_on() -> None:
    simulation = Simulation(limits(), compile=100 * MS, cost=lambda batch: MS)
    simulation.programs.add(("known", 1))
    first = simulation.submit("new", timeout=10 * MS)
    simulation.run(until=0)
    behind = simulation.submit("new", timeout=10 * MS)
    known = simulation.submit("known", timeout=10 * MS)
    simulation.run()
    assert simulation.how() == {"done": 3}
    assert simulation.fates[known].ended == MS
    assert simulation.fates[first].ended == 101 * MS
    assert simulation.fates[behind].ended == 102 * MS
    simulation.settled()


def test_nobody_waits_for_a_compile_any_more() -> None:
    simulation = Simulation(limits(), compile=100 * MS)
    number = simulation.submit("new")
    simulation.at(10 * MS, lambda: simulation.leave(number))
    simulation.run()
    assert simulation.how() == {"cancelled": 1}
    simulation.settled()


@pytest.mark.parametrize("bulk", [False, True], ids=["callers", "maps"])
def test_what_left_takes_no_room(bulk: bool) -> None:
    """Behind some that stay, thousands come and go: queue, line and deadlines forget them."""
    simulation = Simulation(limits(queue_size=4), cost=lambda batch: 10**6 * MS)
    simulation.submit("a")
    simulation.run(until=0)
    for key, kept in (("a", 3), ("line", 2)):
        for _ in range(kept):
            simulation.submit(key, timeout=10**6 * MS, bulk=bulk)
        for _ in range(2000):
            number = simulation.submit(key, timeout=10**6 * MS, bulk=bulk)
            simulation.leave(number)
    scheduler = simulation.scheduler
    queue, room = scheduler._queues["a"], 3 if bulk else 4
    assert (queue.count, scheduler.waiting, scheduler.lined) == (3, room, 5 - room)
    lines = scheduler._line._lines.values()
    assert all(len(held) < 200 for held in (queue.by_age, queue.by_turn, scheduler._deadlines, *lines))


# Room.


def test_maps_leave_a_share_of_the_room_to_others() -> None:
    """A full share holds up maps only; who waits for room goes in as they came."""
    simulation = Simulation(limits(queue_size=8, batch_sizes=(1,)), cost=lambda batch: 10 * MS)
    simulation.submit("a")
    simulation.run(until=0)
    maps = [simulation.submit("a", bulk=True, caller="map") for _ in range(9)]
    assert (simulation.scheduler.waiting, simulation.scheduler.lined) == (6, 3)
    singles = [simulation.submit("a", nowait=True) for _ in range(2)]
    assert simulation.scheduler.waiting == 8
    assert not simulation.refused
    simulation.submit("a", nowait=True)  # of those that no map is, too many
    assert simulation.refused == {"full": 1}
    last = simulation.submit("a")
    simulation.run()
    assert simulation.how() == {"done": 13}
    ends = {each: simulation.fates[each].ended for each in (*maps, *singles, last)}
    assert max(ends[each] for each in singles) < ends[maps[2]]  # type: ignore[type-var]
    assert ends[last] < ends[maps[-1]]  # type: ignore[operator]
    simulation.settled()


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_maps_of_any_size_go_in_and_keep_nobody_out(size: int) -> None:
    """Also where one request of a map is larger than its share, or than the queue."""
    for rows in (1, size, 4 * size):
        simulation = Simulation(limits(queue_size=size, batch_sizes=(1,)))
        simulation.submit("a")
        simulation.run(until=0)
        for _ in range(5):
            simulation.submit("a", rows, bulk=True, caller="map")
        assert simulation.scheduler.waiting
        simulation.submit("a", nowait=True)
        assert not simulation.refused
        simulation.run()
        assert simulation.how() == {"done": 7}
        simulation.settled()


def test_who_waits_for_more_room_than_there_is_beside_a_map_gets_it() -> None:
    """What comes later of the map is behind a large request, so the queue empties for that one."""
    simulation = Simulation(limits(queue_size=8, batch_sizes=(1,)))

    def stream() -> None:
        if simulation.now < 200 * MS:
            if simulation.scheduler.lined < 5:
                simulation.submit("a", bulk=True, caller="map")
            simulation.at(simulation.now + MS // 4, stream)

    stream()
    simulation.run(until=50 * MS)
    large = simulation.submit("a", 20)
    simulation.run(until=200 * MS)
    assert simulation.fates[large].ended is not None
    assert simulation.fates[large].ended < 100 * MS  # type: ignore[operator]
    simulation.run()
    simulation.settled()


# Many queues.


def test_a_decision_costs_the_same_whatever_the_number_of_queues(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted are looks at a queue, for each request: where each has a queue of its own, and where a few share one."""
    looks = 0
    oldest = Queue.oldest

    def counted(queue: Queue) -> Any:
        nonlocal looks
        looks += 1
        return oldest(queue)

    monkeypatch.setattr(Queue, "oldest", counted)
    for compile in (0, MS):
        each = []
        for count in (20, 1000):
            simulation = Simulation(limits(queue_size=10_000, concurrency=2, timeout=count * MS), compile=compile)
            for number in range(count):
                simulation.submit(number)
            looks = 0
            simulation.run()
            simulation.settled()
            each.append(looks / count)
        assert each[1] < 2 * each[0] < 60


def test_thousands_of_queues_in_which_all_is_late() -> None:
    scheduler = Scheduler(limits(queue_size=10_000))
    for number in range(5000):
        scheduler.submit(Request(number, number, 1, 1, 0, 1), 0)
    assert scheduler.next(2) is None
    assert scheduler.waiting == 0
    assert len(scheduler.expired(2)) == 5000


# The breaker.


def test_the_breaker_opens_when_everything_fails_and_tries_one_batch_later() -> None:
    simulation = Simulation(limits(), broken=True)
    for _ in range(30):
        simulation.submit("a")
    simulation.run(until=20 * MS)
    assert len(simulation.started) == 1
    assert simulation.opened
    opened = simulation.opened[0]
    assert simulation.scheduler.breaker(simulation.now) == "open"
    assert simulation.scheduler.retry_after(simulation.now) == opened + BREAKER_FIRST - simulation.now
    simulation.submit("a")
    assert simulation.refused == {"open": 1}
    simulation.run(until=opened + BREAKER_FIRST)
    assert len(simulation.started) == 2
    assert simulation.started[1].probe
    simulation.run(until=simulation.now + 500 * MS)
    assert len(simulation.opened) == 2  # and twice as long
    simulation.run(until=simulation.opened[1] + 2 * BREAKER_FIRST - 1)
    assert len(simulation.started) == 2
    simulation.broken = False
    simulation.run()
    assert simulation.how() == {"failed": 16, "done": 14}
    assert simulation.scheduler.breaker(simulation.now) == "closed"
    simulation.settled()


def test_single_failures_open_it_only_when_nothing_else_succeeds() -> None:
    simulation = Simulation(limits())
    for good in (False, False, True, False, False, False):
        number = simulation.submit("a")
        if not good:
            simulation.bad.add(number)
        simulation.run()
    assert len(simulation.opened) == 1
    assert simulation.how() == {"failed": 5, "done": 1}


def test_an_error_that_lies_in_the_request_does_not_open_it() -> None:
    simulation = Simulation(limits())
    for _ in range(10):
        number = simulation.submit("a")
        batch = simulation.scheduler.next(0)
        assert batch is not None
        assert simulation.scheduler.finished(batch.id, [False], 0, blamed=True) == ((), (number,), False)
    assert simulation.scheduler.breaker(0) == "closed"


def test_callers_who_share_a_batch_of_bad_requests_hurt_nobody_else() -> None:
    scheduler = Scheduler(limits())
    now, opened = 0, []
    for outcomes in ([False, False], [False, False], [False, True], *([[False, False]] * 3)):
        for index in range(len(outcomes)):
            scheduler.submit(Request(len(opened) * 2 + index, "a", 1, 1, now), now)
        batch = scheduler.next(now)
        assert batch is not None
        opened.append(scheduler.finished(batch.id, outcomes, now, blamed=True)[2])
    assert opened == [False] * 5 + [True]


# Everything at once.


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(
    "chosen",
    [
        limits(),
        limits(concurrency=3, max_padded=64, queue_size=16),
        limits(batch_sizes=(4,), timeout=0),
        limits(batch_sizes=(1,), concurrency=2, queue_size=2),
    ],
    ids=["plain", "budget", "one size", "no batches"],
)
@pytest.mark.parametrize("compile", [0, 40 * MS])
def test_random_traffic(chosen: Limits, compile: int, seed: int) -> None:
    simulation = Simulation(chosen, compile=compile)
    traffic(simulation, seed, 400, {"short": 8, "middle": 16, "long": 100}, gap=[MS // 2, 4 * MS][seed % 2])
    simulation.run()
    simulation.settled()
    assert simulation.how()["done"] > 20
    assert {batch.key for batch in simulation.started} == {"short", "middle", "long"}


@pytest.mark.parametrize("seed", range(5))
def test_waiting_is_bounded_under_overload(seed: int) -> None:
    """Ten times more work than can be done: what was let in is answered after a number of batches that the queue bounds."""
    room, buckets = 32, {"short": 8, "middle": 16, "long": 100}
    simulation = Simulation(limits(queue_size=room))
    rng = random.Random(seed)

    def come() -> None:
        key = rng.choices(list(buckets), [20, 4, 1])[0]
        caller = rng.choice([None, "a", "b"])
        simulation.submit(key, rng.choice([1, 1, 3]), elements=buckets[key], nowait=True, caller=caller)

    for number in range(5000):
        simulation.at(number * MS // 50, come)
    simulation.run()
    simulation.settled()
    assert simulation.refused["full"] > 1000
    # Each batch of its queue takes an older part once its patience has ended, and no other queue goes more often than that.
    assert max(fate.batches for fate in simulation.fates.values()) <= (room + PATIENCE) * (PATIENCE + len(buckets)) / 4


def test_deadlines_go_on_after_two_batches_of_a_bucket_were_compiled_at_once() -> None:
    scheduler = Scheduler(limits(concurrency=2))
    size = scheduler.limits.batch_sizes[-1]
    for number in (0, 1):
        request = Request(number, "a", size, 1, arrived=0, deadline=100 * MS)
        assert scheduler.submit(request, 0) == "queued"
    first, second = scheduler.next(0), scheduler.next(0)
    assert first is not None
    assert second is not None
    for batch in (first, second):
        scheduler.hold(batch.id, 10 * MS)
    scheduler.ready(first.id, 500 * MS)
    scheduler.ready(second.id, 510 * MS)
    while scheduler.next(510 * MS) is not None:
        pass
    assert scheduler.expired(599 * MS) == ()
    assert set(scheduler.expired(600 * MS)) == {0, 1}
