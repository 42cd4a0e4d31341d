"""Several devices, as a process sees them that has four. `test_devices.py` runs this file in such a process."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterable
from importlib.resources import files
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import jax
import numpy as np
import pytest
from onnx import helper

import transmuter_async as tm
from tests.actors.fakes import own_threads
from tests.compiler.test_donate import counter
from tests.test_runtime import affine, breaking, expected, heavy, model_bytes, rows
from transmuter_async.actors import Compiled, Replicas
from transmuter_async.testing import Recorder

DEVICES = jax.local_devices()
DIGITS = str(files("transmuter_async") / "demo" / "digits.onnx")
SPEC = {"x": tm.Spec((2, 4), "float32")}
HEAVY = 512 * 256 * 4
BATCH = tm.Batching(batch="n")


def close(got: Any, want: Any) -> None:
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_there_are_four() -> None:
    assert len(DEVICES) == 4


class Held:
    """Stops every call of some actors inside their run threads, until they are let go."""

    def __init__(self, compiled: Compiled) -> None:
        self.actors = compiled._actors if isinstance(compiled, Replicas) else (compiled._actor,)
        self.running: list[str] = []
        self._go = threading.Event()
        for actor in self.actors:
            self._hold(actor, actor._advance)

    def _hold(self, actor: Any, advance: Any) -> None:
        def held(*arguments: Any) -> Any:
            self.running.append(actor.name)
            self._go.wait()
            return advance(*arguments)

        actor._advance = held

    async def wait_running(self, count: int) -> None:
        with anyio.move_on_after(20):
            while len(self.running) < count:
                await anyio.lowlevel.checkpoint()
            return
        self.let_go()  # or nothing would ever end
        raise AssertionError(f"{self.running} run, not {count}")

    def let_go(self) -> None:
        self._go.set()


async def gather(compiled: Compiled, counts: Iterable[int]) -> list[tuple[int, Any]]:
    """Concurrent calls; the answers, or errors, with their number of rows."""
    results: list[tuple[int, Any]] = []

    async def one(count: int) -> None:
        try:
            results.append((count, (await compiled.run({"x": rows(count)}))["y"]))
        except tm.ActorStopped as error:
            results.append((count, error))

    async with anyio.create_task_group() as group:
        for count in counts:
            group.start_soon(one, count)
    return results


# --- replicas ---------------------------------------------------------------------------------------------------------


async def test_calls_are_spread_and_right() -> None:
    async with tm.Runtime() as runtime, Recorder(runtime.telemetry, "transmuter") as recorder:
        compiled = await runtime.compile(affine(), SPEC, replicas=4, name="affine")
        assert isinstance(compiled, Replicas)
        assert (compiled.name, compiled.state, compiled.graph_break) == ("affine", "running", False)
        assert compiled.devices == tuple(DEVICES)
        held = Held(compiled)
        async with anyio.create_task_group() as group:
            group.start_soon(gather, compiled, [2] * 8)
            await held.wait_running(4)
            assert sorted(held.running) == [f"affine[{index}]" for index in range(4)]
            held.let_go()
        for count, y in await gather(compiled, [1, 2, 3, 5, 8] * 4):
            close(y, expected(rows(count)))
        counts = await compiled.statistics()
        assert counts.answered == 28 == sum(each.answered for each in counts.replicas)
        assert all(each.answered >= 2 for each in counts.replicas)
        assert (counts.max_concurrency, counts.cache.kept, counts.waiting, counts.running) == (4, 4, 0, 0)
        assert counts.compiles == sum(each.compiles for each in counts.replicas) >= 4
        [start] = recorder.named("transmuter.compile.start")
        assert start.metadata["actor"] == "affine"
        assert start.metadata["devices"] == ("cpu:0", "cpu:1", "cpu:2", "cpu:3")
        for name in ("transmuter.call.stop", "transmuter.actor.started", "transmuter.segment.compile.stop"):
            told = {(e.metadata["actor"], e.metadata["device"]) for e in recorder.named(name)}
            assert told == {(f"affine[{index}]", f"cpu:{index}") for index in range(4)}, name


async def test_as_many_at_once_as_replicas_times_max_concurrency() -> None:
    async with tm.Runtime(devices=DEVICES[1:3]) as runtime:
        compiled = await runtime.compile(affine(), SPEC, replicas=2, max_concurrency=3, name="m")
        assert isinstance(compiled, Replicas)
        for actor in compiled._actors:
            actor.mailbox = 1
        held = Held(compiled)
        async with anyio.create_task_group() as group:
            group.start_soon(gather, compiled, [2] * 8)
            await held.wait_running(6)
            await anyio.wait_all_tasks_blocked()
            assert sorted(held.running) == ["m[0]"] * 3 + ["m[1]"] * 3
            with pytest.raises(tm.Overloaded):
                await compiled.run_nowait({"x": rows(2)})
            held.let_go()
        counts = await compiled.statistics()
        assert (counts.peak_running, counts.answered, counts.rejected) == (6, 8, 1)
        assert [each.peak_running for each in counts.replicas] == [3, 3]


async def test_a_burst_of_coroutines_is_spread_when_it_runs() -> None:
    async with tm.Runtime() as runtime:
        compiled = await runtime.compile(affine(), SPEC, replicas=4)
        held = Held(compiled)
        calls = [compiled.run({"x": rows(2)}) for _ in range(4)]  # nothing has started yet
        async with anyio.create_task_group() as group:
            for call in calls:
                group.start_soon(lambda call=call: call)
            await held.wait_running(4)
            held.let_go()
        assert len(set(held.running)) == 4


async def test_one_crash_stops_no_other() -> None:
    async with tm.Runtime() as runtime:
        compiled = await runtime.compile(affine(), SPEC, replicas=2, name="m")
        assert isinstance(compiled, Replicas)
        held = Held(compiled)
        results: list[tuple[int, Any]] = []

        async def all_of_them() -> None:
            results.extend(await gather(compiled, [2] * 4))

        async with anyio.create_task_group() as group:
            group.start_soon(all_of_them)
            await held.wait_running(2)
            compiled._actors[1].crash(RuntimeError("a defect"))
            assert compiled.state == "running"
            assert [actor.state for actor in compiled._actors] == ["running", "restarting"]
            assert compiled._which({"x": rows(2)}) == 0, "the busy one that runs, not the idle one that restarts"
            held.let_go()
        stopped = [y for _, y in results if isinstance(y, tm.ActorStopped)]
        assert len(stopped) == 2 and len(results) == 4
        assert all("crashed: RuntimeError: a defect" in str(error) for error in stopped)
        for count, y in await gather(compiled, [2] * 6):
            close(y, expected(rows(count)))
        with anyio.fail_after(20):
            while compiled._actors[1].state != "running":
                await anyio.lowlevel.checkpoint()
        for count, y in await gather(compiled, [2] * 6):
            close(y, expected(rows(count)))
        counts = await compiled.statistics()
        assert [each.restarts for each in counts.replicas] == [0, 1]
        assert counts.replicas[1].answered >= 1


async def test_aclose_gives_everything_back_on_every_device() -> None:
    async with tm.Runtime() as runtime:
        compiled = await runtime.compile(heavy(0), {"x": tm.Spec((2, 512), "float32")}, replicas=3)
        assert isinstance(compiled, Replicas)
        memory = [each.active_memory for each in await runtime.memory_statistics()]
        assert [size >= HEAVY for size in memory] == [True, True, True, False]
        assert memory[3] == 0
        programs = [weakref.ref(s.program) for actor in compiled._actors for s in actor._cache.segments()]
        weights = [weakref.ref(w) for actor in compiled._actors for s in actor._cache.segments() for w in s.weights]
        assert {next(iter(w().devices())) for w in weights} == set(DEVICES[:3])  # type: ignore[union-attr]
        held = Held(compiled)
        async with anyio.create_task_group() as group:
            errors: list[BaseException] = []

            async def call() -> None:
                try:
                    await compiled.run({"x": np.zeros((2, 512), np.float32)})
                except tm.ActorStopped as error:
                    errors.append(error)

            for _ in range(5):
                group.start_soon(call)
            await held.wait_running(3)
            group.start_soon(compiled.aclose)
            with anyio.fail_after(20):
                while len(errors) < 5:
                    await anyio.lowlevel.checkpoint()
            held.let_go()
        assert compiled.state == "stopped"
        held.actors = ()
        gc.collect()
        assert [program() for program in programs] == [None] * 3
        assert [weight() for weight in weights] == [None] * 3
        assert [each.active_memory for each in await runtime.memory_statistics()] == [0] * 4
        with pytest.raises(tm.ActorStopped):
            await compiled.run({"x": np.zeros((2, 512), np.float32)})
        with pytest.raises(tm.ActorStopped):
            await compiled.statistics()
        again = await runtime.compile(heavy(0), name=compiled.name)
        assert again.state == "running"
    assert not own_threads()


async def test_warm_why_explain_and_clear_are_about_all() -> None:
    async with tm.Runtime() as runtime, Recorder(runtime.telemetry, "transmuter.cache.miss") as misses:
        compiled = await runtime.compile(affine(), replicas=3)
        await compiled.warm([SPEC, {"x": tm.Spec((3, 4), "float32")}])
        counts = await compiled.statistics()
        assert counts.compiles == 6 and [each.compiles for each in counts.replicas] == [2, 2, 2]
        await gather(compiled, [2, 3] * 6)
        assert misses.events == []
        assert (await compiled.why({"x": rows(2)})).hit
        assert not (await compiled.why({"x": rows(7)})).hit
        explained = await compiled.explain()
        assert "3 replicas, on cpu:0, cpu:1, cpu:2" in str(explained)
        assert len(explained.segments) == 2
        await compiled.clear_cache()
        assert (await compiled.statistics()).cache.segments == 0
        with pytest.raises(tm.InputError, match="missing"):
            await compiled.run({})
        with pytest.raises(tm.InputError):
            await compiled.warm({"y": tm.Spec((3, 4), "float32")})


async def test_from_threads() -> None:
    async with tm.Runtime() as runtime:
        compiled = await runtime.compile(affine(), SPEC, replicas=4)
        held = Held(compiled)
        results: list[Any] = []

        def call() -> None:
            results.append(compiled.call_from_thread({"x": rows(2)})["y"])

        async with anyio.create_task_group() as group:
            for _ in range(8):
                group.start_soon(anyio.to_thread.run_sync, call)
            await held.wait_running(4)
            held.let_go()
        assert len(set(held.running[:4])) == 4
        for y in results:
            close(y, expected(rows(2)))
        assert len(results) == 8
        with pytest.raises(tm.MisuseError, match="event loop"):
            compiled.call_from_thread({"x": rows(2)})


async def test_a_warning_carries_the_callers_line() -> None:
    made = model_bytes([helper.make_node("Log", ["x"], ["y"])], {"x": ["n"]}, {"y": ["n"]})
    async with tm.Runtime() as runtime:
        for replicas in (1, 2):
            compiled = await runtime.compile(made, nonfinite="warn", replicas=replicas)
            with pytest.warns(tm.NonFiniteWarning) as caught:
                await compiled.run({"x": np.array([-1], np.float32)})
            assert [warning.filename for warning in caught] == [__file__]


async def test_a_failed_or_cancelled_compile_leaves_no_actor() -> None:
    async with tm.Runtime() as runtime:
        with pytest.raises(tm.InputError, match="specs do not fit"):
            await runtime.compile(affine(), {"x": tm.Spec((2, 5), "float32")}, replicas=4)
        with pytest.raises(tm.BreakRefused):
            await runtime.compile(breaking(), {"x": tm.Spec((8,), "float32")}, replicas=4, breaks="error")
        with anyio.CancelScope() as scope:
            scope.cancel()
            await runtime.compile(affine(), SPEC, replicas=4)
        with anyio.fail_after(20):
            while (await runtime.statistics()).actors:
                await anyio.lowlevel.checkpoint()


async def test_a_graph_that_breaks_on_replicas() -> None:
    async with tm.Runtime() as runtime:
        compiled = await runtime.compile(breaking(), {"x": tm.Spec((4,), "float32")}, replicas=2)
        assert compiled.graph_break is True
        for n in (4, 6):
            x = np.arange(n, dtype=np.float32) - 2
            np.testing.assert_array_equal((await compiled.run({"x": x}))["y"], 2 * x[x > 0])


async def test_programs_on_disk_are_those_of_their_device(tmp_path: Path) -> None:
    told = []
    for devices in (DEVICES[:2], DEVICES[:2], DEVICES[1:3]):
        async with tm.Runtime(devices=devices) as runtime:
            async with Recorder(runtime.telemetry, "transmuter.segment.compile.stop") as recorder:
                compiled = await runtime.compile(
                    heavy(0), {"x": tm.Spec((2, 512), "float32")}, replicas=2, cache_dir=tmp_path
                )
            told.append(sorted((e.metadata["device"], e.metadata["disk_cache"]) for e in recorder.events))
            held = Held(compiled)
            x = np.ones((2, 512), np.float32)
            async with anyio.create_task_group() as group:
                for _ in range(2):
                    group.start_soon(compiled.run, {"x": x})
                await held.wait_running(2)
                held.let_go()
            for actor in held.actors:
                assert actor._counts["answered"] == 1 and actor._counts["misses"] == 0
    assert told == [
        [("cpu:0", "miss"), ("cpu:1", "miss")],
        [("cpu:0", "hit"), ("cpu:1", "hit")],
        [("cpu:1", "hit"), ("cpu:2", "miss")],
    ]


async def test_the_budget_is_of_each_device() -> None:
    spec = {"x": tm.Spec((2, 512), "float32")}
    async with (
        tm.Runtime(devices=DEVICES[:2], memory_limit=HEAVY * 3 // 2) as runtime,
        Recorder(runtime.telemetry, "transmuter.memory") as recorder,
    ):
        compiled = await runtime.compile(heavy(0), spec, replicas=2, name="two")
        assert recorder.events == [], "twice the weights, but once on each device"
        await runtime.compile(heavy(1), spec, name="one")
        with anyio.fail_after(20):
            while len(recorder.events) < 2:
                await anyio.lowlevel.checkpoint()
        told = [(e.name, e.metadata["actor"], e.metadata["what"]) for e in recorder.events]
        assert told == [("transmuter.memory.release", "two[0]", what) for what in ("programs", "weights")]
        held = {each.name: each.weight_bytes for each in (await runtime.statistics()).actors}
        assert held == {"two[0]": 0, "two[1]": HEAVY, "one": HEAVY}
        w = np.random.default_rng(0).standard_normal((512, 256)).astype(np.float32)
        x = np.ones((2, 512), np.float32)
        close((await compiled.run({"x": x}))["y"], x @ w)


# --- one device of several --------------------------------------------------------------------------------------------


async def test_one_device_is_the_first_and_the_handle_the_plain_one() -> None:
    async with tm.Runtime(devices=DEVICES[2:]) as runtime, Recorder(runtime.telemetry, "transmuter") as recorder:
        compiled = await runtime.compile(affine(), SPEC)
        assert type(compiled) is Compiled
        out = await compiled.run({"x": rows(2)}, device=True)
        assert out["y"].devices() == {DEVICES[2]}
        assert not [e for e in recorder.events if "device" in e.metadata or "devices" in e.metadata]


@pytest.mark.parametrize("options", [{}, {"replicas": 4}, {"sharding": "batch", "batching": BATCH}], ids=str)
async def test_arrays_of_other_devices_are_brought_over(options: dict[str, Any]) -> None:
    mesh = jax.sharding.Mesh(np.array(DEVICES), ("a",))
    x = rows(8)
    async with tm.Runtime() as runtime:
        compiled = await runtime.compile(affine(), **options)
        for where in (
            DEVICES[3],
            jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("a")),
            jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "a")),
            jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()),
        ):
            given = jax.device_put(x, where)
            close((await compiled.run({"x": given}))["y"], expected(x))
            assert not given.is_deleted()
        close((await compiled.run({"x": jax.device_put(x[:5], DEVICES[1])}))["y"], expected(x[:5]))


# --- one batch over all devices ---------------------------------------------------------------------------------------


async def test_rows_are_split_over_the_devices() -> None:
    w = np.random.default_rng(0).standard_normal((512, 256)).astype(np.float32)
    async with tm.Runtime() as runtime, Recorder(runtime.telemetry, "transmuter") as recorder:
        compiled = await runtime.compile(
            heavy(0), {"x": tm.Spec((16, 512), "float32")}, sharding="batch", batching=BATCH
        )
        for count in (16, 1, 3, 4, 7, 16, 33, 0):
            x = np.random.default_rng(count).standard_normal((count, 512)).astype(np.float32)
            out = await compiled.run({"x": x})
            assert out["y"].shape == (count, 256)
            close(out["y"], x @ w)
        x = np.random.default_rng(1).standard_normal((16, 512)).astype(np.float32)
        shards = (await compiled.run({"x": x}, device=True))["y"].addressable_shards
        assert [(shard.device, shard.data.shape) for shard in shards] == [(device, (4, 256)) for device in DEVICES]
        [weight] = compiled._actor._cache.segments()[0].weights
        assert {shard.device for shard in weight.addressable_shards} == set(DEVICES)
        assert weight.sharding.is_fully_replicated
        assert (await compiled.statistics()).weight_bytes == HEAVY, "once on each device"
        assert all(each.active_memory >= HEAVY for each in await runtime.memory_statistics())
        explained = str(await compiled.explain())
        assert "Programs over 4 devices: cpu:0, cpu:1, cpu:2, cpu:3." in explained
        assert "split over 4 devices" in explained
        sizes = {e.metadata["shapes"][0][1][0][0] for e in recorder.named("transmuter.segment.compile.stop")}
        assert sizes == {16, 4, 8, 36, 0}, "padded to a multiple of four"
        assert {e.metadata["device"] for e in recorder.named("transmuter.call.stop")} == {"cpu:0, cpu:1, cpu:2, cpu:3"}
        kept = weakref.ref(weight)
        del weight
        await compiled.aclose()
        gc.collect()
        assert kept() is None
        assert [each.active_memory for each in await runtime.memory_statistics()] == [0] * 4


async def test_a_whole_model_split_equals_itself() -> None:
    images = np.random.default_rng(3).random((30, 1, 8, 8), np.float32)
    async with tm.Runtime() as runtime:
        alone = await runtime.compile(DIGITS)
        [batch] = [dim for dim in alone.model.inputs[0].type.shape if isinstance(dim, str)]
        batching = tm.Batching(batch=batch, buckets={batch: [6, 30]})
        split = await runtime.compile(DIGITS, sharding="batch", batching=batching)
        for count in (30, 6, 5, 1):
            want, got = await alone.run({"image": images[:count]}), await split.run({"image": images[:count]})
            assert list(want) == list(got)
            for name in want:
                assert want[name].shape == got[name].shape
                close(got[name], want[name])
        counts = await split.statistics()
        assert counts.compiles == 2, "the buckets, each rounded up to what the devices divide"
        two = [dict(await split.run({"image": images[:6]})) for _ in range(2)]
        for name in two[0]:
            np.testing.assert_array_equal(two[0][name], two[1][name])


async def test_split_calls_and_other_models_at_once() -> None:
    """Programs over a mesh that exchange something and start in different orders on two devices would never end."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["y"]),
        helper.make_node("ReduceMax", ["y"], ["top"], keepdims=0),
    ]
    w = np.random.default_rng(0).standard_normal((32, 16)).astype(np.float32)
    made = model_bytes(nodes, {"x": ["n", 32]}, {"y": ["n", 16], "top": []}, w=w)
    insists = tm.Batching(batch="n", allow_mixing=True)
    async with tm.Runtime() as runtime:
        models = [
            await runtime.compile(made, sharding="batch", batching=insists, max_concurrency=3, name=f"m{i}")
            for i in range(3)
        ]
        wrong: list[Any] = []

        async def one(compiled: Compiled, count: int) -> None:
            x = np.random.default_rng(count).standard_normal((count, 32)).astype(np.float32)
            out = await compiled.run({"x": x})
            if not np.allclose(out["y"], x @ w, rtol=1e-3, atol=1e-3) or abs(out["top"] - (x @ w).max()) > 1e-3:
                wrong.append(count)

        with anyio.fail_after(60):
            async with anyio.create_task_group() as group:
                for number in range(60):
                    group.start_soon(one, models[number % 3], 4 * (1 + number % 5))
        assert not wrong


