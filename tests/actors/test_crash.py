"""The failure rule: a crash of the actor's own code answers everyone, is restarted, and is loud when it does not stop."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import anyio
import pytest

from tests.actors.fakes import FakeActor, fake_model, own_threads
from transmuter_async.actors import RESTARTS
from transmuter_async.errors import ActorStopped
from transmuter_async.telemetry import Telemetry
from transmuter_async.testing import Recorder

pytestmark = pytest.mark.compiles_itself  # the fake compiler's events are no compiles of jax


class Crash(Exception):
    """Injected."""


class CrashingActor(FakeActor):
    """Raises at the k-th checkpoint from `arm` on, once, or at each."""

    countdown = -1
    always = False
    passed = 0

    def checkpoint(self) -> None:
        self.passed += 1
        if self.countdown > 0:
            self.countdown -= 1
            if self.countdown == 0:
                self.countdown = 1 if self.always else -1
                raise Crash(f"at checkpoint {self.passed}")


async def script(compiled: Any, answers: dict[int, Any]) -> None:
    """Calls that hit, miss, share, break into two programs and evict; several at once, with other messages between them."""

    async def one(x: int, keys: str) -> None:
        try:
            answers[x] = (await compiled.run({"x": x, "keys": keys}))["y"]
        except ActorStopped as error:
            answers[x] = error

    async def aside(x: int, message: Callable[[], Awaitable[Any]]) -> None:
        try:
            await message()
            answers[x] = 100 + x
        except ActorStopped as error:
            answers[x] = error

    async with anyio.create_task_group() as group:
        for x, keys in enumerate(["a", "a", "ab", "b", "c", "ab", "a"]):
            group.start_soon(one, x, keys)
        group.start_soon(aside, 7, lambda: compiled.warm([{"keys": "e"}, {"keys": "a"}]))
        group.start_soon(aside, 8, compiled.statistics)
    async with anyio.create_task_group() as group:
        group.start_soon(one, 9, "d")
        group.start_soon(aside, 10, compiled.clear_cache)
        group.start_soon(one, 11, "a")


@pytest.mark.parametrize("cold", [False, True], ids=["compile", "cold"])
async def test_a_crash_at_any_checkpoint_answers_everyone_and_is_restarted(
    cold: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    crashed = k = 0
    untouched = 0  # runs in a row that ended before their k-th checkpoint; how many there are depends on the threads
    while untouched < 5:
        k += 1
        async with fake_model(kind=CrashingActor, cache_size=2) as (compiled, compiler):
            compiler.cold = cold
            actor: Any = compiled._actor
            actor.countdown = k
            answers: dict[int, Any] = {}
            with anyio.fail_after(10):
                await script(compiled, answers)
                hit, actor.countdown = actor.countdown == -1, -1
                assert len(answers) == 12
                for x, answer in answers.items():
                    if isinstance(answer, ActorStopped):
                        # Who asks while it is being started again is told so; calls wait.
                        again = x in (7, 8, 10) and "is started again; ask once more" in str(answer)
                        assert again or isinstance(answer.__cause__, Crash)
                        assert again or "crashed: Crash: at checkpoint" in str(answer)
                    else:
                        assert answer == 100 + x
                assert await compiled.run({"x": 50}) == {"y": 150}  # a fresh call is answered
                crashed += hit
                untouched = 0 if hit else untouched + 1
                statistics = await compiled.statistics()
                assert statistics.restarts == hit
                assert statistics.peak_running == 1
    assert not own_threads()
    with capsys.disabled():
        print(f" [crashed at {crashed} checkpoints]", end="")
    assert crashed >= (15 if cold else 30)


async def test_a_crash_is_told_and_everything_compiles_again() -> None:
    bus = Telemetry()
    async with (
        Recorder(bus, "transmuter.actor", "transmuter.cache") as recorder,
        fake_model(kind=CrashingActor, telemetry=bus, specs={"keys": "a"}) as (compiled, compiler),
    ):
        await compiled.run({"x": 1})
        compiled._actor.crash(Crash("out of the blue"))
        assert await compiled.run({"x": 2}) == {"y": 102}  # waits for the restart
        assert compiler.compiles.came == [(0, "a"), (0, "a")]
        assert recorder.names() == [
            "transmuter.actor.started",
            "transmuter.actor.restarted",
            "transmuter.cache.miss",  # also of the signature given to compile: its program died, too
        ]
        (restarted,) = recorder.named("transmuter.actor.restarted")
        assert isinstance(restarted.metadata["reason"], Crash)
        assert restarted.metadata["actor"] == "fake"


async def answered(compiled: Any, answers: dict[int, Any], x: int) -> None:
    """Call, and note the result, or that the actor has stopped."""
    try:
        answers[x] = await compiled.run({"x": x})
    except ActorStopped as error:
        answers[x] = error


async def test_the_restart_waits_for_the_threads_of_before() -> None:
    async with fake_model(kind=CrashingActor) as (compiled, compiler):
        await compiled.run({"x": 0})
        compiler.computes.shut()
        answers: dict[int, Any] = {}
        one = partial(answered, compiled, answers)
        async with anyio.create_task_group() as group:
            group.start_soon(one, 1)
            await compiler.computes.wait_came(2)
            compiled._actor.crash(Crash("now"))
            await anyio.wait_all_tasks_blocked()
            assert isinstance(answers[1], ActorStopped)
            assert compiled.state == "restarting"
            group.start_soon(one, 2)
            await anyio.wait_all_tasks_blocked()
            assert compiler.computes.inside == 1
            compiler.computes.open()
        assert answers[2] == {"y": 102}
        assert compiler.computes.peak == 1


async def test_too_many_crashes_are_loud() -> None:
    bus = Telemetry()
    stopped: list[Exception] = []
    with pytest.raises(ExceptionGroup) as caught:
        async with (
            Recorder(bus, "transmuter.actor") as recorder,
            fake_model(kind=CrashingActor, telemetry=bus) as (compiled, _),
        ):
            actor: Any = compiled._actor
            actor.countdown, actor.always = 1, True
            try:
                while True:
                    try:
                        await compiled.run({"x": 1})
                    except ActorStopped as error:
                        stopped.append(error)
            finally:
                assert recorder.names().count("transmuter.actor.restarted") <= RESTARTS
    (error,) = caught.value.exceptions
    assert isinstance(error, ActorStopped)
    assert f"crashed {RESTARTS + 1} times within 30 s" in str(error)
    assert isinstance(error.__cause__, Crash)


async def test_stopping_in_the_middle_of_a_restart() -> None:
    async with fake_model(kind=CrashingActor) as (compiled, compiler):
        compiler.computes.shut()

        async def one() -> None:
            with pytest.raises(ActorStopped):
                await compiled.run({"x": 1})

        async with anyio.create_task_group() as group:
            group.start_soon(one)
            await compiler.computes.wait_came(1)
            compiled._actor.crash(Crash("now"))
            await anyio.wait_all_tasks_blocked()
            group.start_soon(compiled.aclose)
            await anyio.wait_all_tasks_blocked()
            with pytest.raises(ActorStopped):
                await compiled.run({"x": 2})
            compiler.computes.open()
        assert compiled.state == "stopped"


async def test_draining_in_the_middle_of_a_restart_answers_what_came_since() -> None:
    async with fake_model(kind=CrashingActor) as (compiled, compiler):
        compiler.computes.shut()
        answers: dict[int, Any] = {}
        one = partial(answered, compiled, answers)
        async with anyio.create_task_group() as group:
            group.start_soon(one, 1)
            await compiler.computes.wait_came(1)
            compiled._actor.crash(Crash("now"))
            group.start_soon(one, 2)
            await anyio.wait_all_tasks_blocked()
            assert compiled.state == "restarting"
            compiled._actor.stop(drain=True)
            await anyio.wait_all_tasks_blocked()
            assert compiler.computes.inside == 1  # nothing before the thread of before has ended
            compiler.computes.open()
        assert isinstance(answers[1], ActorStopped)
        assert answers[2] == {"y": 102}
        await compiled._actor.wait_stopped()
        assert compiled.state == "stopped"
