"""Cold calls: answered on the host form at once, their programs compiled behind, one at a time, after everything else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import numpy as np
import pytest

import transmuter_async as tm
from tests.actors.fakes import FakeCompiler, fake_model, own_threads
from tests.test_runtime import affine, breaking, expected, rows
from transmuter_async.actors import Compiled, compiles
from transmuter_async.telemetry import Telemetry
from transmuter_async.testing import HeldCompiler, Recorder

fakes = pytest.mark.compiles_itself  # the fake compiler's events are no compiles of jax


async def settled(compiled: Compiled) -> None:
    """Wait until nothing is compiled or installed any more."""
    with anyio.fail_after(10):
        while compiled._actor._book.current:
            await anyio.lowlevel.checkpoint()


async def tier(compiled: Compiled, recorder: Recorder, keys: str, x: int = 1) -> str:
    recorder.clear()
    assert await compiled.run({"x": x, "keys": keys}) == {"y": 100 + x}
    (stop,) = recorder.named("transmuter.call.stop")
    return str(stop.metadata["tier"])


def cold(compiler: FakeCompiler) -> FakeCompiler:
    compiler.cold = True
    return compiler


@fakes
async def test_a_cold_call_is_answered_while_its_program_is_held() -> None:
    bus = Telemetry()
    async with fake_model(telemetry=bus) as (compiled, compiler), Recorder(bus) as recorder:
        cold(compiler).compiles.shut()
        assert await tier(compiled, recorder, "a") == "interpreted"
        names = ["transmuter.call.start", "transmuter.cache.miss", "transmuter.call.stop"]
        assert [name for name in recorder.names() if "segment" not in name] == names
        assert recorder.named("transmuter.cache.miss")[0].metadata["cold"] is True
        await compiler.compiles.wait_came(1)
        for x in range(2, 5):
            assert await tier(compiled, recorder, "a", x) == "interpreted"
        compiler.compiles.open()
        await settled(compiled)
        (stop,) = recorder.named("transmuter.segment.compile.stop")
        assert stop.metadata["background"] is True
        assert "call" not in stop.metadata
        assert await tier(compiled, recorder, "a") == "compiled"
        assert await tier(compiled, recorder, "ab") == "mixed"
        await settled(compiled)
        assert await tier(compiled, recorder, "ab") == "compiled"
        assert compiler.compiles.came == [(0, "a"), (1, "b")]


@fakes
async def test_one_behind_at_a_time_after_calls_warm_and_installs() -> None:
    async with fake_model() as (compiled, compiler):
        cold(compiler).compiles.shut()
        for keys in "abc":
            await compiled.run({"x": 1, "keys": keys})
        await compiler.compiles.wait_came(1)
        assert compiler.compiles.came == [(0, "a")]
        compiled._actor._compile_threads.limit = 3  # type: ignore[union-attr]
        async with anyio.create_task_group() as group:
            group.start_soon(compiled.warm, [{"keys": "x"}, {"keys": "c"}])  # c was wanted already: it moves up
            await compiler.compiles.wait_came(3)
            compiler.compiles.let()
            while compiler.compiles.inside == 3:
                await anyio.lowlevel.checkpoint()
            await compiled.statistics()  # passes through the run thread, behind what is installed
            assert len(compiler.compiles.came) == 3  # others are compiled still
            compiler.compiles.open()
        await settled(compiled)
        order = [key for _, key in compiler.compiles.came]
        assert (order[0], sorted(order[1:3]), order[3:]) == ("a", ["c", "x"], ["b"])


@fakes
async def test_warm_does_not_wait_for_what_is_compiled_behind() -> None:
    async with fake_model() as (compiled, compiler):
        cold(compiler).compiles.shut()
        compiled._actor._compile_threads.limit = 2  # type: ignore[union-attr]
        await compiled.run({"x": 1, "keys": "a"})
        await compiler.compiles.wait_came(1)
        async with anyio.create_task_group() as group:
            group.start_soon(compiled.warm, {"keys": "b"})
            await compiler.compiles.wait_came(2)  # beside "a", which is still held
            compiler.compiles.open()
        await settled(compiled)


@fakes
async def test_a_shape_is_compiled_only_after_it_was_asked_for_so_often() -> None:
    async with fake_model(compile_after=3) as (compiled, compiler):
        cold(compiler)
        for keys in "abab":
            await compiled.run({"x": 1, "keys": keys})
        assert compiler.compiles.came == []
        await compiled.run({"x": 1, "keys": "a"})
        await settled(compiled)
        assert compiler.compiles.came == [(0, "a")]


@fakes
async def test_counts_take_bounded_memory_and_so_does_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiles, "WANTED", 5)
    monkeypatch.setattr(compiles, "BEHIND", 2)
    async with fake_model(compile_after=2) as (compiled, compiler):
        cold(compiler).compiles.shut()
        for keys in "abcdefghij":
            await compiled.run({"x": 1, "keys": keys})
        book = compiled._actor._book
        assert list(book._asked) == [hash((0, key)) for key in "fghij"]
        for keys in "fghij":
            await compiled.run({"x": 1, "keys": keys})
        await compiler.compiles.wait_came(1)
        assert [key for _, key in book.current] == list("fgh")  # one runs, two wait
        assert all(each.job.light for each in book.current.values())  # type: ignore[attr-defined]
        assert book._asked == {hash((0, "i")): 2, hash((0, "j")): 2}
        compiler.compiles.open()
        await settled(compiled)
        await compiled.run({"x": 1, "keys": "i"})
        await settled(compiled)
        assert [key for _, key in compiler.compiles.came] == list("fghi")


@fakes
async def test_a_failed_compile_behind_is_told_and_tried_again_after_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    bus = Telemetry()
    async with fake_model(telemetry=bus) as (compiled, compiler), Recorder(bus) as recorder:
        cold(compiler).failing["a"] = ValueError("XLA says no")
        for _ in range(3):
            assert await compiled.run({"x": 1}) == {"y": 101}  # nobody but the listener hears of it
            await settled(compiled)
        assert compiler.compiles.came == [(0, "a")]
        (told,) = recorder.named("transmuter.segment.compile.exception")
        assert str(told.metadata["reason"]) == "XLA says no"
        assert told.metadata["background"] is True
        monkeypatch.setattr(compiles, "RETRY", 0)
        del compiler.failing["a"]
        assert await tier(compiled, recorder, "a") == "interpreted"
        await settled(compiled)
        assert await tier(compiled, recorder, "a") == "compiled"


@fakes
async def test_closing_does_not_start_what_waits_behind() -> None:
    async with fake_model() as (compiled, compiler):
        cold(compiler).compiles.shut()
        for keys in "abc":
            await compiled.run({"x": 1, "keys": keys})
        await compiler.compiles.wait_came(1)
        async with anyio.create_task_group() as group:
            group.start_soon(compiled.aclose)
            await anyio.wait_all_tasks_blocked()
            compiler.compiles.open()
        assert compiler.compiles.came == [(0, "a")]
    assert not own_threads()


async def test_real_programs_are_swapped_in_behind_held_compiles() -> None:
    async with tm.Runtime() as runtime, Recorder(runtime.telemetry) as recorder:
        compiled = await runtime.compile(affine(), cold="interpret")
        with HeldCompiler(compiled) as held:
            for count in (2, 3, 2):
                y = (await compiled.run({"x": rows(count)}))["y"]
                np.testing.assert_allclose(y, expected(rows(count)), rtol=1e-5, atol=1e-6)
            await held.wait_started()
            assert [shapes[0][1][0] for _, shapes in held.started] == [(2, 4)]
            held.release()
            await settled(compiled)
        tiers = [event.metadata["tier"] for event in recorder.named("transmuter.call.stop")]
        assert tiers == ["interpreted"] * 3
        recorder.clear()
        for count in (2, 3):
            y = (await compiled.run({"x": rows(count)}))["y"]
            np.testing.assert_allclose(y, expected(rows(count)), rtol=1e-5, atol=1e-6)
        assert recorder.names() == ["transmuter.call.start", "transmuter.cache.hit", "transmuter.call.stop"] * 2


async def test_a_breaking_graph_goes_from_interpreted_over_mixed_to_compiled() -> None:
    x = np.array([1, -2, 3, -4], np.float32)
    async with tm.Runtime() as runtime, Recorder(runtime.telemetry) as recorder:
        compiled = await runtime.compile(breaking(), cold="interpret", min_segment_nodes=1)
        calls = []
        for _ in range(3):
            recorder_from = len(recorder.events)
            np.testing.assert_array_equal((await compiled.run({"x": x}))["y"], [2, 6])
            names = [event.name.removeprefix("transmuter.") for event in recorder.events[recorder_from:]]
            calls.append([name for name in names if not name.startswith("segment.")])
            await settled(compiled)
        around = ["call.start"], ["call.stop"]
        broke = ["break.start", "break.stop"]
        assert calls == [
            [*around[0], "cache.miss", *around[1]],
            [*around[0], "cache.hit", *broke, "cache.miss", *around[1]],
            [*around[0], "cache.hit", *broke, "cache.hit", *around[1]],
        ]
        tiers = [event.metadata["tier"] for event in recorder.named("transmuter.call.stop")]
        assert tiers == ["interpreted", "mixed", "compiled"]


async def test_two_hundred_shapes_asked_for_once_compile_nothing() -> None:
    async with tm.Runtime() as runtime, Recorder(runtime.telemetry, "transmuter.segment") as recorder:
        compiled = await runtime.compile(affine(), cold="interpret", compile_after=2)
        for count in range(1, 201):
            y = (await compiled.run({"x": rows(count)}))["y"]
            np.testing.assert_allclose(y, expected(rows(count)), rtol=1e-4, atol=1e-5)
        await settled(compiled)
        assert recorder.events == []
        assert (await compiled.statistics()).compiles == 0
        await compiled.run({"x": rows(7)})
        await settled(compiled)
        assert (await compiled.statistics()).compiles == 1


async def test_what_is_compiled_behind_reads_no_array_of_the_caller() -> None:
    """The caller may write to its arrays once it is answered: a static value is that of its call all the same."""
    async with tm.Runtime() as runtime:
        compiled = await runtime.compile(affine(), cold="interpret", static_inputs=["x"])
        with HeldCompiler(compiled) as held:
            x = np.repeat(rows(2), 4096, axis=0)  # above what is copied
            assert x.nbytes > tm.compiler.COPY_BYTES
            want = expected(x)
            await compiled.run({"x": x})
            await held.wait_started()
            before = x.copy()
            x[:] = 7
            held.release()
            await settled(compiled)
        outputs: dict[str, Any] = await compiled.run({"x": before})
        assert (await compiled.statistics()).hits == 1
        np.testing.assert_allclose(outputs["y"], want, rtol=1e-4, atol=1e-5)


async def test_what_was_compiled_behind_is_found_on_the_disk_by_calls_that_wait(tmp_path: Path) -> None:
    for cold in ("interpret", "compile"):
        async with tm.Runtime() as runtime, Recorder(runtime.telemetry) as recorder:
            compiled = await runtime.compile(affine(), cold=cold, cache_dir=tmp_path)
            await compiled.run({"x": rows(2)})
            await settled(compiled)
            (stop,) = recorder.named("transmuter.segment.compile.stop")
            assert stop.metadata["disk_cache"] == {"interpret": "miss", "compile": "hit"}[cold]
