"""What a compiled model takes: the memory of a process of its own, against the weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import transmuter_async as tm
from tests.benchmarks.heartbeat import large
from tests.benchmarks.sizes import layers, memory


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="only Linux tells a process's peak since a moment, in /proc")
@pytest.mark.parametrize(("write", "count"), [(large, 9), (layers, 27)], ids=["MatMul", "Conv, BatchNormalization and Gemm"])
def test_weights_are_there_once_while_they_are_loaded_and_after(write, count, tmp_path: Path) -> None:
    found = memory(tmp_path, write, count)
    assert found["prepared"] == pytest.approx(found["file"], rel=0.01)
    assert 140e6 < found["prepared"] < 180e6
    assert 0.9 < found["load_peak"] / found["prepared"] < 1.2
    assert 0.9 < found["first_peak"] / found["prepared"] < 1.25  # XLA's own takes some MB
    assert 0.9 < found["steady"] / found["prepared"] < 1.25


async def test_a_handle_shows_the_model_that_is_run(tmp_path: Path) -> None:
    path = tmp_path / "layers.onnx"
    layers(path, 1, width=256)
    x = np.random.default_rng(1).standard_normal((2, 128, 4, 4), np.float32)
    async with tm.Runtime() as runtime:
        compiled = await runtime.compile(path)
        want = (await compiled.run({"x": x}))["y"]
        model = compiled.model
        assert [value.name for value in model.inputs] == ["x"]
        assert [value.name for value in model.outputs] == ["y"]
        assert model.source == str(path)
        assert [node.op_type for node in model.graph.nodes].count("BatchNormalization") == 0
        again = await runtime.compile(model)
        np.testing.assert_array_equal((await again.run({"x": x}))["y"], want)
        loaded = await runtime.load(path)
        assert [node.op_type for node in loaded.graph.nodes].count("BatchNormalization") == 1
        third = await runtime.compile(loaded)
        np.testing.assert_allclose((await third.run({"x": x}))["y"], want, rtol=1e-5, atol=1e-6)
        before = {name: array.copy() for name, array in loaded.graph.initializers.items()}
        fourth = await runtime.compile(loaded, nonfinite="error")  # what was compiled took nothing from it
        np.testing.assert_allclose((await fourth.run({"x": x}))["y"], want, rtol=1e-4, atol=1e-5)
        for name, array in loaded.graph.initializers.items():
            np.testing.assert_array_equal(array, before[name])
        weights = model.graph.initializers
        assert isinstance(weights, dict)
        weights.clear()  # somebody's model is no way into a program
        np.testing.assert_allclose((await compiled.run({"x": x[:1]}))["y"], want[:1], rtol=1e-5, atol=1e-6)
