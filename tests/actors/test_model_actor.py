"""The model actor over a compiler that the test holds: sharing, order, cancellation, deadlines, failure."""

from __future__ import annotations

import math
import threading

import anyio
import pytest

from tests.actors.fakes import fake_model, own_threads
from transmuter_async.actors import Compiled, ThreadReply, compiles
from transmuter_async.errors import ActorStopped, DeadlineExceeded, InputError, MisuseError, Overloaded
from transmuter_async.telemetry import Telemetry
from transmuter_async.testing import Recorder

pytestmark = pytest.mark.compiles_itself  # the fake compiler's events are no compiles of jax


async def ask(compiled: Compiled, answers: dict[int, object], x: int, keys: str = "a", **options: object) -> None:
    """Call, and keep the answer or the error under `x`."""
    try:
        answers[x] = (await compiled.run({"x": x, "keys": keys}, **options))["y"]  # type: ignore[arg-type]
    except Exception as error:
        answers[x] = error


async def test_a_call_is_answered() -> None:
    async with fake_model() as (compiled, compiler):
        assert await compiled.run({"x": 1}) == {"y": 101}
        assert await compiled.run({"x": 2, "keys": "abc"}) == {"y": 102}
        assert compiler.compiles.came == [(0, "a"), (1, "b"), (2, "c")]
        assert compiled.name == "fake"
        assert compiled.state == "running"
        assert repr(compiled) == "<Compiled 'fake' running>"


async def test_two_askers_share_one_compile() -> None:
    async with fake_model() as (compiled, compiler):
        compiler.compiles.shut()
        answers: dict[int, object] = {}
        async with anyio.create_task_group() as group:
            for x in range(5):
                group.start_soon(ask, compiled, answers, x)
            await compiler.compiles.wait_came(1)
            await anyio.wait_all_tasks_blocked()
            statistics = await compiled.statistics()
            assert statistics.waiting + statistics.running == 5
            compiler.compiles.open()
        assert answers == {x: 100 + x for x in range(5)}
        assert compiler.compiles.came == [(0, "a")]


async def test_a_cached_call_does_not_wait_for_another_compile() -> None:
    async with fake_model() as (compiled, compiler):
        await compiled.run({"x": 0})
        compiler.compiles.shut()
        answers: dict[int, object] = {}
        async with anyio.create_task_group() as group:
            group.start_soon(ask, compiled, answers, 1, "b")
            await compiler.compiles.wait_came(2)
            with anyio.fail_after(5):
                for x in range(2, 12):
                    assert await compiled.run({"x": x}) == {"y": 100 + x}
            assert answers == {}
            compiler.compiles.open()
        assert answers == {1: 101}


async def test_a_cancelled_queued_call_is_never_computed() -> None:
    async with fake_model() as (compiled, compiler):
        await compiled.run({"x": 0})
        compiler.computes.shut()
        answers: dict[int, object] = {}
        scope = anyio.CancelScope()

        async def cancelled() -> None:
            with scope:
                await compiled.run({"x": 7})

        async with anyio.create_task_group() as group:
            group.start_soon(ask, compiled, answers, 1)
            await compiler.computes.wait_came(2)
            group.start_soon(cancelled)
            group.start_soon(ask, compiled, answers, 2)
            await anyio.wait_all_tasks_blocked()
            scope.cancel()
            await anyio.wait_all_tasks_blocked()
            assert scope.cancelled_caught
            compiler.computes.open()
        assert answers == {1: 101, 2: 102}
        assert [x for _, x in compiler.computes.came] == [0, 1, 2]
        assert (await compiled.statistics()).abandoned == 1


async def test_a_slot_is_held_until_the_thread_is_done() -> None:
    async with fake_model() as (compiled, compiler):
        await compiled.run({"x": 0})
        compiler.computes.shut()
        answers: dict[int, object] = {}
        async with anyio.create_task_group() as group:
            with anyio.move_on_after(0.01):
                await compiled.run({"x": 1})
            group.start_soon(ask, compiled, answers, 2)
            await anyio.wait_all_tasks_blocked()
            assert [x for _, x in compiler.computes.came] == [0, 1]  # 2 waits for the slot that 1 still holds
            compiler.computes.open()
        assert answers == {2: 102}


