"""The runtime over real models: load, compile, call, close; every event of it; misuse; nothing left behind."""

from __future__ import annotations

import gc
import io
import os
import subprocess
import sys
import textwrap
import threading
import weakref
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import jax
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import transmuter_async as tm
from tests.actors.fakes import own_threads
from transmuter_async.actors import Actor
from transmuter_async.telemetry import CATALOGUE, Telemetry
from transmuter_async.testing import HeldCompiler, Recorder


def model_bytes(
    nodes: list[onnx.NodeProto], inputs: dict[str, list], outputs: dict[str, list], **weights: np.ndarray
) -> bytes:
    """A model of float32 inputs and outputs; names of dims are symbolic."""
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, dims) for name, dims in inputs.items()],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, dims) for name, dims in outputs.items()],
        [onnx.numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8).SerializeToString()


def affine() -> bytes:
    """y = tanh(x · w + b), x float32 (n, 4)."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["m"]),
        helper.make_node("Add", ["m", "b"], ["s"]),
        helper.make_node("Tanh", ["s"], ["y"]),
    ]
    rng = np.random.default_rng(0)
    w, b = rng.standard_normal((4, 3)).astype(np.float32), rng.standard_normal(3).astype(np.float32)
    return model_bytes(nodes, {"x": ["n", 4]}, {"y": ["n", 3]}, w=w, b=b)


def breaking() -> bytes:
    """A NonZero between two halves: y = the positive elements of x, doubled."""
    nodes = [
        helper.make_node("Greater", ["x", "zero"], ["mask"]),
        helper.make_node("NonZero", ["mask"], ["where"], name="find"),
        helper.make_node("Transpose", ["where"], ["index"]),
        helper.make_node("GatherND", ["x", "index"], ["picked"]),
        helper.make_node("Add", ["picked", "picked"], ["y"]),
    ]
    return model_bytes(nodes, {"x": ["n"]}, {"y": ["k"]}, zero=np.zeros((), np.float32))


def expected(x: np.ndarray) -> np.ndarray:
    rng = np.random.default_rng(0)
    w, b = rng.standard_normal((4, 3)).astype(np.float32), rng.standard_normal(3).astype(np.float32)
    return np.tanh(x.astype(np.float64) @ w + b)


def rows(count: int) -> np.ndarray:
    return np.random.default_rng(count).standard_normal((count, 4)).astype(np.float32)


async def test_every_kind_of_local_source(tmp_path: Path) -> None:
    path = tmp_path / "affine.onnx"
    path.write_bytes(affine())
    async with tm.Runtime() as runtime:
        for source, told in (
            (path, str(path)),
            (str(path), str(path)),
            (affine(), None),
            (io.BytesIO(affine()), None),
            (onnx.load_from_string(affine()), None),
        ):
            model = await runtime.load(source)
            assert model.source == told
            assert model.node_count == 3
            compiled = await runtime.compile(model)
            x = rows(2)
            np.testing.assert_allclose((await compiled.run({"x": x}))["y"], expected(x), rtol=1e-5, atol=1e-6)
            await compiled.aclose()
        with pytest.raises(tm.InvalidModel, match="no such file"):
            await runtime.load("missing.onnx")


async def test_a_folder_with_one_model(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(affine())
    bus = Telemetry()
    async with tm.Runtime(telemetry=bus) as runtime, Recorder(bus, "transmuter") as recorder:
        model = await runtime.load(tmp_path)
        assert model.source == str(tmp_path / "model.onnx")
        assert recorder.names() == ["transmuter.load.start", "transmuter.load.stop"]  # no Hub events


async def test_a_scripted_run_emits_what_the_contract_says(tmp_path: Path) -> None:
    path = tmp_path / "affine.onnx"
    path.write_bytes(affine())
    async with tm.Runtime() as runtime, Recorder(runtime.telemetry) as recorder:
        compiled = await runtime.compile(path, {"x": tm.Spec((2, 4), "float32")}, cache_size=1)
        assert recorder.names() == [
            "transmuter.load.start",
            "transmuter.load.stop",
            "transmuter.compile.start",
            "transmuter.segment.compile.start",
            "transmuter.segment.compile.stop",
            "transmuter.actor.started",
            "transmuter.compile.stop",
        ]
        events = {event.name: event for event in recorder.events}
        assert events["transmuter.load.stop"].metadata["opset"] == 17
        assert events["transmuter.compile.stop"].metadata["graph_break"] is False
        assert events["transmuter.compile.stop"].metadata["platform"] == "cpu"
        segment = events["transmuter.segment.compile.stop"]
        assert segment.metadata["parent"] == events["transmuter.compile.start"].metadata["span"]
        assert segment.metadata["shapes"][0][0] == "x"
        assert (segment.metadata["position"], segment.metadata["stop"], segment.metadata["compiled"]) == (
            0,
            "end",
            True,
        )
        assert (segment.metadata["reason"], segment.metadata["disk_cache"], segment.metadata["host_values"]) == (
            None,
            None,
            [],
        )

        recorder.clear()
        await compiled.run({"x": rows(2)})  # the kept function
        assert recorder.names() == ["transmuter.call.start", "transmuter.call.stop"]
        recorder.clear()
        await compiled.run({"x": rows(3)})  # another shape: a miss
        assert recorder.names() == [
            "transmuter.call.start",
            "transmuter.cache.miss",
            "transmuter.segment.compile.start",
            "transmuter.segment.compile.stop",
            "transmuter.call.stop",
        ]
        call = recorder.events[0].metadata["span"]
        assert {event.metadata.get("call", call) for event in recorder.events} == {call}
        stop = recorder.events[-1]
        assert stop.metadata["tier"] == "compiled"
        assert 0 < stop.measurements["compiling"] < stop.measurements["duration"]
        assert stop.measurements["queued"] >= 0
        recorder.clear()
        await compiled.run({"x": rows(3)})
        assert recorder.names() == ["transmuter.call.start", "transmuter.cache.hit", "transmuter.call.stop"]
        recorder.clear()
        await compiled.run({"x": rows(5)})  # evicts
        assert sorted(recorder.names()) == [
            "transmuter.cache.evict",
            "transmuter.cache.miss",
            "transmuter.call.start",
            "transmuter.call.stop",
            "transmuter.segment.compile.start",
            "transmuter.segment.compile.stop",
        ]
        (evicted,) = recorder.named("transmuter.cache.evict")
        assert evicted.metadata["shapes"][0][1][0] == (3, 4)
        assert evicted.metadata["cache_size"] == 1
        recorder.clear()
        await compiled.warm({"x": tm.Spec((6, 4), "float32")})
        assert [event.metadata.get("background") for event in recorder.named("transmuter.segment.compile.stop")] == [
            True
        ]
        recorder.clear()
        with pytest.raises(tm.InputError):
            await compiled.run({"x": np.zeros((2, 5), np.float32)})
        assert recorder.names() == ["transmuter.call.start", "transmuter.call.exception"]
        assert recorder.events[1].metadata["kind"] == "error"
        recorder.clear()
        await runtime.memory_statistics()
        await compiled.aclose()
        assert recorder.names() == [*["transmuter.memory.stats"] * len(jax.local_devices()), "transmuter.actor.stopped"]


async def test_a_break_is_told_and_every_event_carries_what_the_catalogue_says() -> None:
    async with tm.Runtime() as runtime, Recorder(runtime.telemetry) as recorder:
        compiled = await runtime.compile(breaking(), {"x": tm.Spec((4,), "float32")})
        assert compiled.graph_break is True
        x = np.array([1, -2, 3, -4], np.float32)
        for _ in range(2):
            np.testing.assert_array_equal((await compiled.run({"x": x}))["y"], [2, 6])
        (first, second) = recorder.named("transmuter.break.stop")
        assert (first.metadata["op_type"], first.metadata["node"], first.metadata["position"]) == ("NonZero", "find", 1)
        assert first.metadata["call"] != second.metadata["call"]
        assert first.metadata["parent"] == first.metadata["call"]
        with anyio.CancelScope() as scope:
            scope.cancel()
            await compiled.run({"x": x})
        (cancelled,) = recorder.named("transmuter.call.exception")
        assert cancelled.metadata["kind"] == "cancelled"
        with pytest.raises(tm.InvalidModel):
            await runtime.load(b"not a model")
        await runtime.memory_statistics()
        await compiled.aclose()
        starts: dict[int, str] = {}
        for event in recorder.events:
            kind = CATALOGUE[event.name]
            assert set(kind.measurements) <= set(event.measurements), event
            assert set(kind.metadata) <= set(event.metadata), event
            for value in event.measurements.values():
                assert isinstance(value, (int, float))
            span = event.metadata.get("span")
            if event.name.endswith(".start"):
                assert span not in starts
                starts[span] = event.name.removesuffix(".start")
            elif span is not None:
                assert starts.pop(span) == event.name.rpartition(".")[0]
        assert starts == {}  # each span ends once


async def test_eager_gives_call_events_only() -> None:
    async with tm.Runtime() as runtime, Recorder(runtime.telemetry, "transmuter") as recorder:
        compiled = await runtime.compile(affine(), {"x": tm.Spec((2, 4), "float32")}, compiler="eager")
        recorder.clear()
        x = rows(2)
        np.testing.assert_allclose((await compiled.run({"x": x}))["y"], expected(x), rtol=1e-5, atol=1e-6)
        assert recorder.names() == ["transmuter.call.start", "transmuter.call.stop"]
        assert recorder.events[1].metadata["tier"] == "interpreted"


async def test_device_outputs_and_read_only_numpy() -> None:
    async with tm.Runtime() as runtime:
        compiled = await runtime.compile(affine())
        x = rows(2)
        on_device = (await compiled.run({"x": x}, device=True))["y"]
        assert isinstance(on_device, jax.Array)
        outputs = await compiled.run({"x": tm.device_put(x)})
        assert not outputs["y"].flags.writeable
        np.testing.assert_array_equal(outputs["y"], np.asarray(on_device))


async def test_callers_in_many_tasks_and_threads() -> None:
    async with tm.Runtime() as runtime:
        compiled = await runtime.compile(affine(), max_concurrency=2)
        results: dict[int, np.ndarray] = {}

        async def one(count: int) -> None:
            results[count] = (await compiled.run({"x": rows(count)}))["y"]

        async def two(count: int) -> None:
            results[count] = await anyio.to_thread.run_sync(lambda: compiled.call_from_thread({"x": rows(count)})["y"])

        async with anyio.create_task_group() as group:
            for count in range(1, 7):
                group.start_soon(one, count)
                group.start_soon(two, count + 10)
        for count, result in results.items():
            np.testing.assert_allclose(result, expected(rows(count)), rtol=1e-5, atol=1e-6)
        statistics = await runtime.statistics()
        assert statistics.actors[0].calls == 12
        assert statistics.actors[0].peak_running <= 2
        assert statistics.loading == 0


async def test_held_compiler_holds_real_compiles() -> None:
    async with tm.Runtime() as runtime, Recorder(runtime.telemetry) as recorder:
        compiled = await runtime.compile(affine())
        with HeldCompiler(compiled) as held:
            answers: list[object] = []

            async def one(count: int) -> None:
                try:
                    answers.append((await compiled.run({"x": rows(count)}))["y"].shape)
                except RuntimeError as error:
                    answers.append(str(error))

            async with anyio.create_task_group() as group:
                group.start_soon(one, 2)
                group.start_soon(one, 2)
                await held.wait_started()
                assert held.finished == 0
                assert held.started[0][0] == 0
                held.fail(RuntimeError("out of registers"))
            assert answers == ["out of registers"] * 2
            assert [event.metadata["kind"] for event in recorder.named("transmuter.segment.compile.exception")] == [
                "error"
            ]
            answers.clear()
            async with anyio.create_task_group() as group:
                group.start_soon(one, 3)
                await held.wait_started(2)
                held.release()
            await held.wait_finished(2)
            assert answers == [(3, 3)]
            held.hold()


async def test_leaving_answers_everyone_and_leaves_nothing() -> None:
    answers: list[BaseException] = []
    async with anyio.create_task_group() as outside, tm.Runtime() as runtime:
        compiled = await runtime.compile(affine())
        held = HeldCompiler(compiled).__enter__()

        async def one() -> None:
            try:
                await compiled.run({"x": rows(2)})
            except tm.ActorStopped as error:
                answers.append(error)

        async def listen() -> None:
            async with runtime.telemetry.subscribe() as events:
                async for _ in events:
                    pass
            answers.append(StopAsyncIteration())

        outside.start_soon(listen)
        for _ in range(3):
            outside.start_soon(one)
        await held.wait_started()
        outside.start_soon(release_later, answers, held)
    assert len(answers) == 4
    assert not own_threads()
    with pytest.raises(tm.ActorStopped):
        await compiled.run({"x": rows(2)})
    with pytest.raises(tm.ActorStopped, match="runtime was closed"):
        await runtime.load(affine())


class Slow(io.BytesIO):
    """A file whose reading waits."""

    def __init__(self, data: bytes, go: threading.Event) -> None:
        super().__init__(data)
        self.go = go

    def read(self, *size: int) -> bytes:
        self.go.wait()
        return super().read(*size)


async def test_a_load_is_answered_when_the_runtime_is_left() -> None:
    go = threading.Event()
    answers: list[object] = []
    async with (
        anyio.create_task_group() as outside,
        tm.Runtime() as runtime,
        Recorder(runtime.telemetry, "transmuter.load") as recorder,
    ):

        async def one() -> None:
            try:
                await runtime.load(Slow(affine(), go))
            except tm.ActorStopped as error:
                answers.append(str(error))
            finally:
                go.set()

        outside.start_soon(one)
        while not recorder.events:
            await anyio.lowlevel.checkpoint()
    assert answers == ["the runtime was closed before it was loaded; enter a new one"]
    assert not own_threads()


async def release_later(answers: list[BaseException], held: HeldCompiler) -> None:
    """Everyone was answered before the compile ends: only then let it end."""
    while len(answers) < 3:
        await anyio.lowlevel.checkpoint()
    held.release()


async def test_a_drained_runtime_finishes_what_was_accepted() -> None:
    async with tm.Runtime() as runtime:
        compiled = await runtime.compile(affine())
        results: list[object] = []

        async def one(count: int) -> None:
            results.append((await compiled.run({"x": rows(count)}))["y"].shape[0])

        async with anyio.create_task_group() as group:
            for count in (1, 2, 3):
                group.start_soon(one, count)
            await anyio.wait_all_tasks_blocked()
            await runtime.aclose(drain=True)
        assert sorted(results) == [1, 2, 3]


async def test_the_users_own_error_leaves_the_block_as_it_is() -> None:
    with pytest.raises(KeyError, match="mine"):
        async with tm.Runtime() as runtime:
            await runtime.compile(affine())
            raise KeyError("mine")
    assert not own_threads()


async def test_cancelling_the_block_ends_it() -> None:
    with anyio.move_on_after(0.05) as scope:
        async with tm.Runtime() as runtime:
            await runtime.compile(affine())
            await anyio.sleep_forever()
    assert scope.cancelled_caught
    assert not own_threads()


async def test_a_cancelled_compile_leaves_no_actor() -> None:
    async with tm.Runtime() as runtime:
        with anyio.CancelScope() as scope:
            scope.cancel()
            await runtime.compile(affine(), {"x": tm.Spec((2, 4), "float32")})
        assert scope.cancelled_caught
        while (await runtime.statistics()).actors:
            await anyio.lowlevel.checkpoint()


async def test_an_actor_that_keeps_crashing_takes_the_runtime_with_it() -> None:
    with pytest.raises(tm.ActorStopped, match="crashed 4 times"):
        async with tm.Runtime() as runtime:
            compiled = await runtime.compile(affine())
            while True:
                compiled._actor.crash(RuntimeError("a defect"))
                await anyio.lowlevel.checkpoint()
    assert not own_threads()


async def test_weights_are_given_back() -> None:
    async with tm.Runtime() as runtime:
        model = await runtime.load(affine())
        compiled = await runtime.compile(model, {"x": tm.Spec((2, 4), "float32")})
        actor = compiled._actor
        assert isinstance(actor, Actor)
        programs = [weakref.ref(segment.program) for segment in actor._cache.segments() if segment.program is not None]
        assert len(programs) == 1
        await compiled.aclose()
        gc.collect()
        assert [program() for program in programs] == [None]
        assert actor.prepared is not None
        assert actor.prepared.weight_bytes() == 0


async def test_misuse_is_named() -> None:
    with pytest.raises(tm.MisuseError, match="was not entered"):
        await tm.Runtime().load(affine())
    with pytest.raises(ValueError, match="memory_limit"):
        tm.Runtime(memory_limit=-1)
    with pytest.raises(ValueError, match="precision"):
        tm.Runtime(precision="low")
    async with tm.Runtime() as runtime:
        with pytest.raises(tm.MisuseError, match="once"):
            await runtime.__aenter__()
        with pytest.raises(ValueError, match="prepare"):
            await runtime.load(affine(), prepare="fast")
        with pytest.raises(ValueError, match="max_concurrency"):
            await runtime.compile(affine(), max_concurrency=0)
        wrong: Any  # on purpose
        for wrong in ("2", 1.5, True):
            with pytest.raises(TypeError, match=f"max_concurrency={wrong!r} is no whole number"):
                await runtime.compile(affine(), max_concurrency=wrong)
        for wrong in ("yes", None, 2):
            with pytest.raises(ValueError, match=f"autotune={wrong!r} is not one of False, True"):
                await runtime.compile(affine(), autotune=wrong)
        with pytest.raises(ValueError, match="cache_size"):
            await runtime.compile(affine(), cache_size=0)
        with pytest.raises(ValueError, match="compile_after"):
            await runtime.compile(affine(), cold="interpret", compile_after=0)
        with pytest.raises(tm.MisuseError, match='add cold="interpret"'):
            await runtime.compile(affine(), compile_after=2)
        for local in (affine(), "./model.onnx"):
            with pytest.raises(tm.InputError, match="revision"):
                await runtime.load(local, revision="main")
        with pytest.raises(tm.InputError, match="no inputs of the model"):
            await runtime.compile(affine(), static_inputs=["z"])
        with pytest.raises(tm.MisuseError, match="run_sync would block"):
            tm.run_sync(affine(), {"x": rows(1)})
        await runtime.compile(affine(), name="one")
        with pytest.raises(tm.MisuseError, match="an actor named 'one'"):
            await runtime.compile(affine(), name="one")
        errors: list[BaseException] = []

        async def elsewhere() -> None:
            try:
                await runtime.load(affine())
            except tm.MisuseError as error:
                errors.append(error)

        await anyio.to_thread.run_sync(lambda: anyio.run(elsewhere))
        assert "used from another one" in str(errors[0])


def heavy(seed: int) -> bytes:
    """y = x · w, w float32 (512, 256): 512 KiB."""
    w = np.random.default_rng(seed).standard_normal((512, 256)).astype(np.float32)
    return model_bytes([helper.make_node("MatMul", ["x", "w"], ["y"])], {"x": ["n", 512]}, {"y": ["n", 256]}, w=w)


async def test_the_memory_budget_takes_from_the_idle_and_gives_back() -> None:
    size = 512 * 256 * 4
    x = np.random.default_rng(9).standard_normal((2, 512)).astype(np.float32)
    async with (
        tm.Runtime(memory_limit=2 * size) as runtime,
        Recorder(runtime.telemetry, "transmuter.memory") as recorder,
    ):
        models = [
            await runtime.compile(heavy(seed), {"x": tm.Spec((2, 512), "float32")}, name=f"m{seed}")
            for seed in range(2)
        ]
        assert recorder.events == []
        models.append(await runtime.compile(heavy(2), {"x": tm.Spec((2, 512), "float32")}, name="m2"))
        with anyio.fail_after(5):
            while len(recorder.events) < 2:  # a run thread does what the budget asks of it
                await anyio.lowlevel.checkpoint()
        told = [(e.name.rpartition(".")[2], e.metadata["actor"], e.metadata["what"]) for e in recorder.events]
        assert told == [("release", "m0", "programs"), ("release", "m0", "weights")]
        assert recorder.events[-1].measurements["bytes"] == size
        held = {each.name: each.weight_bytes for each in (await runtime.statistics()).actors}
        assert held == {"m0": 0, "m1": size, "m2": size}
        recorder.clear()
        for seed, compiled in enumerate(models):  # all answer as before
            w = np.random.default_rng(seed).standard_normal((512, 256)).astype(np.float32)
            np.testing.assert_allclose((await compiled.run({"x": x}))["y"], x @ w, rtol=1e-4, atol=1e-4)
        restored = [e for e in recorder.named("transmuter.memory.restore") if e.metadata["actor"] == "m0"]
        assert {e.metadata["what"]: e.measurements["bytes"] for e in restored}["weights"] == size
        with anyio.fail_after(5):
            while sum(each.weight_bytes for each in (await runtime.statistics()).actors) > 2 * size:
                await anyio.lowlevel.checkpoint()


async def test_log_compiles_logs_one_line_for_each() -> None:
    lines: list[tuple[str, str, dict]] = []

    class Logger:
        def info(self, event: str, **facts: object) -> None:
            lines.append((threading.current_thread().name, event, facts))

        warning = info

    async with tm.Runtime() as runtime:
        runtime.log_compiles(Logger())
        compiled = await runtime.compile(affine())
        await compiled.run({"x": rows(2)})
        await compiled.run({"x": rows(2)})
        with pytest.raises(tm.InputError):
            await compiled.run({})
    assert [event for _, event, _ in lines] == [
        "transmuter.compile.stop",
        "transmuter.cache.miss",
        "transmuter.segment.compile.stop",
        "transmuter.call.exception",
    ]
    assert all(name.startswith("transmuter-log") for name, _, _ in lines)
    assert lines[2][2]["duration_ms"] > 0
    assert lines[3][2]["reason"].startswith("InputError: the inputs do not fit")
    assert not own_threads()


async def test_a_logger_that_fails_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        def info(self, event: str, **facts: object) -> None:
            raise OSError("no space left on device")

    async with tm.Runtime() as runtime:
        runtime.log_compiles(Broken())
        compiled = await runtime.compile(affine())
        for count in (1, 2):
            await compiled.run({"x": rows(count)})
    assert [record.message for record in caplog.records if "log_compiles" in record.message] == [
        "the logger given to log_compiles failed; further failures are not told"
    ]
    assert not own_threads()


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_forked_child_is_told(backend: str) -> None:
    script = textwrap.dedent(
        f"""
        import os, sys, anyio, numpy as np
        import transmuter_async as tm
        from tests.test_runtime import affine, rows

        async def main():
            async with tm.Runtime() as runtime:
                compiled = await runtime.compile(affine())
                child = os.fork()
                if child == 0:
                    code = 1
                    try:
                        try:
                            await compiled.run({{"x": rows(1)}})
                        except tm.MisuseError as error:
                            assert "its fork" in str(error), error
                            try:
                                await runtime.load(affine())
                            except tm.MisuseError as error:
                                assert "its fork" in str(error), error
                                code = 0
                    finally:
                        os._exit(code)
                assert os.waitpid(child, 0)[1] == 0
                await compiled.run({{"x": rows(1)}})
        anyio.run(main, backend={backend!r})
        print("fine")
        """
    )
    root = Path(__file__).resolve().parents[1]
    done = subprocess.run(  # noqa: PLW1510 - the output tells more than the code
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
    )
    assert done.stdout.strip() == "fine", done.stderr


@pytest.mark.compiles_itself
def test_run_sync() -> None:
    x = rows(3)
    np.testing.assert_allclose(tm.run_sync(affine(), {"x": x})["y"], expected(x), rtol=1e-5, atol=1e-6)
    with pytest.raises(tm.MisuseError, match="local files only"):
        tm.run_sync("org/name", {})
    with pytest.raises(tm.InputError):
        tm.run_sync(affine(), {"x": np.zeros(3, np.float32)})
    values = np.array([1, -1, 2], np.float32)
    np.testing.assert_array_equal(tm.run_sync(breaking(), {"x": values})["y"], [2, 4])


async def test_forty_sleepers_in_the_default_limiter_do_not_stop_a_model() -> None:
    wake = threading.Event()
    async with tm.Runtime() as runtime:
        compiled = await runtime.compile(affine(), {"x": tm.Spec((2, 4), "float32")})
        async with anyio.create_task_group() as group:
            for _ in range(40):
                group.start_soon(anyio.to_thread.run_sync, wake.wait)
            await anyio.wait_all_tasks_blocked()
            try:
                with anyio.fail_after(5):
                    await compiled.run({"x": rows(2)})
                    await runtime.load(affine())
            finally:
                wake.set()


def test_supported_operators_and_device_put() -> None:
    table = tm.supported_operators()
    assert table["ai.onnx"]["Reshape"][0] in (1, 5)
    put = tm.device_put({"ids": np.array([2**40])})
    assert put["ids"].dtype == np.int64
    assert int(np.asarray(put["ids"])[0]) == 2**40


@pytest.mark.compiles_itself
async def test_to_jax_tells_the_bus_it_was_given() -> None:
    bus = Telemetry()
    async with tm.Runtime() as runtime, Recorder(bus) as recorder:
        model = await runtime.load(affine())
        apply, params = await anyio.to_thread.run_sync(lambda: tm.to_jax(model, telemetry=bus))
        x = rows(2)
        result = await anyio.to_thread.run_sync(lambda: np.asarray(apply(params, {"x": x})["y"]))
        np.testing.assert_allclose(result, expected(x), rtol=1e-5, atol=1e-6)
        assert recorder.names() == ["transmuter.run.start", "transmuter.run.stop"]
