"""The batch worker in front of a model that the test holds: what is shared, what is not, and who gets which error."""

from __future__ import annotations

import math
import threading
from typing import Any

import anyio
import numpy as np
import pytest
from anyio.lowlevel import checkpoint

from tests.serving.fakes import BAD, BUCKETS, Clock, FakeModel, fake_serving, prepared, right, row, settle
from transmuter_async.compiler import Batching
from transmuter_async.errors import (
    ActorStopped,
    BatchingRefused,
    CircuitOpen,
    CompileError,
    DeadlineExceeded,
    IndexOutOfRange,
    InputError,
    Overloaded,
)
from transmuter_async.serving import Serving, ServingActor
from transmuter_async.serving.rows import Rows
from transmuter_async.telemetry import CATALOGUE, Telemetry
from transmuter_async.testing import Recorder


@pytest.fixture
def ready() -> Any:
    return prepared()


@pytest.fixture
def unpadded() -> Any:
    return prepared(None)


class Callers:
    """Starts requests in tasks and keeps what became of them."""

    def __init__(self, serving: Serving, group: anyio.abc.TaskGroup) -> None:
        self.serving = serving
        self.group = group
        self.outcomes: dict[Any, Any] = {}
        self.scopes: dict[Any, anyio.CancelScope] = {}

    async def send(self, name: Any, inputs: dict[str, Any], **options: Any) -> None:
        self.group.start_soon(self._run, name, inputs, options)
        await settle(3)

    async def _run(self, name: Any, inputs: dict[str, Any], options: dict[str, Any]) -> None:
        with anyio.CancelScope() as self.scopes[name]:
            try:
                self.outcomes[name] = await self.serving.run(inputs, **options)
            except Exception as error:
                self.outcomes[name] = error
            return
        self.outcomes[name] = "cancelled"

    async def wait(self, *names: Any) -> None:
        with anyio.fail_after(20):
            while not self.outcomes.keys() >= set(names):
                await checkpoint()


# Sharing.


async def test_a_lone_request_waits_for_no_timer(ready: Any) -> None:
    async with fake_serving(ready, batch_timeout=1e6) as (serving, model, _):
        with anyio.fail_after(5):
            assert right(row(1, 8), await serving.run(row(1, 8)))
        assert [x.shape for x in model.calls] == [(1, 8)]


async def test_requests_share_batches_of_their_bucket_and_get_their_own_rows(ready: Any) -> None:
    async with fake_serving(ready) as (serving, model, _), anyio.create_task_group() as group:
        callers = Callers(serving, group)
        model.shut()
        await callers.send("first", row(0))
        await model.wait_calls(1)
        lengths = [4, 3, 7, 1, 8, 2, 16, 5]
        for number, length in enumerate(lengths):
            await callers.send(number, row(number, length))
        model.open()
        await callers.wait(*range(8), "first")
        for number, length in enumerate(lengths):
            assert right(row(number, length), callers.outcomes[number])
            assert not callers.outcomes[number]["y"].flags.writeable
        assert sorted(x.shape for x in model.calls) == [(1, 4), (1, 16), (4, 4), (4, 8)]


async def test_answers_keep_nothing_of_their_batch_alive(ready: Any) -> None:
    async with fake_serving(ready) as (serving, model, _), anyio.create_task_group() as group:
        callers = Callers(serving, group)
        for number in range(3):
            group.start_soon(callers._run, number, row(number, 3), {})
        await callers.wait(0, 1, 2)
        assert [x.shape for x in model.calls] == [(4, 4)]
        for number in range(3):
            for value in callers.outcomes[number].values():
                assert value.base is None or value.base.nbytes == value.nbytes


