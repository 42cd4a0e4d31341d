"""What calls that share, wait, fail or leave tell: each exactly as often as the contract says, and every span ends."""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import anyio.lowlevel
import numpy as np
import pytest

import transmuter_async as tm
from tests.actors.fakes import FakeJob, fake_model
from tests.compiler.support import graph, node, proto
from tests.test_runtime import affine, breaking, rows
from transmuter_async.actors import RESTARTS, WINDOW, actor
from transmuter_async.actors.events import Abandoned
from transmuter_async.compiler import SegmentCache
from transmuter_async.errors import ActorStopped, DeadlineExceeded, Overloaded
from transmuter_async.telemetry import Telemetry
from transmuter_async.testing import HeldCompiler, Recorder

fakes = pytest.mark.compiles_itself  # the fake compiler's events are no compiles of jax


def forked() -> bytes:
    """y = tanh(x, x) where x sums to more than 0, else tanh(x): branches of different shapes run on the host, as segments."""
    twice = graph([node("Concat", ["x", "x"], ["xx"], axis=0), node("Tanh", ["xx"], ["t"])], [], ["t:float[...]"])
    once = graph([node("Tanh", ["x"], ["e"])], [], ["e:float[...]"])
    nodes = [
        node("ReduceSum", ["x"], ["total"], keepdims=0),
        node("Greater", ["total", "zero"], ["positive"]),
        node("If", ["positive"], ["y"], name="fork", then_branch=twice, else_branch=once),
    ]
    return proto(nodes, ["x:float[n]"], ["y:float[k]"], {"zero": np.float32(0)}).SerializeToString()


def ended_spans(recorder: Recorder) -> Counter[str]:
    """How often each span ended, and how; fails when one did not, or ended twice."""
    spans: dict[int, str] = {}
    found: Counter[str] = Counter()
    for event in recorder.events:
        base, _, part = event.name.rpartition(".")
        if part == "start":
            assert event.metadata["span"] not in spans
            spans[event.metadata["span"]] = base
        elif part in ("stop", "exception"):
            assert spans.pop(event.metadata["span"]) == base
            found[event.name.removeprefix("transmuter.")] += 1
    assert spans == {}
    return found


# -- one compile, many callers ----------------------------------------------------------------------------------------


@fakes
async def test_each_of_many_first_callers_tells_its_own_miss_of_the_one_compile() -> None:
    bus = Telemetry()
    async with fake_model(telemetry=bus) as (compiled, compiler), Recorder(bus) as recorder:
        compiler.compiles.shut()
        async with anyio.create_task_group() as group:
            for x in range(5):
                group.start_soon(compiled.run, {"x": x})
            with anyio.fail_after(10):
                while len(recorder.named("transmuter.cache.miss")) < 5:
                    await anyio.lowlevel.checkpoint()
            compiler.compiles.open()
        assert Counter(recorder.names()) == {
            "transmuter.call.start": 5,
            "transmuter.cache.miss": 5,
            "transmuter.segment.compile.start": 1,
            "transmuter.segment.compile.stop": 1,
            "transmuter.call.stop": 5,
        }
        calls = [event.metadata["span"] for event in recorder.named("transmuter.call.start")]
        assert [event.metadata["call"] for event in recorder.named("transmuter.cache.miss")] == calls
        (span,) = recorder.named("transmuter.segment.compile.start")
        assert (span.metadata["call"], span.metadata["parent"]) == (calls[0], calls[0])  # of whom it was started for
        assert all(event.measurements["compiling"] > 0 for event in recorder.named("transmuter.call.stop"))
        statistics = await compiled.statistics()
        assert (statistics.misses, statistics.hits, statistics.compiles) == (5, 0, 1)


async def test_every_call_tells_one_hit_or_one_miss_for_a_segment() -> None:
    async with tm.Runtime() as runtime, Recorder(runtime.telemetry) as recorder:
        compiled = await runtime.compile(affine(), cache_size=2, max_concurrency=2)
        async with anyio.create_task_group() as group:
            for number in range(60):
                group.start_soon(compiled.run, {"x": rows(1 + number % 3)})
        found = Counter(
            event.metadata["call"]
            for event in recorder.events
            if event.name in ("transmuter.cache.hit", "transmuter.cache.miss")
        )
        assert found == dict.fromkeys((e.metadata["span"] for e in recorder.named("transmuter.call.start")), 1)
        assert ended_spans(recorder)["call.stop"] == 60


# -- calls that are not computed --------------------------------------------------------------------------------------


