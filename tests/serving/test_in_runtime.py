"""`runtime.serve`: how a serving starts and ends with its runtime, and the events of a full run."""

from __future__ import annotations

import math
from typing import Any

import anyio
import numpy as np
import pytest

import transmuter_async as tm
from tests.serving.fakes import BUCKETS, doubling, right, row, settle
from transmuter_async.actors import Threads
from transmuter_async.telemetry import CATALOGUE
from transmuter_async.testing import HeldCompiler, Recorder


async def test_a_serving_is_awaited_or_entered() -> None:
    async with tm.Runtime() as runtime:
        compiled = await runtime.compile(doubling(), batching=BUCKETS, name="double")
        serving = await runtime.serve(compiled, batch_size=[2])
        assert right(row(1), await serving.run(row(1)))
        async with runtime.serve(compiled, batch_size=[2]) as other:
            assert right(row(1), await other.run(row(1)))
            assert (serving.name, other.name) == ("double-serving", "double-serving-2")
        assert other.state == "stopped"
        assert repr(serving) == "<Serving 'double-serving' running>"
        await serving.aclose()
        assert right(row(1), await compiled.run(row(1)))  # the model goes on
        with pytest.raises(tm.MisuseError, match="named 'double'"):
            await runtime.serve(compiled, name="double")
    with pytest.raises(tm.ActorStopped):
        await serving.run(row(1))
    with pytest.raises(tm.MisuseError, match="not entered"):
        await tm.Runtime().serve(compiled)


@pytest.mark.parametrize(
    ("given", "shown"),
    [(3, "not 3 of type int"), (None, "not None of type NoneType"), ("model.onnx", "not 'model.onnx' of type str")],
    ids=repr,
)
async def test_what_is_no_compiled_model_is_refused(given: Any, shown: str) -> None:
    async with tm.Runtime() as runtime:
        with pytest.raises(TypeError, match=rf"{shown}; write `compiled = await runtime\.compile\(model\)`"):
            runtime.serve(given)
        with pytest.raises(TypeError, match="of type bytes"):
            async with runtime.serve(doubling()):  # type: ignore[arg-type]
                raise AssertionError
        async with runtime.serve(await runtime.compile(doubling()), batch_size=[2], name="first") as serving:
            with pytest.raises(TypeError, match="not the serving 'first'"):
                runtime.serve(serving)  # type: ignore[arg-type]


async def test_an_error_in_the_block_ends_it_without_draining() -> None:
    async with tm.Runtime() as runtime:
        compiled = await runtime.compile(doubling(), batching=BUCKETS)
        with pytest.raises(ZeroDivisionError):
            async with runtime.serve(compiled, batch_size=[2]) as serving:
                raise ZeroDivisionError
        assert serving.state == "stopped"


@pytest.mark.parametrize("drain", [True, False])
async def test_closing_the_runtime_answers_everyone(drain: bool) -> None:
    outcomes: list[Any] = []
    async with tm.Runtime() as runtime, anyio.create_task_group() as group:
        compiled = await runtime.compile(doubling(), batching=BUCKETS)
        serving = await runtime.serve(compiled, batch_size=[2])

        async def caller(number: int) -> None:
            try:
                outcomes.append(right(row(number), await serving.run(row(number))))
            except tm.ActorStopped:
                outcomes.append("stopped")

        with HeldCompiler(compiled) as held:
            for number in range(9):
                group.start_soon(caller, number)
            await held.wait_started()
            await settle()
            group.start_soon(lambda: runtime.aclose(drain=drain))
            await settle()
            held.release()
            with anyio.fail_after(20):
                while len(outcomes) < 9:
                    await settle()
    assert outcomes == [True if drain else "stopped"] * 9