async def test_a_running_call_whose_caller_left_takes_no_further_step() -> None:
    async with fake_model() as (compiled, compiler):
        await compiled.run({"x": 0, "keys": "abc"})
        compiler.computes.shut()
        with anyio.move_on_after(0.01):
            await compiled.run({"x": 1, "keys": "abc"})
        compiler.computes.open()
        await compiled.run({"x": 2})
        assert [came for came in compiler.computes.came if came[1] == 1] == [(0, 1)]


@pytest.mark.parametrize("limit", [1, 3])
async def test_computations_never_exceed_the_limit_whoever_leaves(limit: int) -> None:
    async with fake_model(max_concurrency=limit) as (compiled, compiler):
        await compiled.run({"x": 0})
        compiler.computes.shut()

        async def impatient(x: int) -> None:
            with pytest.raises(DeadlineExceeded):
                await compiled.run({"x": x}, timeout=0.005)

        answers: dict[int, object] = {}
        async with anyio.create_task_group() as patient:
            for x in range(100, 100 + limit):
                patient.start_soon(ask, compiled, answers, x)
            await compiler.computes.wait_came(1 + limit)
            async with anyio.create_task_group() as group:
                for x in range(50):
                    group.start_soon(impatient, x)
            assert compiler.computes.inside == limit
            compiler.computes.open()
        assert len(answers) == limit
        assert await compiled.run({"x": 99}) == {"y": 199}
        statistics = await compiled.statistics()
        assert compiler.computes.peak == limit
        assert statistics.peak_running == limit
        assert statistics.abandoned == 50
        assert len(compiler.computes.came) == limit + 2


async def test_computations_that_were_left_while_running_count_until_they_end() -> None:
    async with fake_model(max_concurrency=2) as (compiled, compiler):
        await compiled.run({"x": 0})
        compiler.computes.shut()
        for x in range(1, 21):
            with anyio.move_on_after(0.005):
                await compiled.run({"x": x})
        assert compiler.computes.inside == 2
        assert len([thread for thread in threading.enumerate() if thread.name.startswith("fake-run")]) == 2
        compiler.computes.open()
        assert await compiled.run({"x": 99}) == {"y": 199}
        assert compiler.computes.peak == 2


async def test_the_cache_is_touched_by_the_run_thread_only() -> None:
    async with fake_model(cache_size=2) as (compiled, _):
        for keys in "abcab":
            await compiled.run({"x": 1, "keys": keys})
        await compiled.statistics()
        await compiled.clear_cache()
        cache = compiled._actor._cache
        assert len(cache.threads) == 1  # type: ignore[attr-defined]
        assert cache.threads.pop().startswith("fake-run")  # type: ignore[attr-defined]


async def test_a_failed_compile_answers_all_is_not_cached_and_soon_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async with fake_model() as (compiled, compiler):
        compiler.compiles.shut()
        compiler.failing["a"] = ValueError("XLA says no")
        answers: dict[int, object] = {}
        async with anyio.create_task_group() as group:
            for x in range(4):
                group.start_soon(ask, compiled, answers, x)
            await compiler.compiles.wait_came(1)
            await anyio.wait_all_tasks_blocked()
            compiler.compiles.open()
        errors = list(answers.values())
        assert [str(error) for error in errors] == ["XLA says no"] * 4
        assert all(type(error) is ValueError for error in errors)
        assert len({id(error) for error in errors}) == 4  # one object would collect four tracebacks
        with pytest.raises(ValueError, match="XLA says no"):
            await compiled.run({"x": 5})
        assert compiler.compiles.came == [(0, "a")]  # within a second it is not tried again
        monkeypatch.setattr(compiles, "RETRY", 0)
        del compiler.failing["a"]
        assert await compiled.run({"x": 6}) == {"y": 106}
        assert compiler.compiles.came == [(0, "a")] * 2
        statistics = await compiled.statistics()
        assert (statistics.compile_failures, statistics.compiles, statistics.failed) == (1, 1, 5)


