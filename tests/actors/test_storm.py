"""Two thousand impatient callers: every survivor's result is its own, and nothing is left behind.

No clock decides here: who leaves by cancellation is chosen by the test, and the weather changes each time that some caller
has ended, so that callers leave at every stage however fast the machine is.
"""

from __future__ import annotations

import gc
import random
from collections import Counter
from typing import Any

import anyio
import numpy as np
import pytest

import transmuter_async as tm
from tests.actors.fakes import FakeActor, fake_model, own_threads, quiet
from tests.test_runtime import affine, expected, rows
from transmuter_async.actors.calls import Call
from transmuter_async.errors import DeadlineExceeded

CALLERS = 2000


class SpiedActor(FakeActor):
    """Remembers at which stage callers left."""

    left_at: Counter[str]

    def abandon(self, call: Call, why: str) -> None:
        if call in self._calls:
            self.left_at[call.place] += 1
        super().abandon(call, why)


class Crowd:
    """Callers that end, one by one, by an answer, a cancellation or a deadline.

    Attributes:
        left: How callers ended that got no answer.
        scopes: Of the callers that can still be cancelled.
        timed: How many callers with a deadline have not ended.
    """

    def __init__(self) -> None:
        self.answers: dict[int, Any] = {}
        self.left: dict[int, str] = {}
        self.scopes: dict[int, anyio.CancelScope] = {}
        self.timed = 0
        self._ended = anyio.Event()

    async def call(self, x: int, how: str, work: Any) -> None:
        """`work(timeout)` as one caller."""
        try:
            if how == "stay":
                self.answers[x] = await work(None)
            elif how == "cancel":
                with anyio.CancelScope() as scope:
                    self.scopes[x] = scope
                    self.answers[x] = await work(None)
                if scope.cancelled_caught:
                    self.left[x] = "cancelled"
            else:
                self.timed += 1
                self.answers[x] = await work(float(how))
        except DeadlineExceeded:
            self.left[x] = "deadline"
        finally:
            self.timed -= how not in ("stay", "cancel")
            self.scopes.pop(x, None)
            self._ended.set()

    async def one_ended(self) -> None:
        """Wait until somebody has ended after this was called."""
        self._ended = anyio.Event()
        await self._ended.wait()

    def cancel_some(self, rng: random.Random, most: int) -> None:
        waiting = sorted(self.scopes)
        self.cancel(rng.sample(waiting, min(rng.randrange(most + 1), len(waiting))))

    def cancel(self, callers: list[int]) -> None:
        for x in callers:
            if x in self.scopes:
                self.scopes.pop(x).cancel()


