"""`serving.map`: order, back-pressure to the source, errors in their place, and every way to leave it."""

from __future__ import annotations

import gc
import itertools
from collections.abc import AsyncIterator, Iterator
from typing import Any

import anyio
import numpy as np
import pytest
from anyio.lowlevel import checkpoint

from tests.serving.fakes import BAD, Clock, fake_serving, prepared, right, row, settle
from transmuter_async.errors import ActorStopped, InputError, MisuseError, Overloaded
from transmuter_async.serving import Serving


@pytest.fixture
def ready() -> Any:
    return prepared()


def rows(count: int) -> Iterator[dict[str, np.ndarray]]:
    for number in range(count):
        yield row(number, 1 + number * 7 % 16)


class Source:
    """An async source that counts what was taken from it, and knows when it was closed."""

    def __init__(self, count: int, error: Exception | None = None) -> None:
        self.count = count
        self.error = error
        self.taken = 0
        self.closed = False

    async def __aiter__(self) -> AsyncIterator[dict[str, np.ndarray]]:
        try:
            for each in rows(self.count):
                self.taken += 1
                await checkpoint()
                yield each
            if self.error is not None:
                raise self.error
        finally:
            self.closed = True


@pytest.mark.parametrize("plain", [True, False], ids=["plain", "async"])
async def test_results_come_in_the_order_of_the_source(ready: Any, plain: bool) -> None:
    async with fake_serving(ready) as (serving, model, _):
        source: Any = rows(100) if plain else aiter(Source(100))
        found = [outputs async for outputs in serving.map(source, concurrency=20)]
        assert len(found) == 100
        assert all(right(inputs, outputs) for inputs, outputs in zip(rows(100), found, strict=True))
        assert len(model.calls) < 100


async def test_unordered_results_come_as_they_are_done(ready: Any) -> None:
    async with fake_serving(ready) as (serving, model, _):
        model.shut_compiles()  # the bucket of the first item
        source = [row(0, 16), *(row(n, 4) for n in range(1, 6))]
        async with serving.map(source, ordered=False) as results:
            await serving_known(serving, model)
            found = [await anext(results) for _ in range(5)]
            assert all(outputs["y"].shape == (1, 4) for outputs in found)
            model.open_compiles()
            assert (await anext(results))["y"].shape == (1, 16)
            with pytest.raises(StopAsyncIteration):
                await anext(results)


async def serving_known(serving: Any, model: Any) -> None:
    """Its programs for short rows are compiled; others are not."""
    actor = serving._actor
    for size in (1, 2, 4):
        actor.known.add((actor.rows.admit(row(0, 4)).key, size))


async def test_a_slow_reader_holds_the_source_back(ready: Any) -> None:
    async with fake_serving(ready) as (serving, _, _):
        source = Source(1000)
        async with serving.map(aiter(source), concurrency=7) as results:
            for number in range(1, 30):
                await anext(results)
                await settle(30)
                assert source.taken <= number + 7
        await settle()
        assert source.closed
        assert source.taken < 50


async def test_a_plain_source_is_held_back_to_the_item(ready: Any) -> None:
    taken = 0

    def source() -> Iterator[dict[str, np.ndarray]]:
        nonlocal taken
        for each in rows(100):
            taken += 1
            yield each

    async with fake_serving(ready) as (serving, _, _), serving.map(source(), concurrency=3) as results:
        for number in range(1, 10):
            await anext(results)
            await settle(30)
            assert taken == number + 3


async def test_a_large_source_needs_no_memory(ready: Any) -> None:
    """What is in flight is bounded, so only the results that the reader keeps are there."""
    async with fake_serving(ready, batch_size=64, queue_size=128) as (serving, _, actor):
        most = 0
        total = 0
        async for outputs in serving.map((row(n) for n in range(5000)), concurrency=100):
            total += len(outputs["y"])
            most = max(most, len(actor._tickets))
        assert total == 5000
        assert most <= 100


async def test_an_item_that_fails_raises_in_its_place_and_the_rest_goes_on(ready: Any) -> None:
    async with fake_serving(ready) as (serving, _, _):
        source = [row(0), {"x": np.zeros((1, 99), np.float32)}, row(BAD), row(3)]
        results = serving.map(source)
        assert right(source[0], await anext(results))
        with pytest.raises(InputError, match="largest bucket"):
            await anext(results)
        with pytest.raises(RuntimeError, match="the row is bad"):
            await anext(results)
        assert right(source[3], await anext(results))
        with pytest.raises(StopAsyncIteration):
            await anext(results)
        found = [each async for each in serving.map(source, return_exceptions=True)]
        assert [type(each) for each in found] == [dict, InputError, RuntimeError, dict]