async def test_what_can_not_be_split() -> None:
    mixing = model_bytes([helper.make_node("Softmax", ["x"], ["y"], axis=0)], {"x": ["n", 4]}, {"y": ["n", 4]})
    async with tm.Runtime() as runtime:
        with pytest.raises(tm.BatchingRefused, match="Softmax"):
            await runtime.compile(mixing, sharding="batch", batching=BATCH)
        with pytest.raises(tm.BreakRefused, match="sharding='batch' refuses"):
            await runtime.compile(
                breaking(),
                {"x": tm.Spec((8,), "float32")},
                sharding="batch",
                batching=tm.Batching(batch="n", allow_mixing=True),
            )
        late = await runtime.compile(breaking(), sharding="batch", batching=tm.Batching(batch="n", allow_mixing=True))
        with pytest.raises(tm.BreakRefused, match="sharding='batch' refuses"):
            await late.run({"x": rows(2).reshape(-1)})
        with pytest.raises(tm.MisuseError, match="which dimension counts them"):
            await runtime.compile(affine(), sharding="batch")
        with pytest.raises(tm.MisuseError, match="eager"):
            await runtime.compile(affine(), sharding="batch", batching=BATCH, compiler="eager")
        with pytest.raises(tm.MisuseError, match="not kept on disk"):
            await runtime.compile(affine(), sharding="batch", batching=BATCH, cache_dir="x")
        with pytest.raises(tm.MisuseError, match="choose one"):
            await runtime.compile(affine(), sharding="batch", batching=BATCH, replicas=2)
        with pytest.raises(ValueError, match="sharding='rows'"):
            await runtime.compile(affine(), sharding="rows", batching=BATCH)
        assert [each.name for each in (await runtime.statistics()).actors] == [late.name]