@pytest.mark.compiles_itself  # the fake compiler's events are no compiles of jax
@pytest.mark.parametrize("cold", [False, True], ids=["compile", "cold"])
@pytest.mark.parametrize("limit", [1, 3])
async def test_storm(limit: int, cold: bool) -> None:
    rng = random.Random(17)
    crowd = Crowd()
    async with fake_model(kind=SpiedActor, max_concurrency=limit, cache_size=2, compile_after=2) as (
        compiled,
        compiler,
    ):
        compiler.cold = cold
        actor: Any = compiled._actor
        actor.left_at = Counter()
        compiler.compiles.shut()
        compiler.computes.shut()

        async def caller(x: int, keys: str, how: str) -> None:
            async def work(timeout: float | None) -> Any:
                return (await compiled.run({"x": x, "keys": keys}, timeout=timeout))["y"]

            await crowd.call(x, how, work)

        def running() -> list[int]:
            return [call.message.inputs["x"] for call in actor._calls if call.place == "running"]

        async def weather() -> None:
            """Gates open and shut, and callers are sent away, until all deadlines have passed."""
            if not cold:
                await compiler.compiles.wait_came(1)
                crowd.cancel([0])
            compiler.compiles.open()
            await compiler.computes.wait_came(1)
            crowd.cancel(running())
            while crowd.timed or crowd.scopes:
                for gate in (compiler.compiles, compiler.computes):
                    gate.shut() if rng.random() < 0.4 else gate.open()
                    gate.let(rng.randrange(5))
                crowd.cancel_some(rng, 3)
                if rng.random() < 0.5:
                    crowd.cancel(running())
                if crowd.timed:
                    await crowd.one_ended()  # at the latest by its deadline
                else:
                    await anyio.lowlevel.checkpoint()
            compiler.compiles.open()
            compiler.computes.open()

        async with anyio.create_task_group() as group:
            for x in range(CALLERS):
                keys = "".join(rng.choices("abc", k=rng.randint(1, 3)))
                how = rng.choice(["0", "0.001", "0.01", "0.05", "0.2", "cancel", "cancel", "cancel", "stay", "stay"])
                group.start_soon(caller, x, keys, how if x >= 20 else "cancel")  # some for each stage
                if x == 200:
                    await anyio.lowlevel.checkpoint()
                    group.start_soon(weather)
                elif x % 50 == 0:
                    await anyio.lowlevel.checkpoint()
        answers, left = crowd.answers, crowd.left
        assert answers == {x: 100 + x for x in answers}
        assert answers.keys().isdisjoint(left)
        assert answers.keys() | left.keys() == set(range(CALLERS))
        assert len(answers) > 300
        assert len(left) > 300
        # Cold calls do not wait for a compile.
        assert actor.left_at.keys() >= ({"waiting", "running"} if cold else {"waiting", "running", "compiling"})
        assert compiler.computes.peak <= limit
        assert await compiled.run({"x": 5000}) == {"y": 5100}
        statistics = await quiet(compiled)
        # A caller may leave in the turn of the loop in which it is answered: then the actor has answered, to nobody.
        assert statistics.answered >= len(answers) + 1
        assert statistics.answered + statistics.abandoned + statistics.failed == statistics.calls == CALLERS + 1
        assert statistics.waiting == 0
        assert not actor._calls
        with anyio.fail_after(10):
            while actor._book.current:  # what cold calls wanted
                await anyio.lowlevel.checkpoint()
        assert not actor._asks
    gc.collect()  # an un-retrieved exception would be told here, and warnings are errors
    assert not own_threads()


def check(answers: dict[int, np.ndarray]) -> None:
    """Every answer is that of its own rows."""
    for x, answer in answers.items():
        np.testing.assert_allclose(answer, expected(rows(1 + x % 5) + np.float32(x)), rtol=1e-4, atol=1e-4)


async def test_a_storm_on_real_programs() -> None:
    rng = random.Random(5)
    crowd = Crowd()
    async with tm.Runtime() as runtime:
        compiled = await runtime.compile(affine(), cache_size=2, max_concurrency=2)

        async def caller(x: int, how: str) -> None:
            async def work(timeout: float | None) -> Any:
                inputs = rows(1 + x % 5) + np.float32(x)
                return (await compiled.run({"x": inputs}, timeout=timeout))["y"]

            await crowd.call(x, how, work)

        async with anyio.create_task_group() as group:
            for x in range(CALLERS):
                group.start_soon(caller, x, rng.choice(["0.002", "0.02", "cancel", "cancel", "stay"]))
                if x % 20 == 0:
                    crowd.cancel_some(rng, 12)
                    await anyio.lowlevel.checkpoint()
            while crowd.scopes:
                crowd.cancel_some(rng, 12)
                await anyio.lowlevel.checkpoint()
        await anyio.to_thread.run_sync(check, crowd.answers)
        assert crowd.answers.keys() | crowd.left.keys() == set(range(CALLERS))
        assert len(crowd.answers) > 300
        assert len(crowd.left) > 300
        np.testing.assert_allclose((await compiled.run({"x": rows(2)}))["y"], expected(rows(2)), rtol=1e-5, atol=1e-6)
        assert (await compiled.statistics()).peak_running <= 2
    gc.collect()
    assert not own_threads()