async def test_rows_of_one_request_stay_together_and_large_ones_are_joined_again(ready: Any) -> None:
    async with fake_serving(ready) as (serving, model, _), anyio.create_task_group() as group:
        callers = Callers(serving, group)
        model.shut()
        await callers.send("first", row(0))
        await model.wait_calls(1)
        sizes = {"three": 3, "two": 2, "one": 1, "eleven": 11}
        for name, rows in sizes.items():
            await callers.send(name, row(rows, 3, rows))
        model.open()
        await callers.wait("first", *sizes)
        for name, rows in sizes.items():
            assert right(row(rows, 3, rows), callers.outcomes[name]), name
        assert max(len(x) for x in model.calls) == 4
        for name in ("three", "two"):
            starts = [len(x) for x in model.calls if (x[:, 0] == sizes[name]).any()]
            assert len(starts) == 1  # its first row, and with it the others, in one call


async def test_who_leaves_while_a_neighbour_is_joined_hurts_nobody(ready: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last rows of a large request share a batch with others, which may leave while a thread joins its parts."""
    joining, go_on = anyio.Event(), threading.Event()
    monkeypatch.setattr("transmuter_async.serving.actor.INLINE_BYTES", 0)
    telemetry = Telemetry()
    async with (
        fake_serving(ready, telemetry=telemetry) as (serving, model, actor),
        Recorder(telemetry, "transmuter.queue") as recorder,
    ):
        rejoin = actor.rows.rejoin

        def slowly(item: Any, parts: Any) -> Any:
            if len(parts) > 1:
                actor.loop.post(joining.set)
                assert go_on.wait(20)
            return rejoin(item, parts)

        monkeypatch.setattr(Rows, "rejoin", lambda _, item, parts: slowly(item, parts))
        async with anyio.create_task_group() as group:
            callers = Callers(serving, group)
            model.shut()
            await callers.send("first", row(0))
            await model.wait_calls(1)
            await callers.send("six", row(6, 4, 6))
            await callers.send("leaves", row(1))
            await callers.send("stays", row(2))
            model.open()
            with anyio.fail_after(20):
                await joining.wait()
            callers.scopes["leaves"].cancel()
            await callers.wait("leaves")
            go_on.set()
            await callers.wait("six", "stays")
        assert right(row(6, 4, 6), callers.outcomes["six"])
        assert right(row(2), callers.outcomes["stays"])
        assert callers.outcomes["leaves"] == "cancelled"
        statistics = await serving.statistics()
        assert (statistics.restarts, statistics.answered, statistics.cancelled) == (0, 3, 1)
        assert not recorder.events  # what left was computed


async def test_a_request_without_rows_or_without_length_runs_as_it_is(ready: Any) -> None:
    async with fake_serving(ready) as (serving, model, _):
        for shape in ((0, 3), (2, 0)):
            outputs = await serving.run({"x": np.zeros(shape, np.float32)})
            assert outputs["y"].shape == shape
        assert [x.shape for x in model.calls] == [(0, 3), (2, 0)]


async def test_without_buckets_only_equal_lengths_meet(unpadded: Any) -> None:
    async with fake_serving(unpadded) as (serving, model, _), anyio.create_task_group() as group:
        callers = Callers(serving, group)
        for number, length in enumerate([3, 5, 3, 5, 7]):
            group.start_soon(callers._run, number, row(number, length), {})
        await callers.wait(*range(5))
        assert all(right(row(n, length), callers.outcomes[n]) for n, length in enumerate([3, 5, 3, 5, 7]))
        assert sorted(x.shape for x in model.calls) == [(1, 7), (2, 3), (2, 5)]


async def test_batches_in_flight_are_bounded(ready: Any) -> None:
    async with fake_serving(ready, max_concurrency=2) as (serving, model, _), anyio.create_task_group() as group:
        callers = Callers(serving, group)
        model.shut()
        for number in range(24):
            await callers.send(number, row(number))
        await settle()
        assert model.running == 2
        model.open()
        await callers.wait(*range(24))
        assert model.peak == 2


async def test_a_batch_closes_by_time_while_another_runs(ready: Any) -> None:
    async with fake_serving(ready, max_concurrency=2, batch_timeout=0.5) as (serving, model, actor):
        clock = Clock(actor)
        async with anyio.create_task_group() as group:
            callers = Callers(serving, group)
            model.shut()
            await callers.send(0, row(0))
            await callers.send(1, row(1))
            await settle()
            assert len(model.calls) == 1
            clock.advance(0.6)
            await settle()
            assert len(model.calls) == 2
            model.open()


# Errors.


async def test_one_that_does_not_fit_gets_its_error_before_it_meets_others(ready: Any) -> None:
    async with fake_serving(ready) as (serving, model, _), anyio.create_task_group() as group:
        callers = Callers(serving, group)
        wrong = {"dtype": {"x": np.zeros((1, 4), np.int64)}, "name": {"z": 1.0}, "long": row(0, 17)}
        for name, inputs in {**wrong, "good": row(1)}.items():
            group.start_soon(callers._run, name, inputs, {})
        await callers.wait("good", *wrong)
        assert all(isinstance(callers.outcomes[name], InputError) for name in wrong)
        assert "largest bucket 16" in str(callers.outcomes["long"])
        assert right(row(1), callers.outcomes["good"])
        assert len(model.calls) == 1


async def test_a_bad_row_gets_its_error_and_its_neighbours_their_results(ready: Any) -> None:
    telemetry = Telemetry()
    async with (
        fake_serving(ready, telemetry=telemetry) as (serving, model, _),
        Recorder(telemetry, "transmuter.batch", "transmuter.breaker") as recorder,
        anyio.create_task_group() as group,
    ):
        callers = Callers(serving, group)
        model.error = lambda: IndexOutOfRange("bad", node="n", input="i", axis=0, size=3)
        for number in range(4):
            group.start_soon(callers._run, number, row(BAD if number == 2 else number), {})
        await callers.wait(*range(4))
        assert isinstance(callers.outcomes[2], IndexOutOfRange)
        assert all(right(row(n), callers.outcomes[n]) for n in (0, 1, 3))
        assert [x.shape for x in model.calls] == [(4, 4), (1, 4), (1, 4), (1, 4), (1, 4)]
        assert recorder.names().count("transmuter.batch.exception") == 2
        assert recorder.names().count("transmuter.batch.stop") == 3
        assert "transmuter.breaker.opened" not in recorder.names()
        statistics = await serving.statistics()
        assert (statistics.retried, statistics.failed, statistics.answered) == (1, 1, 3)


async def test_when_everything_fails_the_breaker_opens_for_a_moment(ready: Any) -> None:
    telemetry = Telemetry()
    async with (
        fake_serving(ready, telemetry=telemetry) as (serving, model, actor),
        Recorder(telemetry, "transmuter") as recorder,
        anyio.create_task_group() as group,
    ):
        clock = Clock(actor)
        callers = Callers(serving, group)
        model.broken = True
        for number in range(10):
            group.start_soon(callers._run, number, row(number), {})
        while len(callers.outcomes) < 4:
            await checkpoint()
        assert [str(each) for each in callers.outcomes.values()] == ["the row is bad"] * 4
        failed = set(callers.outcomes)
        assert len(model.calls) == 5  # the batch, and each of its rows once; the load is not doubled again
        with pytest.raises(CircuitOpen, match="refuses work for another") as caught:
            await serving.run(row(50))
        assert caught.value.retry_after == pytest.approx(1)
        await settle()
        assert len(callers.outcomes) == 4  # who waits, waits
        model.broken = False
        clock.advance(1.1)
        await callers.wait(*range(10))
        assert all(right(row(n), callers.outcomes[n]) for n in set(range(10)) - failed)
        assert right(row(51), await serving.run(row(51)))
        [opened] = recorder.named("transmuter.breaker.opened")
        assert opened.measurements["retry_after"] == 1_000_000_000
        assert len(recorder.named("transmuter.breaker.closed")) == 1
        assert [e.metadata["why"] for e in recorder.named("transmuter.queue.rejected")] == ["circuit_open"]
        for event in recorder.events:
            kind = CATALOGUE[event.name]
            assert set(kind.measurements) <= event.measurements.keys(), event.name
            assert set(kind.metadata) <= event.metadata.keys(), event.name
        assert (await serving.statistics()).opened == 1


async def test_batch_events_say_what_ran(ready: Any) -> None:
    telemetry = Telemetry()
    async with (
        fake_serving(ready, telemetry=telemetry) as (serving, model, actor),
        Recorder(telemetry, "transmuter.batch") as recorder,
        anyio.create_task_group() as group,
    ):
        clock = Clock(actor)
        callers = Callers(serving, group)
        model.shut()
        await callers.send("first", row(0, 4))
        await model.wait_calls(1)
        for number in range(7):
            await callers.send(number, row(number, 3))
        clock.advance(0.25)
        model.open()
        await callers.wait("first", *range(7))
        stops = recorder.named("transmuter.batch.stop")
        assert [e.measurements["size"] for e in stops] == [1, 4, 3]
        assert [e.measurements["padding"] for e in stops] == pytest.approx([0, 1 - 12 / 16, 1 - 9 / 16])
        assert [e.measurements["queue_depth"] for e in stops] == [0, 3, 0]
        assert [e.measurements["oldest_wait"] for e in stops] == [0, 250_000_000, 250_000_000]
        assert {e.metadata["serving"] for e in stops} == {"fake-serving"}
        assert {e.metadata["bucket"] for e in stops} == {"length=4"}
        assert [e.metadata["why"] for e in stops] == ["idle", "full", "idle"]
        statistics = await serving.statistics()
        assert statistics.mean_batch == pytest.approx(8 / 3)
        assert statistics.padded == pytest.approx((4 + 7) / 36)


# Leaving.


async def test_what_is_cancelled_in_the_queue_is_never_computed(ready: Any) -> None:
    telemetry = Telemetry()
    async with (
        fake_serving(ready, telemetry=telemetry) as (serving, model, _),
        Recorder(telemetry, "transmuter.queue") as recorder,
        anyio.create_task_group() as group,
    ):
        callers = Callers(serving, group)
        model.shut()
        await callers.send("first", row(0))
        await model.wait_calls(1)
        for number in range(1, 5):
            await callers.send(number, row(number))
        callers.scopes[2].cancel()
        callers.scopes[3].cancel()
        await callers.wait(2, 3)
        model.open()
        await callers.wait("first", 1, 4)
        assert model.calls[1][:2, 0].tolist() == [1, 4]
        assert not any((x[:, 0] == 2).any() or (x[:, 0] == 3).any() for x in model.calls)
        assert [e.metadata["why"] for e in recorder.events] == ["cancelled", "cancelled"]


async def test_a_batch_that_nobody_waits_for_is_cancelled_and_one_with_a_neighbour_is_not(ready: Any) -> None:
    async with fake_serving(ready) as (serving, model, actor), anyio.create_task_group() as group:
        callers = Callers(serving, group)
        model.shut()
        for number in range(2):
            group.start_soon(callers._run, number, row(number), {})
        await model.wait_calls(1)
        callers.scopes[0].cancel()
        await settle()
        assert model.cancelled == 0
        callers.scopes[1].cancel()
        await callers.wait(0, 1)
        await settle()
        assert model.cancelled == 1
        model.open()
        assert right(row(5), await serving.run(row(5)))
        assert actor._scheduler is not None
        assert actor._scheduler.running == 0


async def test_a_deadline_passes_in_the_queue_and_while_it_runs(ready: Any) -> None:
    async with fake_serving(ready, timeout=0.5) as (serving, model, actor), anyio.create_task_group() as group:
        clock = Clock(actor)
        callers = Callers(serving, group)
        assert right(row(9), await serving.run(row(9)))  # its program is known from now on
        model.shut()
        await callers.send("running", row(0))
        await model.wait_calls(2)
        await callers.send("queued", row(1))
        await callers.send("patient", row(2), timeout=5)
        clock.advance(0.6)
        await callers.wait("running", "queued")
        assert "it was being computed" in str(callers.outcomes["running"])
        assert "still in the queue" in str(callers.outcomes["queued"])
        assert all(isinstance(callers.outcomes[name], DeadlineExceeded) for name in ("running", "queued"))
        model.open()
        await callers.wait("patient")
        assert right(row(2), callers.outcomes["patient"])
        assert not any((x[:, 0] == 1).any() for x in model.calls)
        statistics = await serving.statistics()
        assert (statistics.expired, statistics.answered) == (2, 2)


async def test_a_compile_is_not_charged_and_holds_up_nobody_else(ready: Any) -> None:
    async with fake_serving(ready) as (serving, model, actor), anyio.create_task_group() as group:
        clock = Clock(actor)
        callers = Callers(serving, group)
        assert right(row(9, 8), await serving.run(row(9, 8)))
        model.shut_compiles()
        await callers.send("new", row(0, 16), timeout=1)
        await model.wait_warmed(2)
        await callers.send("behind", row(1, 16), timeout=1)
        clock.advance(100)
        await callers.send("known", row(2, 8), timeout=1)
        await callers.wait("known")
        assert right(row(2, 8), callers.outcomes["known"])
        await settle()
        assert callers.outcomes.keys() == {"known"}
        model.open_compiles()
        await callers.wait("new", "behind")
        assert right(row(0, 16), callers.outcomes["new"])
        assert right(row(1, 16), callers.outcomes["behind"])
        assert model.warmed == [(1, 8), (1, 16)]


async def test_a_program_that_is_gone_is_compiled_again_and_not_charged(ready: Any) -> None:
    async with fake_serving(ready) as (serving, model, actor), anyio.create_task_group() as group:
        clock = Clock(actor)
        callers = Callers(serving, group)
        assert right(row(9, 8), await serving.run(row(9, 8)))
        model._actor.losses += 1
        model.shut_compiles()
        await callers.send("again", row(0, 8), timeout=1)
        await model.wait_warmed(2)
        clock.advance(100)
        await settle()
        assert not callers.outcomes
        model.open_compiles()
        await callers.wait("again")
        assert right(row(0, 8), callers.outcomes["again"])
        assert model.warmed == [(1, 8), (1, 8)]


async def test_a_compile_that_fails_is_told_to_who_asked(ready: Any) -> None:
    async with fake_serving(ready) as (serving, model, _):
        model.compile_error = CompileError("XLA refuses")
        with pytest.raises(CompileError, match="XLA refuses"):
            await serving.run(row(0))
        assert not model.calls
        model.compile_error = None
        assert right(row(1), await serving.run(row(1)))


# Room.


async def test_a_full_queue_makes_run_wait_and_refuses_run_nowait(ready: Any) -> None:
    async with fake_serving(ready, queue_size=4) as (serving, model, _), anyio.create_task_group() as group:
        callers = Callers(serving, group)
        model.shut()
        await callers.send("first", row(0))
        await model.wait_calls(1)
        for number in range(6):
            await callers.send(number, row(number))
        statistics = await serving.statistics()
        assert (statistics.waiting, statistics.waiting_for_room) == (4, 2)
        assert statistics.queues == {"length=4": 4}
        with pytest.raises(Overloaded, match="4 rows wait"):
            await serving.run_nowait(row(9))
        model.open()
        await callers.wait("first", *range(6))
        assert all(right(row(n), callers.outcomes[n]) for n in range(6))
        assert (await serving.statistics()).rejected == 1
        assert right(row(9), await serving.run_nowait(row(9)))


# Ending.


async def test_without_drain_everyone_is_told_at_once(ready: Any) -> None:
    async with fake_serving(ready) as (serving, model, _), anyio.create_task_group() as group:
        callers = Callers(serving, group)
        model.shut()
        for number in range(10):
            await callers.send(number, row(number))
        with anyio.fail_after(5):
            await serving.aclose()
        await callers.wait(*range(10))
        assert all(isinstance(each, ActorStopped) for each in callers.outcomes.values())
        assert model.cancelled == 1
        with pytest.raises(ActorStopped, match="was closed; serve the model again"):
            await serving.run(row(0))
        assert not serving.ready
        assert serving.state == "stopped"


async def test_with_drain_all_buckets_are_answered(ready: Any) -> None:
    async with fake_serving(ready, queue_size=5) as (serving, model, _), anyio.create_task_group() as group:
        callers = Callers(serving, group)
        model.shut()
        for number in range(12):
            await callers.send(number, row(number, [3, 7, 12][number % 3]))
        group.start_soon(lambda: serving.aclose(drain=True))
        await settle()
        with pytest.raises(ActorStopped):
            await serving.run(row(0))
        model.open()
        await callers.wait(*range(12))
        assert all(right(row(n, [3, 7, 12][n % 3]), callers.outcomes[n]) for n in range(12))


async def test_draining_ends_with_its_grace(ready: Any) -> None:
    async with fake_serving(ready) as (serving, model, _), anyio.create_task_group() as group:
        callers = Callers(serving, group)
        model.shut()
        for number in range(10):
            await callers.send(number, row(number))
        with anyio.fail_after(10):
            await serving.aclose(drain=True, grace=0.05)
        await callers.wait(*range(10))
        assert all(isinstance(each, ActorStopped) for each in callers.outcomes.values())


async def test_the_end_of_the_model_ends_its_serving(ready: Any) -> None:
    async with fake_serving(ready) as (serving, model, actor), anyio.create_task_group() as group:
        callers = Callers(serving, group)
        model.shut()
        for number in range(6):
            await callers.send(number, row(number))
        model.state = "stopped"
        model.open()
        await callers.wait(*range(6))
        assert all("ended with its model" in str(each) for each in callers.outcomes.values())
        with anyio.fail_after(5):
            await actor.wait_stopped()


async def test_a_crash_of_the_worker_answers_everyone_and_it_starts_again(ready: Any) -> None:
    async with fake_serving(ready) as (serving, model, actor), anyio.create_task_group() as group:
        callers = Callers(serving, group)
        model.shut()
        for number in range(6):
            await callers.send(number, row(number))
        assert actor._scheduler is not None

        def broken(now: int) -> Any:
            raise ZeroDivisionError("a defect")

        actor._scheduler.next = broken  # type: ignore[method-assign]
        group.start_soon(callers._run, 6, row(6), {})
        while actor.state != "restarting":
            await checkpoint()
        group.start_soon(callers._run, "meanwhile", row(8), {})
        await callers.wait(*range(7))
        assert all("crashed: ZeroDivisionError" in str(callers.outcomes[number]) for number in range(7))
        model.open()
        with anyio.fail_after(5):
            while actor.state != "running":
                await checkpoint()
        await callers.wait("meanwhile")
        assert right(row(8), callers.outcomes["meanwhile"])
        assert right(row(7), await serving.run(row(7)))
        assert (await serving.statistics()).restarts == 1


async def _restarting(
    callers: Callers, model: FakeModel, actor: ServingActor, monkeypatch: pytest.MonkeyPatch
) -> anyio.Event:
    """Crash it with work in flight, and hold its restart until the event that is given back; work comes meanwhile."""
    gate, opening = anyio.Event(), actor._open

    async def slowly() -> None:
        await gate.wait()
        await opening()

    monkeypatch.setattr(actor, "_open", slowly)
    model.shut()
    await callers.send("before", row(9))
    with anyio.fail_after(20):
        await model.wait_calls(1)
    actor.crash(ZeroDivisionError("a defect"))
    await callers.wait("before")
    assert isinstance(callers.outcomes["before"], ActorStopped)
    model.open()
    for number in range(7):
        await callers.send(number, row(number, [3, 7, 12][number % 3]))
    await settle()
    assert actor.state == "restarting"
    assert len(model.calls) == 1
    return gate


async def test_draining_while_it_starts_again_answers_what_came_since(
    ready: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fake_serving(ready, queue_size=4) as (serving, model, actor), anyio.create_task_group() as group:
        callers = Callers(serving, group)
        gate = await _restarting(callers, model, actor, monkeypatch)
        group.start_soon(lambda: serving.aclose(drain=True))
        await settle()
        assert serving.state == "stopping"
        with pytest.raises(ActorStopped):
            await serving.run(row(0))
        await settle()
        assert len(model.calls) == 1  # nothing before it is open again
        gate.set()
        await callers.wait(*range(7))
        assert all(right(row(n, [3, 7, 12][n % 3]), callers.outcomes[n]) for n in range(7))
        with anyio.fail_after(5):
            await actor.wait_stopped()
        assert (serving.state, actor.restarts) == ("stopped", 1)


@pytest.mark.parametrize("drain", [True, False])
async def test_closing_while_it_starts_again_ends_in_time(
    ready: Any, monkeypatch: pytest.MonkeyPatch, drain: bool
) -> None:
    async with fake_serving(ready) as (serving, model, actor), anyio.create_task_group() as group:
        callers = Callers(serving, group)
        await _restarting(callers, model, actor, monkeypatch)
        with anyio.fail_after(10):
            await serving.aclose(drain=drain, grace=0.05)
        await callers.wait(*range(7))
        assert all(isinstance(callers.outcomes[number], ActorStopped) for number in range(7))
        assert len(model.calls) == 1


async def test_a_crash_while_it_drains_answers_everyone(ready: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async with fake_serving(ready) as (serving, model, actor), anyio.create_task_group() as group:
        callers = Callers(serving, group)
        gate = await _restarting(callers, model, actor, monkeypatch)
        model.shut()
        group.start_soon(lambda: serving.aclose(drain=True))
        await settle()
        gate.set()
        with anyio.fail_after(20):
            await model.wait_calls(2)
        actor.crash(ZeroDivisionError("another"))
        await callers.wait(*range(7))
        assert all(isinstance(callers.outcomes[number], ActorStopped) for number in range(7))
        with anyio.fail_after(5):
            await actor.wait_stopped()


# Warming up.


async def test_warm_compiles_every_bucket_and_size_and_then_it_is_ready(ready: Any) -> None:
    async with fake_serving(ready, max_padded=32) as (serving, model, _):
        assert not serving.ready
        await serving.warm()
        assert serving.ready
        assert sorted(set(model.warmed)) == [(1, 4), (1, 8), (1, 16), (2, 4), (2, 8), (2, 16), (4, 4), (4, 8)]
        before = len(model.warmed)
        assert right(row(1, 7, 3), await serving.run(row(1, 7, 3)))
        assert len(model.warmed) == before
        statistics = await serving.statistics()
        assert statistics.ready
        assert statistics.warm_failure is None


async def test_a_trial_that_differs_refuses_everything_and_names_the_output(ready: Any) -> None:
    async with fake_serving(ready) as (serving, model, _):
        model.mixes = True
        with pytest.raises(BatchingRefused, match="output 'y' of row 0 of a batch of 3 differs"):
            await serving.warm()
        assert not serving.ready
        assert "BatchingRefused: the output 'y'" in ((await serving.statistics()).warm_failure or "")
        with pytest.raises(BatchingRefused, match="output 'y'"):
            await serving.run(row(1))
        model.mixes = False  # by chance, say: what the proof promised does not hold
        with pytest.raises(BatchingRefused, match="output 'y'"):
            await serving.warm()
        assert not serving.ready


async def test_a_warm_up_that_fails_is_visible_and_can_be_tried_again(ready: Any) -> None:
    async with fake_serving(ready) as (serving, model, _):
        model.compile_error = CompileError("XLA refuses")
        with pytest.raises(CompileError):
            await serving.warm()
        assert not serving.ready
        assert (await serving.statistics()).warm_failure == "CompileError: XLA refuses"
        model.compile_error = None
        await serving.warm()
        assert serving.ready
        assert (await serving.statistics()).warm_failure is None


async def test_a_warm_up_whose_serving_ends_meanwhile_says_so(ready: Any) -> None:
    async with fake_serving(ready) as (serving, model, _), anyio.create_task_group() as group:
        model.shut_compiles()
        found: list[Exception] = []

        async def warm() -> None:
            try:
                await serving.warm()
            except ActorStopped as error:
                found.append(error)

        group.start_soon(warm)
        await model.wait_warmed(1)
        await serving.aclose()
        model.open_compiles()
        with anyio.fail_after(20):
            while not found:
                await checkpoint()
        assert not model.calls
        with pytest.raises(ActorStopped):
            await serving.warm()


async def test_a_warm_up_that_is_cancelled_takes_nothing_from_one_before(ready: Any) -> None:
    async with fake_serving(ready) as (serving, model, _):
        for first in (True, False):
            model.shut_compiles()
            seen = len(model.warmed)
            async with anyio.create_task_group() as group:
                group.start_soon(serving.warm)
                await model.wait_warmed(seen + 1)
                assert serving.ready is not first  # it computes as before while it is warmed again
                group.cancel_scope.cancel()
            statistics = await serving.statistics()
            assert (statistics.ready, serving.ready) == (not first, not first)
            assert statistics.warm_failure == ("it was cancelled" if first else None)
            model.open_compiles()
            await serving.warm()
            assert serving.ready
            assert (await serving.statistics()).warm_failure is None
        model.compile_error = CompileError("XLA refuses")
        with pytest.raises(CompileError):
            await serving.warm()
        assert not serving.ready


async def test_what_can_not_be_made_up_needs_a_sample(unpadded: Any) -> None:
    async with fake_serving(unpadded) as (serving, model, _):
        with pytest.raises(InputError, match=r"x: float\[batch, length\].*warm\(\{...\}\)"):
            await serving.warm()
        await serving.warm(row(0, 5), row(0, 6))
        assert serving.ready
        assert sorted(set(model.warmed)) == [(n, length) for n in (1, 2, 4) for length in (5, 6)]


# Refusals at the start.


async def test_sizes_that_do_not_fit_the_cache_or_the_buckets_are_refused() -> None:
    few, told = await anyio.to_thread.run_sync(
        lambda: (prepared(BUCKETS, cache_size=4), prepared(_with_batch_buckets()))
    )
    async with fake_serving(few, batch_size=8) as (serving, _, _):
        assert (await serving.statistics()).batch_sizes == (8,)
    with pytest.raises(InputError, match=r"need 6 programs, and cache_size=4.*compile\(cache_size=6\)"):
        async with fake_serving(few, batch_size=[2, 8]):
            raise AssertionError
    with pytest.raises(InputError, match=r"not among the buckets \[1, 6\]"):
        async with fake_serving(told, batch_size=4):
            raise AssertionError
    async with fake_serving(told, batch_size=None) as (serving, _, _):
        assert (await serving.statistics()).batch_sizes == (1, 6)
        assert right(row(1, 3, 2), await serving.run(row(1, 3, 2)))
    with pytest.raises(InputError, match="computes 1 at once"):
        async with fake_serving(told, batch_size=6, concurrency=2):
            raise AssertionError


def _with_batch_buckets() -> Batching:
    return Batching("batch", {"length": [4], "batch": [1, 6]})


@pytest.mark.parametrize(
    "wrong",
    [
        {"batch_timeout": -1},
        {"queue_size": 0},
        {"max_padded": 0},
        {"timeout": 0},
        {"timeout": float("nan")},
        {"concurrency": 0},
        {"batch_size": 0},
        {"batch_size": []},
    ],
    ids=str,
)
async def test_numbers_that_make_no_sense_are_refused(ready: Any, wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        async with fake_serving(ready, **wrong):
            raise AssertionError


@pytest.mark.parametrize("wrong", ["16", 2.5, [1, 2.5]], ids=repr)
async def test_sizes_that_are_no_numbers_are_refused(ready: Any, wrong: Any) -> None:
    """A text of digits is no list of them."""
    with pytest.raises(TypeError, match="batch_size"):
        async with fake_serving(ready, batch_size=wrong):
            raise AssertionError


async def test_a_timeout_of_ages_is_none_and_one_in_the_past_is_over(ready: Any) -> None:
    async with fake_serving(ready) as (serving, _, _):
        for timeout in (1e300, math.inf):
            assert right(row(1), await serving.run(row(1), timeout=timeout))
        for timeout in (0, -1, -math.inf):
            with pytest.raises(DeadlineExceeded):
                await serving.run(row(1), timeout=timeout)