async def test_an_error_of_the_source_comes_after_the_results_before_it(ready: Any) -> None:
    async with fake_serving(ready) as (serving, _, _):
        found = []
        with pytest.raises(OSError, match="the disk is gone"):
            async for outputs in serving.map(aiter(Source(10, OSError("the disk is gone")))):
                found.append(outputs)
        assert len(found) == 10


@pytest.mark.parametrize("plain", [True, False], ids=["plain", "async"])
async def test_a_source_that_has_stopped_is_no_end(ready: Any, plain: bool) -> None:
    """As when it is fed from another serving, which was closed: what is missing must not look like the end."""

    def broken() -> Iterator[dict[str, np.ndarray]]:
        yield row(1)
        raise ActorStopped("another serving was closed")

    error = ActorStopped("another serving was closed")
    async with fake_serving(ready) as (serving, _, _):
        results = serving.map(broken() if plain else aiter(Source(1, error)))
        await anext(results)
        with pytest.raises(ActorStopped, match="another serving"):
            await anext(results)
        assert serving.state == "running"


async def test_a_loop_that_breaks_leaves_nothing_behind(ready: Any) -> None:
    async with fake_serving(ready) as (serving, model, actor):
        source = Source(1000)
        async for _ in serving.map(aiter(source), concurrency=5):
            break
        gc.collect()
        model.shut()
        await settle(30)
        assert source.closed
        assert not actor._tickets
        model.open()
        assert right(row(1), await serving.run(row(1)))


async def test_a_cancelled_reader_leaves_nothing_behind(ready: Any) -> None:
    async with fake_serving(ready) as (serving, model, actor), anyio.create_task_group() as group:
        model.shut()

        async def read() -> None:
            async with serving.map(rows(100), concurrency=10) as results:
                async for _ in results:
                    raise AssertionError("the model is shut")

        group.start_soon(read)
        await model.wait_calls(1)
        await settle(30)
        assert len(actor._tickets) == 10
        group.cancel_scope.cancel()
    assert not actor._tickets


async def test_the_end_of_the_serving_ends_the_map(ready: Any) -> None:
    async with fake_serving(ready) as (serving, model, _), anyio.create_task_group() as group:
        model.shut()
        source = Source(1000)
        found: list[Any] = []

        async def read() -> None:
            try:
                async for outputs in serving.map(aiter(source), concurrency=10):
                    found.append(outputs)
            except ActorStopped as error:
                found.append(error)

        group.start_soon(read)
        await model.wait_calls(1)
        await serving.aclose()
        with anyio.fail_after(5):
            while not found:
                await checkpoint()
        assert isinstance(found[0], ActorStopped)
        with pytest.raises(ActorStopped):
            await anext(serving.map(rows(3)))


async def test_a_map_waits_while_the_breaker_is_open(ready: Any) -> None:
    async with fake_serving(ready) as (serving, model, actor):
        clock = Clock(actor)
        model.broken = True
        slept: list[float] = []
        async with serving.map(rows(40), concurrency=8, return_exceptions=True) as results:
            found = [await anext(results)]
            assert isinstance(found[0], RuntimeError)
            model.broken = False
            while (await serving.statistics()).breaker != "closed":
                clock.advance(1.1)
                await settle()
            found += [each async for each in results]
        assert not slept
        assert len(found) == 40
        assert sum(isinstance(each, dict) for each in found) >= 20