async def test_split_and_cold() -> None:
    async with tm.Runtime() as runtime, Recorder(runtime.telemetry, "transmuter.call.stop") as recorder:
        compiled = await runtime.compile(affine(), sharding="batch", batching=BATCH, cold="interpret")
        close((await compiled.run({"x": rows(5)}))["y"], expected(rows(5)))
        with anyio.fail_after(20):
            while (await compiled.statistics()).cache.programs == 0:
                await anyio.lowlevel.checkpoint()
        close((await compiled.run({"x": rows(6)}))["y"], expected(rows(6)))
        assert [e.metadata["tier"] for e in recorder.events] == ["interpreted", "compiled"]


async def test_a_serving_uses_all_replicas() -> None:
    async with tm.Runtime() as runtime:
        compiled = await runtime.compile(affine(), replicas=4, batching=BATCH)
        held = Held(compiled)
        async with await runtime.serve(compiled, batch_size=2) as serving:
            results: list[tuple[int, Any]] = []

            async def one(count: int) -> None:
                results.append((count, (await serving.run({"x": rows(count)}))["y"]))

            async with anyio.create_task_group() as group:
                for _ in range(8):
                    group.start_soon(one, 2)
                await held.wait_running(4)
                held.let_go()
            assert len(set(held.running[:4])) == 4
            assert len(results) == 8
            for count, y in results:
                close(y, expected(rows(count)))