async def test_a_full_run_emits_what_the_catalogue_says() -> None:
    async with tm.Runtime() as runtime, Recorder(runtime.telemetry) as recorder:
        compiled = await runtime.compile(doubling(), batching=BUCKETS)
        async with runtime.serve(compiled, batch_size=[4], timeout=100) as serving:
            await serving.warm()
            async for _ in serving.map(row(n, 3) for n in range(40)):
                pass
            with pytest.raises(tm.InputError):
                await serving.run(row(0, 99))
        events = recorder.events
        for event in events:
            kind = CATALOGUE[event.name]
            assert set(kind.measurements) <= event.measurements.keys(), event.name
            assert set(kind.metadata) <= event.metadata.keys(), event.name
        stops = recorder.named("transmuter.batch.stop")
        assert sum(event.measurements["size"] for event in stops) == 40
        inside = {event.metadata["span"] for event in stops}
        calls = [e for e in recorder.named("transmuter.call.stop") if e.metadata.get("parent") in inside]
        assert len(calls) == len(stops)
        names = recorder.names()
        for name in ("transmuter.actor.started", "transmuter.actor.stopped"):
            assert [e.metadata["actor"] for e in recorder.named(name)].count(serving.name) == 1, names


async def test_times_without_end() -> None:
    async with tm.Runtime() as runtime:
        compiled = await runtime.compile(doubling(), batching=BUCKETS)
        async with runtime.serve(compiled, batch_size=[4], timeout=math.inf) as serving:
            assert (await serving.run(row(1, 3))).keys() == (await serving.run(row(1, 3), timeout=math.inf)).keys()
        for never in (math.inf, math.nan, -1):
            with pytest.raises(ValueError, match="batch_timeout"):
                await runtime.serve(compiled, batch_timeout=never)


async def test_a_refusal_at_the_start_leaves_nothing_behind() -> None:
    mixing = doubling()
    async with tm.Runtime() as runtime:
        compiled = await runtime.compile(mixing, batching=tm.Batching(buckets={"length": [4]}))
        with pytest.raises(tm.InputError, match="computes 1 at once"):
            await runtime.serve(compiled, concurrency=2)
        fixed = await runtime.compile(doubling(batch=2, length=3))
        with pytest.raises(tm.InputError, match=r"no input has an open first dimension.*Batching\(batch="):
            await runtime.serve(fixed)
        assert not runtime._servings
        assert isinstance(runtime._threads, Threads)


async def test_the_batch_of_the_names_and_buckets_of_the_compile_go_together() -> None:
    """Buckets are told, the batch is read from the graph's names."""
    async with tm.Runtime() as runtime:
        compiled = await runtime.compile(doubling(), batching=tm.Batching(buckets={"length": [4, 8]}))
        async with runtime.serve(compiled, batch_size=[1, 2], max_padded=8) as serving:
            statistics = await serving.statistics()
            assert statistics.batch == "batch"
            await serving.warm()
            outputs = await serving.run({"x": np.ones((3, 7), np.float32)})
            assert outputs["y"].shape == (3, 7)
            assert outputs["total"].tolist() == [14, 14, 14]
        assert (await compiled.statistics()).cache.programs == 3


async def test_a_cleared_cache_is_compiled_ahead_of_the_call() -> None:
    """What a batch needs is compiled while it holds no slot, also when it was there before."""
    async with tm.Runtime() as runtime, Recorder(runtime.telemetry, "transmuter.segment") as recorder:
        compiled = await runtime.compile(doubling())
        async with runtime.serve(compiled, batch_size=[1]) as serving:
            for cleared in (False, False, True):
                if cleared:
                    await compiled.clear_cache()
                assert right(row(1), await serving.run(row(1)))
        stops = [event for event in recorder.events if event.name == "transmuter.segment.compile.stop"]
    assert [event.metadata.get("background") for event in stops] == [True, True]


async def test_a_closed_model_is_not_served() -> None:
    async with tm.Runtime() as runtime:
        compiled = await runtime.compile(doubling())
        await compiled.aclose()
        with pytest.raises(tm.ActorStopped, match="can't be served"):
            await runtime.serve(compiled)


async def test_a_serve_is_entered_once() -> None:
    """A second block would forget the serving of the first, which then went on."""
    async with tm.Runtime() as runtime:
        starting = runtime.serve(await runtime.compile(doubling()))
        async with starting as serving:
            with pytest.raises(tm.MisuseError, match="entered before"):
                await starting.__aenter__()
            assert serving.state == "running"
        assert serving.state == "stopped"