async def test_a_compile_that_nobody_waits_for_any_more_is_not_started() -> None:
    async with fake_model() as (compiled, compiler):
        compiler.compiles.shut()
        answers: dict[int, object] = {}
        async with anyio.create_task_group() as group:
            group.start_soon(ask, compiled, answers, 1, "a")
            await compiler.compiles.wait_came(1)
            with anyio.move_on_after(0.02):
                await compiled.run({"x": 2, "keys": "b"})
            compiler.compiles.open()
        await compiled.run({"x": 3, "keys": "c"})
        assert compiler.compiles.came == [(0, "a"), (0, "c")]


async def test_a_compile_whose_caller_left_is_finished_and_kept() -> None:
    async with fake_model() as (compiled, compiler):
        compiler.compiles.shut()
        with anyio.move_on_after(0.02):
            await compiled.run({"x": 1})
        compiler.compiles.open()
        assert await compiled.run({"x": 2}) == {"y": 102}
        assert compiler.compiles.came == [(0, "a")]


async def test_an_error_of_the_graph_goes_to_its_asker_only() -> None:
    async with fake_model() as (compiled, _):
        with pytest.raises(ValueError, match="refuses 3"):
            await compiled.run({"x": 3, "fails": True})
        assert await compiled.run({"x": 4}) == {"y": 104}
        with pytest.raises(InputError, match="'x' is missing"):
            await compiled.run({})


@pytest.mark.parametrize("where", ["queue", "compile", "compute"])
async def test_a_deadline_is_kept_everywhere_and_says_where_the_time_went(where: str) -> None:
    async with fake_model() as (compiled, compiler):
        await compiled.run({"x": 0})
        gate = compiler.compiles if where == "compile" else compiler.computes
        gate.shut()
        answers: dict[int, object] = {}
        async with anyio.create_task_group() as group:
            if where == "queue":
                group.start_soon(ask, compiled, answers, 1)
                await compiler.computes.wait_came(2)
            with pytest.raises(DeadlineExceeded) as caught:  # nothing else can end it: the gate is shut
                await compiled.run({"x": 2, "keys": "b" if where == "compile" else "a"}, timeout=0.03)
            words = {"queue": "still in the queue", "compile": "being compiled", "compute": "being computed"}
            assert words[where] in str(caught.value)
            assert isinstance(caught.value, TimeoutError)
            gate.open()
        assert await compiled.run({"x": 3}) == {"y": 103}


async def test_an_expired_call_is_not_computed() -> None:
    async with fake_model() as (compiled, compiler):
        await compiled.run({"x": 0})
        with pytest.raises(DeadlineExceeded):
            await compiled.run({"x": 1}, timeout=0.0)
        await compiled.run({"x": 2})
        assert [x for _, x in compiler.computes.came] == [0, 2]


async def test_a_full_mailbox_refuses_who_will_not_wait() -> None:
    bus = Telemetry()
    async with fake_model(mailbox=2, telemetry=bus) as (compiled, compiler), Recorder(bus) as recorder:
        compiler.computes.shut()
        answers: dict[int, object] = {}
        async with anyio.create_task_group() as group:
            for x in range(4):
                group.start_soon(ask, compiled, answers, x)
            await compiler.computes.wait_came(1)
            await anyio.wait_all_tasks_blocked()
            with pytest.raises(Overloaded, match="3 calls wait and 1 run"):
                await compiled.run_nowait({"x": 9})
            (event,) = recorder.named("transmuter.queue.rejected")
            assert event.metadata["why"] == "overloaded"
            compiler.computes.open()
        assert answers == {x: 100 + x for x in range(4)}
        assert await compiled.run_nowait({"x": 9}) == {"y": 109}
        assert (await compiled.statistics()).rejected == 1