@fakes
async def test_a_call_that_is_refused_or_leaves_while_it_waits_is_told_with_its_call() -> None:
    bus = Telemetry()
    async with fake_model(telemetry=bus, mailbox=1) as (compiled, compiler):
        await compiled.run({"x": 0})
        async with Recorder(bus) as recorder:
            starts: set[int] = set()

            def told() -> list[str]:
                found = []
                starts.update(event.metadata["span"] for event in recorder.named("transmuter.call.start"))
                for event in recorder.named("transmuter.queue.rejected"):
                    assert event.metadata["call"] in starts
                    found.append(event.metadata["why"])
                recorder.clear()
                return found

            compiler.compiles.shut()
            with pytest.raises(DeadlineExceeded):
                await compiled.run({"x": 1, "keys": "b"}, timeout=0.01)  # while it is being compiled
            assert told() == ["deadline"]
            compiler.compiles.open()
            compiler.computes.shut()
            async with anyio.create_task_group() as running:
                running.start_soon(compiled.run, {"x": 2})
                await compiler.computes.wait_came(2)
                async with anyio.create_task_group() as waiting:
                    waiting.start_soon(compiled.run, {"x": 3})
                    await anyio.wait_all_tasks_blocked()
                    with pytest.raises(Overloaded):
                        await compiled.run_nowait({"x": 4})
                    assert told() == ["overloaded"]
                    waiting.cancel_scope.cancel()
                assert told() == ["cancelled"]
                running.cancel_scope.cancel()
            assert told() == []  # it was being computed
            compiler.computes.open()


@fakes
async def test_a_deadline_that_the_thread_sees_first_is_told_too() -> None:
    bus = Telemetry()
    async with fake_model(telemetry=bus) as (compiled, _), Recorder(bus) as recorder:
        reply: Any = None
        span = bus.span("transmuter.call", {}).start()
        done = threading.Event()

        class Reply:
            done = False

            def settle(self, value: Any, error: BaseException | None) -> None:
                nonlocal reply
                reply = error
                done.set()

        call = compiled._call({"x": 1, "keys": "a"}, Reply(), span, False, None, -1.0)  # nobody's timer runs
        compiled._actor.submit(call)
        await anyio.to_thread.run_sync(done.wait)
        assert isinstance(reply, DeadlineExceeded)
        assert "still in the queue" in str(reply)
        (event,) = recorder.named("transmuter.queue.rejected")
        assert (event.metadata["why"], event.metadata["call"]) == ("deadline", span.id)
        span.stop()


# -- breaks that are left ---------------------------------------------------------------------------------------------


async def test_a_compile_inside_of_a_break_is_inside_of_its_span() -> None:
    async with tm.Runtime() as runtime, Recorder(runtime.telemetry) as recorder:
        compiled = await runtime.compile(forked(), min_segment_nodes=1)
        x = np.array([1, 2], np.float32)
        np.testing.assert_allclose((await compiled.run({"x": x}))["y"], np.tanh([1, 2, 1, 2]), rtol=1e-6)
        (fork,) = recorder.named("transmuter.break.start")
        inner = recorder.named("transmuter.segment.compile.start")[-1]
        miss = recorder.named("transmuter.cache.miss")[-1]
        assert inner.metadata["parent"] == miss.metadata["parent"] == fork.metadata["span"]
        assert fork.metadata["parent"] == fork.metadata["call"] == inner.metadata["call"]
        assert ended_spans(recorder)["break.stop"] == 1


@pytest.mark.parametrize("how", ["cancelled", "deadline", "closed", "crashed", "failed"])
async def test_a_break_ends_with_its_call(how: str) -> None:
    async with tm.Runtime() as runtime, Recorder(runtime.telemetry) as recorder:
        compiled = await runtime.compile(forked(), min_segment_nodes=1)
        await compiled.run({"x": np.array([-1, -2], np.float32)})  # the first segment, and the other branch
        recorder.clear()
        inputs = {"x": np.array([1, 2], np.float32)}
        with HeldCompiler(compiled) as held:
            async with anyio.create_task_group() as group:
                errors: list[Exception] = []

                async def call() -> None:
                    try:
                        await compiled.run(inputs, timeout=0.02 if how == "deadline" else None)
                    except Exception as error:
                        errors.append(error)

                group.start_soon(call)
                await held.wait_started()
                if how == "cancelled":
                    group.cancel_scope.cancel()
                elif how == "deadline":
                    with anyio.fail_after(10):
                        while not errors:
                            await anyio.lowlevel.checkpoint()
                elif how == "closed":
                    compiled._actor.stop()
                elif how == "crashed":
                    compiled._actor.crash(RuntimeError("injected"))
                else:
                    held.fail(ValueError("no"))
                held.release()
            await held.wait_finished()
        (broken,) = recorder.named("transmuter.break.exception")
        assert broken.metadata["kind"] == "cancelled"
        assert isinstance(broken.metadata["reason"], Abandoned)
        assert broken.metadata["op_type"] == "If"
        assert ended_spans(recorder)["call.exception"] == 1


