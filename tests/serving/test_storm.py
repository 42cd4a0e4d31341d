"""A thousand callers of whom three in ten leave at random: who stays gets its own result, and nothing is left behind."""

from __future__ import annotations

import gc
import random
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint

from tests.serving.fakes import BAD, fake_serving, prepared, right, row
from transmuter_async.errors import DeadlineExceeded


@pytest.fixture
def ready() -> Any:
    return prepared()


@pytest.mark.parametrize("concurrency", [1, 3])
async def test_storm(ready: Any, concurrency: int) -> None:
    rng = random.Random(29)
    async with fake_serving(ready, batch_size=8, max_concurrency=concurrency, queue_size=100) as (
        serving,
        model,
        actor,
    ):
        for _ in range(2):
            await storm(rng, serving, model, actor, concurrency)
        statistics = await serving.statistics()
        gone = statistics.answered + statistics.failed + statistics.cancelled + statistics.expired
        assert gone == statistics.requests
    gc.collect()  # an exception that nobody took would be told here


async def storm(rng: random.Random, serving: Any, model: Any, actor: Any, concurrency: int) -> None:
    answered: set[int] = set()
    failed: set[int] = set()
    left: set[int] = set()
    scopes: dict[int, anyio.CancelScope] = {}

    async def caller(number: int, inputs: Any, timeout: float | None) -> None:
        with anyio.CancelScope() as scopes[number]:
            try:
                outputs = await serving.run(inputs, timeout=timeout)
            except DeadlineExceeded:
                left.add(number)
            except RuntimeError:
                assert inputs["x"][0, 0] == BAD
                failed.add(number)
            else:
                assert right(inputs, outputs), number
                answered.add(number)
            return
        left.add(number)

    async def weather() -> None:
        """The model stops and goes on, and callers leave at every stage."""
        while len(answered) + len(failed) + len(left) < 1000:
            for number in list(scopes):
                if number in impatient and rng.random() < 0.4:
                    scopes[number].cancel()
            model.shut() if rng.random() < 0.3 else model.open()
            model.let(rng.randrange(3))
            await checkpoint()
        model.open()

    impatient = set(rng.sample(range(1000), 300))
    async with anyio.create_task_group() as group:
        group.start_soon(weather)
        for number in range(1000):
            value = BAD if rng.random() < 0.02 else 100 + number
            inputs = row(value, rng.randint(1, 16), rng.choice([1, 1, 1, 2, 3, 11]))
            group.start_soon(caller, number, inputs, 1e-3 if rng.random() < 0.01 else None)
            if number % 20 == 0:
                await checkpoint()
    assert answered | failed | left == set(range(1000))
    assert not answered & left
    assert len(left) > 150
    assert len(answered) > 600
    assert failed
    assert model.peak <= concurrency
    model.open()
    assert right(row(5), await serving.run(row(5)))
    scheduler = actor._scheduler
    assert scheduler is not None
    with anyio.fail_after(5):
        while scheduler.running:
            await checkpoint()
    assert (scheduler.unanswered, scheduler.waiting, scheduler.lined, scheduler._slots) == (0, 0, 0, 0)
    assert not scheduler._queues
