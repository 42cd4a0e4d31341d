"""Two thousand impatient callers: every survivor's result is its own, and nothing is left behind."""

from __future__ import annotations

import gc
import random

import anyio
import pytest

from tests.actors.fakes import fake_model, own_threads
from transmuter_async.errors import DeadlineExceeded

pytestmark = pytest.mark.compiles_itself  # the fake compiler's events are no compiles of jax


@pytest.mark.parametrize("cold", [False, True], ids=["compile", "cold"])
@pytest.mark.parametrize("limit", [1, 3])
async def test_storm(limit: int, cold: bool) -> None:
    rng = random.Random(17)
    answers: dict[int, int] = {}
    left: dict[int, str] = {}
    started: set[int] = set()
    async with fake_model(max_concurrency=limit, cache_size=2, compile_after=2) as (compiled, compiler):
        compiler.cold = cold

        async def caller(x: int, keys: str, patience: float, how: str) -> None:
            started.add(x)
            if how == "timeout":
                try:
                    answers[x] = (await compiled.run({"x": x, "keys": keys}, timeout=patience))["y"]
                except DeadlineExceeded:
                    left[x] = "deadline"
            else:
                with anyio.move_on_after(patience if how == "cancel" else 60) as scope:
                    answers[x] = (await compiled.run({"x": x, "keys": keys}))["y"]
                if scope.cancelled_caught:
                    left[x] = "cancelled"

        async def weather() -> None:
            """Gates open and shut, so that callers leave at every stage."""
            for _ in range(60):
                for gate in (compiler.compiles, compiler.computes):
                    gate.shut() if rng.random() < 0.4 else gate.open()
                    gate.let(rng.randrange(5))
                await anyio.lowlevel.checkpoint()
                await anyio.sleep(0.003)
            compiler.compiles.open()
            compiler.computes.open()

        async with anyio.create_task_group() as group:
            group.start_soon(weather)
            for x in range(2000):
                keys = "".join(rng.choices("abc", k=rng.randint(1, 3)))
                how = rng.choice(["timeout", "cancel", "cancel", "stay"])
                group.start_soon(caller, x, keys, rng.choice([0.0, 0.001, 0.01, 0.05, 0.2]), how)
                if x % 50 == 0:
                    await anyio.lowlevel.checkpoint()
        assert answers == {x: 100 + x for x in answers}
        assert answers.keys().isdisjoint(left)
        assert answers.keys() | left.keys() == set(range(2000))
        assert len(answers) > 300
        assert len(left) > 300
        assert compiler.computes.peak <= limit
        assert await compiled.run({"x": 5000}) == {"y": 5100}
        statistics = await compiled.statistics()
        # A caller may leave in the turn of the loop in which it is answered: then the actor has answered, to nobody.
        assert statistics.answered >= len(answers) + 1
        assert statistics.answered + statistics.abandoned + statistics.failed == statistics.calls == 2001
        assert (statistics.waiting, statistics.running) == (0, 0)
        actor = compiled._actor
        assert not actor._calls
        with anyio.fail_after(10):
            while actor._book.current:  # what cold calls wanted
                await anyio.lowlevel.checkpoint()
        assert not actor._asks
    gc.collect()  # an un-retrieved exception would be told here, and warnings are errors
    assert not own_threads()