async def test_a_serving_over_a_split_batch() -> None:
    async with tm.Runtime() as runtime:
        compiled = await runtime.compile(affine(), sharding="batch", batching=BATCH)
        async with await runtime.serve(compiled, batch_size=16) as serving:

            async def one(count: int) -> None:
                close((await serving.run({"x": rows(count)}))["y"], expected(rows(count)))

            async with anyio.create_task_group() as group:
                for count in (1, 2, 3, 5, 1, 7, 4, 2, 40):
                    group.start_soon(one, count)


# --- donation ---------------------------------------------------------------------------------------------------------


async def test_a_state_stays_on_its_device() -> None:
    rng = np.random.default_rng(5)
    async with tm.Runtime() as runtime, Recorder(runtime.telemetry, "transmuter.call.stop") as recorder:
        compiled = await runtime.compile(counter(), replicas=3, donate=["state"])
        states: dict[int, Any] = {}
        values: dict[int, np.ndarray] = {}

        async def start(session: int) -> None:
            first, x = rng.random(64, np.float32), rng.random(64, np.float32)
            states[session] = (await compiled.run({"state": first, "x": x}, device=True))["total"]
            values[session] = first + x

        held = Held(compiled)
        async with anyio.create_task_group() as group:
            for session in range(3):
                group.start_soon(start, session)
            await held.wait_running(3)
            held.let_go()
        assert {next(iter(state.devices())) for state in states.values()} == set(DEVICES[:3])
        recorder.clear()
        for _ in range(2):
            for session in range(3):  # one after the other: all replicas are idle, so the first would do
                state, x = states[session], rng.random(64, np.float32)
                [device], where = state.devices(), state.unsafe_buffer_pointer()
                out = (await compiled.run({"state": state, "x": x}, device=True))["total"]
                assert state.is_deleted() and out.devices() == {device}
                assert out.unsafe_buffer_pointer() == where
                states[session], values[session] = out, values[session] + x
                assert recorder.events[-1].metadata["device"] == str(device)
                close(np.array(out), values[session])