async def test_a_break_that_is_left_while_it_runs_is_cancelled_and_not_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    async with tm.Runtime() as runtime:
        compiled = await runtime.compile(forked(), min_segment_nodes=1)
        x = np.array([1, 2], np.float32)
        await compiled.run({"x": x})
        reached, go_on = threading.Event(), threading.Event()
        async with Recorder(runtime.telemetry) as recorder:
            find = SegmentCache.find

            def held(self: SegmentCache, place: Any, values: Any) -> Any:
                if len(place) > 1:  # in the branch
                    reached.set()
                    assert go_on.wait(10)
                return find(self, place, values)

            monkeypatch.setattr(SegmentCache, "find", held)
            async with anyio.create_task_group() as group:
                group.start_soon(compiled.run, {"x": x})
                await anyio.to_thread.run_sync(reached.wait)
                group.cancel_scope.cancel()
            go_on.set()
            await compiled.statistics()
            (broken,) = recorder.named("transmuter.break.exception")
            assert broken.metadata["kind"] == "cancelled"
            assert "the caller has left" in str(broken.metadata["reason"])
            assert ended_spans(recorder) == {"break.exception": 1, "call.exception": 1}


# -- what is built for nobody -----------------------------------------------------------------------------------------


async def test_breaks_build_nothing_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    span = Telemetry.span

    def noted(self: Telemetry, name: str, *arguments: Any, **options: Any) -> Any:
        made.append(name)
        return span(self, name, *arguments, **options)

    async with tm.Runtime() as runtime, runtime.telemetry.subscribe("transmuter.cache.hit") as elsewhere:
        compiled = await runtime.compile(breaking())
        x = np.array([1, -2], np.float32)
        await compiled.run({"x": x})
        monkeypatch.setattr(Telemetry, "span", noted)
        await compiled.run({"x": x})
        assert made == ["transmuter.call"]  # its number ties together what is told of the call
        assert (await elsewhere.receive()).metadata["call"] > 0
        async with runtime.telemetry.subscribe("transmuter.break.exception"):
            await compiled.run({"x": x})
        assert made[1:] == ["transmuter.call", "transmuter.break"]


def test_a_span_is_traced_where_any_of_its_events_is_wanted() -> None:
    bus = Telemetry()

    async def main() -> None:
        assert not bus.traces("transmuter.break.*")
        for prefix in ("transmuter", "transmuter.break", "transmuter.break.stop", "transmuter.break.exception", ""):
            async with bus.subscribe(prefix):
                assert bus.traces("transmuter.break.*")
        for prefix in ("transmuter.break.st", "transmuter.cache", "transmuter.breaks"):
            async with bus.subscribe(prefix):
                assert not bus.traces("transmuter.break.*")

    anyio.run(main)


# -- files and ends ---------------------------------------------------------------------------------------------------


async def test_what_the_disk_cache_tells_carries_the_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "programs"
    async with tm.Runtime() as runtime, Recorder(runtime.telemetry) as recorder:
        compiled = await runtime.compile(affine(), cache_dir=folder)
        await compiled.run({"x": rows(1)})
        folder.rename(tmp_path / "gone")
        folder.write_text("in the way")
        await compiled.run({"x": rows(2)})
        (failed,) = recorder.named("transmuter.disk_cache.error")
        assert failed.metadata["call"] == recorder.named("transmuter.call.start")[-1].metadata["span"]
        assert failed.metadata["actor"] == compiled.name


@fakes
async def test_a_program_that_comes_too_late_is_let_go_in_its_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    where: list[str] = []
    run = FakeJob.run

    class Program(SimpleNamespace):
        """One that can be referred to weakly."""

    def noted(self: FakeJob, observe: Any) -> Any:
        segment = Program(**vars(run(self, observe)))
        weakref.finalize(segment, lambda: where.append(threading.current_thread().name))
        return segment

    monkeypatch.setattr(FakeJob, "run", noted)
    async with fake_model() as (compiled, compiler):
        compiler.compiles.shut()
        async with anyio.create_task_group() as group:

            async def call() -> None:
                with pytest.raises(ActorStopped):
                    await compiled.run({"x": 1})

            group.start_soon(call)
            await compiler.compiles.wait_came(1)
            group.start_soon(compiled.aclose)
            await anyio.wait_all_tasks_blocked()
            compiler.compiles.open()
    (name,) = where
    assert name.startswith("fake-compile")


@fakes
async def test_crashes_far_apart_are_forgiven(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(actor, "time", SimpleNamespace(monotonic=lambda: now))
    async with fake_model() as (compiled, _):
        for number in range(3 * RESTARTS):
            compiled._actor.crash(RuntimeError(f"number {number}"))
            assert await compiled.run({"x": number}) == {"y": 100 + number}
            now += WINDOW / RESTARTS + 0.1
        assert (await compiled.statistics()).restarts == 3 * RESTARTS