async def test_a_map_that_waits_for_the_breaker_is_not_refused(ready: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async with fake_serving(ready) as (serving, model, actor):
        clock = Clock(actor)
        model.broken = True
        async with anyio.create_task_group() as group:
            for number in range(2):
                group.start_soon(_failing, serving, number)
        assert (await serving.statistics()).breaker == "open"
        model.broken = False
        slept: list[float] = []

        async def sleep(seconds: float) -> None:
            slept.append(seconds)
            clock.advance(seconds)
            await checkpoint()

        monkeypatch.setattr(anyio, "sleep", sleep)
        assert len([each async for each in serving.map(rows(3))]) == 3
        assert slept == [1.0]
        assert (await serving.statistics()).rejected == 0


async def _failing(serving: Serving, number: int) -> None:
    with pytest.raises(RuntimeError, match="bad"):
        await serving.run(row(number))


async def test_a_map_stands_in_line_with_one_item(ready: Any) -> None:
    """Where its share of the queue is full, others are not behind all that a map could have in flight."""
    async with fake_serving(ready, batch_size=4, queue_size=8) as (serving, model, _):
        model.shut()
        taken = itertools.count()
        source = (row(next(taken)) for _ in range(1000))
        async with serving.map(source, concurrency=500) as results, anyio.create_task_group() as group:
            group.start_soon(_drained, results)
            await model.wait_calls(1)
            await settle(100)
            statistics = await serving.statistics()
            assert (statistics.waiting, statistics.waiting_for_room) == (6, 1)
            assert next(taken) < 20
            before = len(model.calls)
            group.start_soon(serving.run, row(-1, 1))
            await settle()
            while not any((x[:, 0] == -1).any() for x in model.calls):
                model.let()
                await checkpoint()
            assert len(model.calls) - before <= 4
            group.cancel_scope.cancel()


async def test_a_map_leaves_room_for_who_does_not_wait_for_it(ready: Any) -> None:
    """A source that always has more would keep the queue full for ever."""
    async with fake_serving(ready, batch_size=4, queue_size=8) as (serving, model, _):
        model.shut()
        taken = itertools.count()
        source = (row(next(taken)) for _ in range(1000))
        async with serving.map(source, concurrency=500) as results, anyio.create_task_group() as group:
            group.start_soon(_drained, results)
            await model.wait_calls(1)
            await settle(100)
            answers: list[Any] = []

            async def single(number: int) -> None:
                answers.append((number, await serving.run_nowait(row(number))))

            for number in (-1, -2):
                group.start_soon(single, number)
            await settle()
            assert (await serving.statistics()).waiting == 8
            with pytest.raises(Overloaded, match="no room for 1 more: 8 rows wait, and queue_size=8"):
                await serving.run_nowait(row(-3))
            while len(answers) < 2:
                model.let()
                await checkpoint()
            assert all(right(row(number), outputs) for number, outputs in answers)
            assert (await serving.statistics()).rejected == 1
            group.cancel_scope.cancel()


async def _drained(results: Any) -> None:
    async for _ in results:
        pass


async def test_a_source_that_fills_one_large_array_again(ready: Any) -> None:
    rows, lengths = 1200, 16
    large = np.zeros((rows, lengths), np.float32)
    assert large.nbytes > 1 << 16

    def source() -> Iterator[dict[str, np.ndarray]]:
        for number in range(5):
            large[:] = number
            yield {"x": large}

    async with fake_serving(ready, batch_size=2048, queue_size=10000) as (serving, _, _):
        found = [float(each["y"].mean()) async for each in serving.map(source(), copy=True)]
        assert found == [0, 2, 4, 6, 8]


async def test_two_readers_of_one_map_are_told(ready: Any) -> None:
    async with fake_serving(ready) as (serving, model, _), anyio.create_task_group() as group:
        model.shut()
        results = serving.map(rows(3))
        group.start_soon(anext, results)
        await model.wait_calls(1)
        with pytest.raises(MisuseError, match="two tasks"):
            await anext(results)
        model.open()


@pytest.mark.parametrize("source", [{"x": 1}, "text", 7], ids=lambda source: type(source).__name__)
async def test_what_is_no_source_is_refused(ready: Any, source: Any) -> None:
    async with fake_serving(ready) as (serving, _, _):
        with pytest.raises(TypeError, match=f"not a {type(source).__name__}"):
            serving.map(source)
        with pytest.raises(ValueError, match="concurrency=0"):
            serving.map([], concurrency=0)


@pytest.mark.parametrize("other", ["asyncio", "trio"])
async def test_a_map_of_another_loop_is_refused_and_hurts_nobody(ready: Any, other: str) -> None:
    """What a map is made of belongs to its loop: were it made, its end would be told to the wrong one."""

    async def elsewhere() -> None:
        with pytest.raises(MisuseError, match="event loop"):
            serving.map(rows(3))

    async with fake_serving(ready) as (serving, _, _):
        await anyio.to_thread.run_sync(lambda: anyio.run(elsewhere, backend=other))
        gc.collect()
        await settle()
        assert len([each async for each in serving.map(rows(3))]) == 3