async def test_a_state_of_a_split_batch() -> None:
    rng = np.random.default_rng(6)
    async with tm.Runtime() as runtime:
        compiled = await runtime.compile(recurrent(), sharding="batch", batching=BATCH, donate=["state"])
        value, x = rng.random((8, 16), np.float32), rng.random((8, 16), np.float32)
        state = (await compiled.run({"state": value, "x": x}, device=True))["next"]
        value = np.tanh(value + x)
        for _ in range(3):
            where = [shard.data.unsafe_buffer_pointer() for shard in state.addressable_shards]
            out = (await compiled.run({"state": state, "x": x}, device=True))["next"]
            assert state.is_deleted()
            assert [shard.data.unsafe_buffer_pointer() for shard in out.addressable_shards] == where
            value, state = np.tanh(value + x), out
            close(np.array(out), value)


def recurrent() -> bytes:
    """next = tanh(state + x), rows of 16."""
    nodes = [helper.make_node("Add", ["state", "x"], ["sum"]), helper.make_node("Tanh", ["sum"], ["next"])]
    return model_bytes(nodes, {"state": ["n", 16], "x": ["n", 16]}, {"next": ["n", 16]})


# --- misuse -----------------------------------------------------------------------------------------------------------


async def test_devices_that_are_none() -> None:
    with pytest.raises(tm.MisuseError, match="'gpu:7' is no jax device"):
        tm.Runtime(devices=["gpu:7"])  # type: ignore[list-item]
    with pytest.raises(tm.MisuseError, match="is not a list"):
        tm.Runtime(devices="cpu")  # type: ignore[arg-type]
    with pytest.raises(tm.MisuseError, match="names a device twice"):
        tm.Runtime(devices=[DEVICES[0], DEVICES[1], DEVICES[0]])
    async with tm.Runtime() as runtime:
        with pytest.raises(tm.MisuseError, match="replicas=5 need a device each, and there are 4"):
            await runtime.compile(affine(), replicas=5)
        with pytest.raises(ValueError, match="replicas=0"):
            await runtime.compile(affine(), replicas=0)
        compiled = await runtime.compile(affine(), replicas=2, name="m")
        with pytest.raises(tm.MisuseError, match="an actor named 'm'"):
            await runtime.compile(affine(), name="m")
        errors: list[BaseException] = []

        async def elsewhere() -> None:
            for call in (lambda: compiled.run({"x": rows(2)}), compiled.aclose, compiled.statistics):
                try:
                    await call()
                except tm.MisuseError as error:
                    errors.append(error)

        await anyio.to_thread.run_sync(lambda: anyio.run(elsewhere))
        assert len(errors) == 3
        assert compiled.state == "running"
