"""The runtime and the Hub: sources that are repositories, external data, variants, events inside the load."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest

import transmuter_async as tm
from tests.hub.fake_hub import FakeHub, Lfs
from tests.hub.support import World
from tests.test_runtime import affine, expected, rows
from transmuter_async.hub import HubClient
from transmuter_async.telemetry import Telemetry
from transmuter_async.testing import Recorder


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with FakeHub() as fake:
        yield World(fake, tmp_path / "cache")


def external(folder: Path) -> dict[str, Lfs]:
    """The affine model with its weights beside it."""
    folder.mkdir()
    model = onnx.load_from_string(affine())
    onnx.save_model(
        model, folder / "model.onnx", save_as_external_data=True, location="model.onnx_data", size_threshold=0
    )
    return {f"onnx/{file.name}": Lfs(file.read_bytes()) for file in folder.iterdir()}


async def test_a_repository_is_loaded_with_its_external_data(world: World, tmp_path: Path) -> None:
    world.fake.repo().commit({**external(tmp_path / "made"), "onnx/model_fp16.onnx": Lfs(affine())})
    bus = Telemetry()
    client = HubClient(telemetry=bus, environment=world.environment())
    async with tm.Runtime(telemetry=bus, hub=client) as runtime, Recorder(bus) as recorder:
        model = await runtime.load("hf://org/m@main/onnx/model.onnx")
        assert model.source == ("hf", "org/m", "onnx/model.onnx")
        spans = [name for name in recorder.names() if not name.endswith("progress")]
        assert spans[0] == "transmuter.load.start"
        assert spans[-1] == "transmuter.load.stop"
        assert spans.count("transmuter.hub.download.stop") == 2
        assert spans.count("transmuter.hub.info.stop") == 1
        load = recorder.events[0].metadata["span"]
        inside = [
            e for e in recorder.events if e.name.startswith("transmuter.hub") and e.name.endswith((".start", ".stop"))
        ]
        assert {event.metadata["parent"] for event in inside} == {load}
        recorder.clear()
        compiled = await runtime.compile("org/m")
        assert [event.metadata["check"] for event in recorder.named("transmuter.hub.hit")] == ["etag"] * 2
        assert compiled.name == "m"
        x = rows(2)
        np.testing.assert_allclose((await compiled.run({"x": x}))["y"], expected(x), rtol=1e-5, atol=1e-6)
        assert recorder.named("transmuter.call.stop")[0].metadata["source"] == ("hf", "org/m", "onnx/model.onnx")
        fp16 = await runtime.load("org/m", variant="fp16")
        assert fp16.source == ("hf", "org/m", "onnx/model_fp16.onnx")
        assert {variant.file for variant in await runtime.variants("org/m")} == {
            "onnx/model.onnx",
            "onnx/model_fp16.onnx",
        }
        files = await runtime.download("org/m", ["onnx/model.onnx"])
        assert files["onnx/model.onnx"].is_file()
        recorder.clear()
        with pytest.raises(tm.HubError):
            await runtime.load("hf://org/m/missing.onnx")
        assert recorder.names()[-1] == "transmuter.load.exception"


async def test_a_path_is_never_a_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("models").mkdir()  # noqa: ASYNC240
    Path("models/affine.onnx").write_bytes(affine())  # noqa: ASYNC240
    async with tm.Runtime() as runtime:
        model = await runtime.load("models/affine.onnx")
        assert model.source == "models/affine.onnx"
        folder = await runtime.load("./models")
        assert folder.source == str(Path("models/affine.onnx"))