@pytest.mark.parametrize("where", ["compile", "compute"])
async def test_aclose_answers_everyone_at_once_and_returns_when_the_thread_is_done(where: str) -> None:
    async with fake_model() as (compiled, compiler):
        await compiled.run({"x": 0})
        gate = compiler.compiles if where == "compile" else compiler.computes
        gate.shut()
        answers: dict[int, object] = {}
        closed = anyio.Event()

        async def close() -> None:
            await compiled.aclose()
            closed.set()

        async with anyio.create_task_group() as group:
            for x in range(5):
                group.start_soon(ask, compiled, answers, x, "b" if where == "compile" else "a")
            await gate.wait_came(2)
            await anyio.wait_all_tasks_blocked()
            group.start_soon(close)
            await anyio.wait_all_tasks_blocked()
            assert len(answers) == 5  # while the gate is still shut
            assert all(isinstance(answer, ActorStopped) for answer in answers.values())
            with pytest.raises(ActorStopped, match="was closed"):
                await compiled.run({"x": 6})
            with pytest.raises(ActorStopped):
                await compiled.statistics()
            assert not closed.is_set()
            gate.open()
        assert closed.is_set()
        assert compiled.state == "stopped"
        assert compiler.released == 1
        await compiled.aclose()
    assert not own_threads()


async def test_a_drain_finishes_what_was_accepted() -> None:
    async with fake_model() as (compiled, compiler):
        compiler.computes.shut()
        answers: dict[int, object] = {}
        async with anyio.create_task_group() as group:
            for x in range(3):
                group.start_soon(ask, compiled, answers, x, "ab")
            await compiler.computes.wait_came(1)
            await anyio.wait_all_tasks_blocked()
            compiled._actor.stop(drain=True)
            with pytest.raises(ActorStopped):
                await compiled.run({"x": 9})
            compiler.computes.open()
        assert answers == {0: 100, 1: 101, 2: 102}
        await compiled.aclose()


async def test_closing_while_draining_ends_the_patience() -> None:
    async with fake_model() as (compiled, compiler):
        compiler.computes.shut()
        answers: dict[int, object] = {}
        async with anyio.create_task_group() as group:
            group.start_soon(ask, compiled, answers, 1)
            await compiler.computes.wait_came(1)
            compiled._actor.stop(drain=True)
            compiled._actor.stop()
            await anyio.wait_all_tasks_blocked()
            assert isinstance(answers[1], ActorStopped)
            compiler.computes.open()


async def test_the_signature_given_to_compile_is_kept() -> None:
    bus = Telemetry()
    async with fake_model(specs={"keys": "a"}, cache_size=1, telemetry=bus) as (compiled, compiler):
        assert compiler.compiles.came == [(0, "a")]
        async with Recorder(bus) as recorder:
            for keys in "bca":
                await compiled.run({"x": 1, "keys": keys})
            assert compiler.compiles.came == [(0, "a"), (0, "b"), (0, "c")]
            recorder.clear()
            await compiled.run({"x": 1, "keys": "a"})
            assert recorder.names() == ["transmuter.call.start", "transmuter.call.stop"]
        statistics = await compiled.statistics()
        assert (statistics.evictions, statistics.misses, statistics.hits) == (1, 2, 0)


async def test_warm_compiles_several_at_once_and_what_is_cached_costs_nothing() -> None:
    async with fake_model() as (compiled, compiler):
        compiler.compiles.shut()
        async with anyio.create_task_group() as group:
            group.start_soon(compiled.warm, [{"keys": "a"}, {"keys": "b"}, {"keys": "a"}])
            cores = compiled._actor._compile_threads.limit  # type: ignore[union-attr]
            await compiler.compiles.wait_came(min(2, cores))
            compiler.compiles.open()
        assert sorted(compiler.compiles.came) == [(0, "a"), (0, "b")]
        await compiled.warm({"keys": "b"})
        assert await compiled.run({"x": 1, "keys": "b"}) == {"y": 101}
        assert len(compiler.compiles.came) == 2
        compiler.failing["z"] = ValueError("no")
        with pytest.raises(ValueError, match="no"):
            await compiled.warm({"keys": "z"})


