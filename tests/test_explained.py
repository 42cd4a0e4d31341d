"""What a compiled model tells about itself: why a call would compile, where it breaks and what that costs, warnings."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import warnings
import xml.etree.ElementTree as ET
from pathlib import Path

import anyio
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import transmuter_async as tm
from tests.actors.fakes import own_threads
from tests.test_runtime import affine, breaking, model_bytes, rows
from transmuter_async.testing import HeldCompiler, Recorder


async def test_why_tells_without_running() -> None:
    async with tm.Runtime() as runtime, Recorder(runtime.telemetry) as recorder:
        compiled = await runtime.compile(affine(), {"x": tm.Spec((2, 4), "float32")})
        recorder.clear()
        assert (await compiled.why({"x": rows(2)})).hit == "kept"
        missed = await compiled.why({"x": rows(5)})
        assert isinstance(missed, tm.Why)
        assert missed.hit is None
        assert [(each.dimension, each.cached, each.called) for each in missed.differences] == [("n", 2, 5)]
        assert "batching=Batching(buckets={'n': [8]})" in str(missed)
        with pytest.raises(tm.InputError):
            await compiled.why({"x": np.zeros((2, 5), np.float32)})
        assert recorder.events == []
        await compiled.run({"x": rows(5)})
        assert (await compiled.why({"x": rows(5)})).hit == "cached"
        await compiled.aclose()
        with pytest.raises(tm.ActorStopped):
            await compiled.why({"x": rows(5)})


async def test_an_explanation_carries_what_was_measured() -> None:
    x = np.array([1, -2, 3, -4], np.float32)
    async with tm.Runtime() as runtime, Recorder(runtime.telemetry) as recorder:
        compiled = await runtime.compile(breaking(), min_segment_nodes=1)
        for _ in range(5):
            await compiled.run({"x": x})
        explanation = await compiled.explain()
        (found,) = explanation.breaks
        assert found.count == 5
        spans = [event.measurements["duration"] for event in recorder.named("transmuter.break.stop")]
        assert 0 < found.nanoseconds <= sum(spans)
        assert found.gain is not None
        assert "µs a call" in found.gain
        compiles = [event.measurements["duration"] for event in recorder.named("transmuter.segment.compile.stop")]
        assert 0 < sum(place.compile_nanoseconds for place in explanation.places) <= sum(compiles)
        calls = [event.measurements["duration"] for event in recorder.named("transmuter.call.stop")]
        ran = sum(place.nanoseconds for place in explanation.places)
        assert [place.runs for place in explanation.places] == [5, 5]
        assert 0 < ran + found.nanoseconds < sum(calls)
        picture = ET.fromstring(explanation.svg())
        assert "reached 5 times" in "".join(picture.itertext())
        await compiled.clear_cache()
        assert (await compiled.explain()).places == ()


async def test_concurrent_calls_are_measured_too() -> None:
    async with tm.Runtime() as runtime:
        compiled = await runtime.compile(affine(), max_concurrency=3)
        async with anyio.create_task_group() as group:
            for _ in range(30):
                group.start_soon(compiled.run, {"x": rows(2)})
        (place,) = (await compiled.explain()).places
        assert place.runs == 30


def fixed(nodes: list[onnx.NodeProto], dims: list[object] | None = None) -> bytes:
    return model_bytes(nodes, {"x": [4] if dims is None else dims}, {"y": [None]}, zero=np.zeros((), np.float32))


PLAIN = [helper.make_node("Abs", ["x"], ["y"])]
BROKEN = [helper.make_node("Abs", ["x"], ["a"]), helper.make_node("Unique", ["a"], ["y"], "distinct")]


@pytest.mark.parametrize(
    ("model", "found"),
    [(fixed(PLAIN), False), (fixed(BROKEN), True), (fixed(PLAIN, ["n"]), None), (fixed(BROKEN, ["n"]), None)],
    ids=["plain", "broken", "open", "open-broken"],
)
async def test_declared_dimensions_tell_of_breaks_without_a_compile(model: bytes, found: bool | None) -> None:
    async with tm.Runtime() as runtime, Recorder(runtime.telemetry) as recorder:
        compiled = await runtime.compile(model)
        assert compiled.graph_break is found
        assert recorder.named("transmuter.compile.stop")[0].metadata["graph_break"] is found
        assert not recorder.named("transmuter.segment.compile.start")
        await compiled.run({"x": np.array([1, -1, 2, 2], np.float32)})
        assert compiled.graph_break is (found if found is not None else b"Unique" in model)


async def test_a_value_that_the_graph_reads_leaves_it_open() -> None:
    """The Reshape target is an input: only a call says what it is."""
    graph = helper.make_graph(
        [helper.make_node("Reshape", ["x", "s"], ["y"])],
        "g",
        [
            helper.make_tensor_value_info("x", TensorProto.FLOAT, [4]),
            helper.make_tensor_value_info("s", TensorProto.INT64, [2]),
        ],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8).SerializeToString()
    async with tm.Runtime() as runtime:
        compiled = await runtime.compile(model)
        assert compiled.graph_break is None
        y = (await compiled.run({"x": np.arange(4, dtype=np.float32), "s": np.array([2, 2])}))["y"]
        assert y.tolist() == [[0, 1], [2, 3]]
        assert compiled.graph_break is False


async def test_a_refused_break_is_refused_before_any_call() -> None:
    async with tm.Runtime() as runtime:
        with pytest.raises(tm.BreakRefused, match="distinct"):
            await runtime.compile(fixed(BROKEN), breaks="error")
        assert (await runtime.statistics()).actors == ()


LOG = [helper.make_node("Log", ["x"], ["y"], "log")]


@pytest.mark.parametrize("cold", ["compile", "interpret"])
async def test_a_nonfinite_value_warns_where_the_call_is_awaited(cold: str) -> None:
    async with tm.Runtime() as runtime:
        compiled = await runtime.compile(fixed(LOG), nonfinite="warn", cold=cold)
        with HeldCompiler(compiled) as held:
            if cold == "compile":
                held.release()
            with pytest.warns(tm.NonFiniteWarning, match="'log'") as caught:
                y = (await compiled.run({"x": np.array([1, 0, 1, 1], np.float32)}))["y"]
            assert [str(Path(each.filename)) for each in caught] == [__file__]
            assert np.isneginf(y[1])
            held.release()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            await compiled.run({"x": np.ones(4, np.float32)})


async def test_a_warning_made_an_error_is_the_callers_and_harms_no_actor() -> None:
    bad = np.array([1, 0, 1, 1], np.float32)
    async with tm.Runtime() as runtime:
        compiled = await runtime.compile(fixed(LOG), nonfinite="warn")
        await compiled.run({"x": np.ones(4, np.float32)})
        for _ in range(3):  # pytest makes warnings errors already
            with pytest.raises(tm.NonFiniteWarning, match="'log'"):
                await compiled.run({"x": bad})

        def call() -> str:
            with pytest.raises(tm.NonFiniteWarning) as caught:
                compiled.call_from_thread({"x": bad})
            return str(caught.value)

        assert "'log'" in await anyio.to_thread.run_sync(call)
        statistics = await compiled.statistics()
        assert (statistics.restarts, statistics.answered, compiled.state) == (0, 5, "running")
        await compiled.run({"x": np.ones(4, np.float32)})
    assert not own_threads()


@pytest.mark.parametrize("flags", [[], ["-W", "error"]], ids=["default", "error"])
def test_warnings_of_a_process(flags: list[str], tmp_path: Path) -> None:
    (tmp_path / "log.onnx").write_bytes(fixed(LOG))
    script = tmp_path / "main.py"
    script.write_text(
        textwrap.dedent(
            """
            import anyio, numpy as np
            import transmuter_async as tm

            async def main():
                async with tm.Runtime() as runtime:
                    compiled = await runtime.compile("log.onnx", nonfinite="warn")
                    for _ in range(3):
                        try:
                            await compiled.run({"x": np.zeros(4, np.float32)})  # here
                        except tm.NonFiniteWarning:
                            print("raised")
                    print((await compiled.statistics()).restarts)
            anyio.run(main)
            """
        )
    )
    root = str(Path(__file__).resolve().parents[1])
    done = subprocess.run(  # noqa: PLW1510 - the output tells more than the code
        [sys.executable, *flags, str(script)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": root},
    )
    if flags:
        assert done.stdout.split() == ["raised"] * 3 + ["0"], done.stderr
    else:
        assert done.stdout.split() == ["0"], done.stderr
        assert done.stderr.count("NonFiniteWarning") == 1  # once for the line, as Python does
        assert "main.py:10: NonFiniteWarning" in done.stderr
