"""What it took to make programs, and which of them are made at the same time."""

from __future__ import annotations

from pathlib import Path

import anyio
import numpy as np
import pytest
from onnx import helper

import transmuter_async as tm
from tests.test_runtime import affine, breaking, model_bytes, rows
from transmuter_async.testing import HeldCompiler, Recorder


def chain(length: int) -> bytes:
    """So many Tanh of x float32 (n, 4)."""
    names = ["x", *(f"t{index}" for index in range(1, length)), "y"]
    nodes = [helper.make_node("Tanh", [before], [after]) for before, after in zip(names, names[1:], strict=False)]
    return model_bytes(nodes, {"x": ["n", 4]}, {"y": ["n", 4]})


async def test_each_program_tells_its_size_and_what_it_took() -> None:
    operations = {}
    for length in (5, 50):
        async with tm.Runtime() as runtime, Recorder(runtime.telemetry) as recorder:
            compiled = await runtime.compile(chain(length))
            for count in (1, 2):
                await compiled.run({"x": rows(count)})
            made = (await compiled.statistics()).cache.made
            assert [dict(each.shapes)["x"][0] for each in made] == [(1, 4), (2, 4)]
            spans = [event.measurements["duration"] for event in recorder.named("transmuter.segment.compile.stop")]
            for each, span in zip(made, spans, strict=True):
                took = each.making
                assert min(took.planning, took.tracing, took.compiling) > 0
                assert took.planning + took.tracing + took.compiling <= span
                assert each.code_bytes >= 0  # jax does not tell it everywhere
            assert made[0].making.operations == made[1].making.operations
            operations[length] = made[0].making.operations
            explanation = await compiled.explain(verbose=True)
            assert [row.making for row in explanation.segments] == [each.making for each in made]
            assert f"{operations[length]} operations; planned in" in str(explanation)
            assert "operations" not in str(await compiled.explain())
    assert operations[50] - operations[5] == 45  # one for each Tanh


async def test_what_is_no_program_has_nothing_to_tell() -> None:
    async with tm.Runtime() as runtime:
        compiled = await runtime.compile(breaking())
        await compiled.run({"x": np.array([1, -2], np.float32)})
        first, second = (await compiled.explain()).segments
        assert first.making is not None
        assert (second.kind, second.making) == ("host", None)
        assert len((await compiled.statistics()).cache.made) == 1


async def test_a_program_from_disk_knows_its_size(tmp_path: Path) -> None:
    found = []
    for _ in range(2):
        async with tm.Runtime() as runtime:
            compiled = await runtime.compile(affine(), cache_dir=tmp_path)
            await compiled.run({"x": rows(3)})
            (made,) = (await compiled.statistics()).cache.made
            found.append(made.making)
            shown = str(await compiled.explain(verbose=True))
    assert found[0].operations == found[1].operations > 3
    assert found[0].compiling > 0
    assert (found[1].planning, found[1].tracing, found[1].compiling) == (0, 0, 0)
    assert "read from disk" in shown


async def test_warm_compiles_on_as_many_threads_as_it_may() -> None:
    async with tm.Runtime() as runtime:
        compiled = await runtime.compile(affine())
        compiled._actor._compile_threads.limit = 2  # type: ignore[union-attr] - whatever this machine has
        with HeldCompiler(compiled) as held:
            async with anyio.create_task_group() as group:
                group.start_soon(compiled.warm, [{"x": tm.Spec((count, 4), "float32")} for count in (1, 2, 3)])
                await held.wait_started(2)
                assert held.finished == 0  # both are held, at the same time
                assert len(held.started) == 2
                held.release(1)
                await held.wait_started(3)
                held.release()
        async with Recorder(runtime.telemetry) as recorder:
            for count in (1, 2, 3):
                await compiled.run({"x": rows(count)})
        assert len(recorder.named("transmuter.cache.hit")) == 3


@pytest.mark.parametrize("threads", [1, 3])
async def test_a_compile_for_each_core_at_once(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NPROC", str(threads))
    async with tm.Runtime() as runtime:
        compiled = await runtime.compile(affine())
        assert compiled._actor._compile_threads.limit == threads  # type: ignore[union-attr]


def long_breaking() -> bytes:
    """y = the elements of x whose 25-fold Sin is positive, their 25-fold Cos, float32 (n,): a program, a break, a program."""
    nodes = [helper.make_node("Sin", ["x"], ["s0"])]
    nodes += [helper.make_node("Sin", [f"s{index}"], [f"s{index + 1}"]) for index in range(24)]
    nodes.append(helper.make_node("Greater", ["s24", "zero"], ["mask"]))
    nodes.append(helper.make_node("Compress", ["x", "mask"], ["c0"], "select", axis=0))
    nodes += [helper.make_node("Cos", [f"c{index}"], [f"c{index + 1}"]) for index in range(24)]
    nodes.append(helper.make_node("Cos", ["c24"], ["y"]))
    return model_bytes(nodes, {"x": ["n"]}, {"y": ["k"]}, zero=np.zeros((), np.float32))


async def test_the_segments_of_a_call_are_compiled_at_the_same_time_where_values_are_given_ahead() -> None:
    x = np.array([1, -2, 3, -0.5, 2], np.float32)
    async with tm.Runtime() as runtime:
        compiled = await runtime.compile(long_breaking())
        compiled._actor._compile_threads.limit = 2  # type: ignore[union-attr]
        with HeldCompiler(compiled) as held:
            async with anyio.create_task_group() as group:
                group.start_soon(compiled.warm, {"x": x})
                await held.wait_started(2)
                assert held.finished == 0
                assert sorted(position for position, _ in held.started) == [0, 27]
                held.release()
        async with Recorder(runtime.telemetry) as recorder:
            found = (await compiled.run({"x": x}))["y"]
            await compiled.warm({"x": x})  # all there
        expected = x[x > 0].astype(np.float64)
        for _ in range(25):
            expected = np.cos(expected)
        np.testing.assert_allclose(found, expected, rtol=1e-5)
        assert [event.metadata["position"] for event in recorder.named("transmuter.cache.hit")] == [0, 27]
        assert not recorder.named("transmuter.cache.miss")
        assert not recorder.named("transmuter.segment.compile.start")
        assert (await compiled.statistics()).compiles == 2


async def test_a_graph_that_needs_no_program_is_warm() -> None:
    async with tm.Runtime() as runtime:
        model = model_bytes([helper.make_node("Unique", ["x"], ["y"], "distinct")], {"x": ["n"]}, {"y": ["k"]})
        compiled = await runtime.compile(model)
        await compiled.warm({"x": np.array([3, 1, 3], np.float32)})
        assert (await compiled.statistics()).compiles == 0


async def test_what_is_wrong_with_an_example_is_told_to_who_warms() -> None:
    async with tm.Runtime() as runtime:
        compiled = await runtime.compile(long_breaking())
        with pytest.raises(tm.InputError):
            await compiled.warm({"x": np.zeros((2, 2), np.float32)})
        strict = await runtime.compile(long_breaking(), breaks="error", name="strict")
        with pytest.raises(tm.BreakRefused):
            await strict.warm({"x": np.ones(3, np.float32)})