async def test_calls_come_before_what_nobody_waits_for() -> None:
    async with fake_model() as (compiled, compiler):
        compiler.compiles.shut()
        compiled._actor._compile_threads.limit = 1  # type: ignore[union-attr]
        answers: dict[int, object] = {}
        async with anyio.create_task_group() as group:
            group.start_soon(compiled.warm, [{"keys": "a"}, {"keys": "b"}])
            await compiler.compiles.wait_came(1)
            group.start_soon(ask, compiled, answers, 1, "c")
            await anyio.wait_all_tasks_blocked()
            await compiled.statistics()  # passes through the run thread, behind the call's miss
            compiler.compiles.open()
        first = compiler.compiles.came[0]
        assert compiler.compiles.came == [first, (0, "c"), *({(0, "a"), (0, "b")} - {first})]


async def test_a_thread_may_call_and_the_loop_may_not() -> None:
    async with fake_model() as (compiled, compiler):
        assert await anyio.to_thread.run_sync(lambda: compiled.call_from_thread({"x": 5})) == {"y": 105}
        with pytest.raises(MisuseError, match="would block the event loop"):
            compiled.call_from_thread({"x": 5})

        def expect(error: type[Exception], **options: object) -> str:
            with pytest.raises(error) as caught:
                compiled.call_from_thread({"x": 6}, **options)  # type: ignore[arg-type]
            return str(caught.value)

        compiler.computes.shut()
        assert "being computed" in await anyio.to_thread.run_sync(lambda: expect(DeadlineExceeded, timeout=0.02))
        compiler.computes.open()
        assert "wait for itself" in await compiled._actor._run_threads.run(expect, MisuseError)  # type: ignore[union-attr]
        await compiled.aclose()
        assert "was closed" in await anyio.to_thread.run_sync(lambda: expect(ActorStopped))


@pytest.mark.parametrize("timeout", [math.inf, 1e12, 10])
async def test_a_timeout_may_be_as_long_as_one_likes(timeout: float) -> None:
    async with fake_model() as (compiled, _):
        assert await compiled.run({"x": 1}, timeout=timeout) == {"y": 101}
        assert await anyio.to_thread.run_sync(lambda: compiled.call_from_thread({"x": 2}, timeout=timeout)) == {
            "y": 102
        }


def test_a_thread_does_not_wait_for_a_loop_that_has_ended() -> None:
    reply: ThreadReply[int] = ThreadReply()
    assert not reply.wait_while(lambda: False, None)
    assert not reply.wait_while(lambda: True, 0.01)
    reply.settle(1, None)
    assert reply.wait_while(lambda: False, 0.0)
    assert reply.take() == 1


async def test_another_loop_is_refused() -> None:
    async with fake_model() as (compiled, _):

        async def elsewhere() -> None:
            for call in (compiled.run({"x": 1}), compiled.statistics(), compiled.aclose()):
                with pytest.raises(MisuseError, match=r"belongs to the (asyncio|trio) event loop"):
                    await call

        await anyio.to_thread.run_sync(lambda: anyio.run(elsewhere))
        assert await compiled.run({"x": 1}) == {"y": 101}


async def test_inputs_are_taken_over_when_run_is_called() -> None:
    async with fake_model() as (compiled, _):
        inputs = {"x": 1}
        call = compiled.run(inputs)
        inputs["x"] = 2
        assert await call == {"y": 101}


async def test_statistics_add_up() -> None:
    async with fake_model(cache_size=1) as (compiled, _):
        for keys in "aabba":
            await compiled.run({"x": 1, "keys": keys})
        statistics = await compiled.statistics()
        assert (statistics.calls, statistics.answered) == (5, 5)
        assert (statistics.hits, statistics.misses, statistics.evictions) == (2, 3, 2)
        assert statistics.compiles == 3
        assert statistics.compile_time > 0
        assert statistics.weight_bytes == 64
        assert (statistics.waiting, statistics.running, statistics.restarts) == (0, 0, 0)
