"""What a load of a model needs: the graph, its external data, its variants, a local folder."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.hub.fake_hub import FakeRepo, Lfs
from tests.hub.support import World
from transmuter_async.errors import InvalidModel
from transmuter_async.hub import EntryNotFoundError, InvalidReferenceError
from transmuter_async.hub.listing import FileInfo, Listing
from transmuter_async.hub.variants import choose_variant, list_variants

GRAPH = b"graph:model.onnx_data,model.onnx_data_1"
FILES = {
    "config.json": b"{}",
    "onnx/model.onnx": Lfs(GRAPH),
    "onnx/model.onnx_data": Lfs(b"0" * 5000),
    "onnx/model.onnx_data_1": Lfs(b"1" * 5000),
    "onnx/model_fp16.onnx": Lfs(b"graph:"),
}


def external(path: Path) -> Sequence[str]:
    """Stands in for the graph reader's scan."""
    text = path.read_bytes().decode()
    if not text.startswith("graph:"):
        raise InvalidModel("not a graph", source=str(path))
    return [name for name in text.removeprefix("graph:").split(",") if name]


async def test_39_a_model_with_external_data(world: World) -> None:
    commit = world.fake.repo().commit(FILES)
    async with world.client() as hub:
        model = await hub.fetch_model("hf://org/m@main/onnx/model.onnx", external)
    assert model.path == world.pointer(commit, "onnx/model.onnx")
    assert list(model.files) == ["onnx/model.onnx", "onnx/model.onnx_data", "onnx/model.onnx_data_1"]
    assert model.links == set(model.files.values())
    assert model.source == ("hf", "org/m", "onnx/model.onnx")
    assert model.commit == commit
    for path in model.files.values():
        assert path.parent == model.path.parent
    told = world.told()
    assert [each[:2] for each in told] == [("info", "fetched"), *[("dl", name) for name in model.files]]
    assert len(world.blobs()) == 3
    assert world.asked("info") == ["info main"]


async def test_39_a_graph_that_names_itself_is_told_of_once(world: World) -> None:
    world.fake.repo().commit({**FILES, "onnx/model.onnx": Lfs(b"graph:model.onnx,model.onnx_data,model.onnx_data")})
    async with world.client() as hub:
        model = await hub.fetch_model("hf://org/m/onnx/model.onnx", external)
    assert list(model.files) == ["onnx/model.onnx", "onnx/model.onnx_data"]
    assert [each[:2] for each in world.told()] == [("info", "fetched"), *[("dl", name) for name in model.files]]


@pytest.mark.parametrize("location", ["../model.onnx_data", "/etc/passwd", "a\\b", "C:x", "./../x"])
async def test_39_a_location_outside_of_the_folder(world: World, location: str) -> None:
    world.fake.repo().commit({**FILES, "onnx/model.onnx": Lfs(b"graph:" + location.encode())})
    async with world.client() as hub:
        with pytest.raises(InvalidModel, match=r"onnx/model\.onnx: its external data is at"):
            await hub.fetch_model("hf://org/m/onnx/model.onnx", external)
    assert world.asked("resolve") == ["resolve onnx/model.onnx"]


async def test_39_a_location_that_does_not_exist(world: World) -> None:
    world.fake.repo().commit({**FILES, "onnx/model.onnx": Lfs(b"graph:model.onnx_data,absent")})
    async with world.client() as hub:
        with pytest.raises(EntryNotFoundError, match="has no file 'onnx/absent'"):
            await hub.fetch_model("hf://org/m/onnx/model.onnx", external)
    assert world.asked("resolve") == ["resolve onnx/model.onnx"]


async def test_a_graph_that_does_not_parse_is_checked_and_fetched_again_once(world: World) -> None:
    world.fake.repo().commit({"model.onnx": Lfs(b"graph:")})
    async with world.client() as hub:
        model = await hub.fetch_model("org/m", external)
        stamp = model.path.stat()
        model.path.write_bytes(b"damage")
        os.utime(model.path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
        assert (await hub.fetch_model("org/m", external)).path.read_bytes() == b"graph:"
    assert [each for each in world.told() if each[0] != "info"] == [
        ("dl", "model.onnx", 6),
        ("hit", "model.onnx", "etag"),
        ("dl", "model.onnx", 6),
    ]


async def test_a_graph_that_is_what_the_hub_has_and_does_not_parse(world: World) -> None:
    world.fake.repo().commit({"model.onnx": Lfs(b"version https://git-lfs")})
    async with world.client() as hub:
        with pytest.raises(InvalidModel, match="not a graph"):
            await hub.fetch_model("org/m", external)
    assert world.told() == [("info", "fetched"), ("dl", "model.onnx", 23)]


async def test_fetch_and_variants(world: World) -> None:
    commit = world.fake.repo().commit(FILES)
    async with world.client() as hub:
        assert await hub.fetch("hf://org/m/config.json") == world.pointer(commit, "config.json")
        assert (await hub.fetch("org/m", variant="fp16")).name == "model_fp16.onnx"
        assert (await hub.fetch("hf://org/m/onnx/model.onnx", variant="fp16")).name == "model_fp16.onnx"
        assert (await hub.fetch("org/m")).name == "model.onnx"
        found = await hub.variants("org/m")
    assert [(each.file, each.variant, each.precision, each.size, each.data_size) for each in found] == [
        ("onnx/model.onnx", "", "fp32", len(GRAPH), 10_000),
        ("onnx/model_fp16.onnx", "fp16", "fp16", 6, 0),
    ]


def listing(*files: str) -> Listing:
    return Listing("org/m", "c" * 40, {file: FileInfo(1) for file in files})


def test_variants_by_name() -> None:
    names = {
        "model.onnx": ("model", "", "fp32"),
        "onnx/model_quantized.onnx": ("model", "quantized", "int8"),
        "onnx/model_q4f16.onnx": ("model", "q4f16", "q4f16"),
        "onnx/decoder_model_merged.onnx": ("decoder_model_merged", "", "fp32"),
        "onnx/decoder_model_merged_int8.onnx": ("decoder_model_merged", "int8", "int8"),
        "onnx/model_O4.onnx": ("model", "O4", "fp16"),
        "onnx/model_qint8_avx512_vnni.onnx": ("model", "qint8_avx512_vnni", "int8"),
        "onnx/model_quint8_avx2.onnx": ("model", "quint8_avx2", "uint8"),
    }
    found = {each.file: (each.model, each.variant, each.precision) for each in list_variants(listing(*names, "x.bin"))}
    assert found == names


def test_the_obvious_file() -> None:
    assert choose_variant(listing("a/strange.onnx", "x.bin"), None, None) == "a/strange.onnx"
    assert (
        choose_variant(listing("onnx/model.onnx", "onnx/model_fp16.onnx", "onnx/encoder.onnx"), None, None)
        == "onnx/model.onnx"
    )
    assert choose_variant(listing("onnx/model_q4.onnx", "onnx/encoder_q4.onnx"), None, "q4") == "onnx/model_q4.onnx"
    with pytest.raises(InvalidReferenceError, match=r"several ONNX files that may be meant: a.onnx, b.onnx"):
        choose_variant(listing("a.onnx", "b.onnx"), None, None)
    with pytest.raises(InvalidReferenceError, match=r"onnx/model\.onnx"):
        choose_variant(listing("model.onnx", "onnx/model.onnx"), None, None)
    with pytest.raises(EntryNotFoundError, match=r"no variant 'q4' .* it has a.onnx"):
        choose_variant(listing("a.onnx"), None, "q4")
    with pytest.raises(EntryNotFoundError, match="no ONNX file"):
        choose_variant(listing("model.safetensors"), None, None)


async def test_a_local_folder_is_a_repository_without_events(world: World, tmp_path: Path) -> None:
    folder = tmp_path / "local"
    (folder / "onnx").mkdir(parents=True)
    for name, value in FILES.items():
        (folder / name).write_bytes(value.data if isinstance(value, Lfs) else value)
    async with world.client() as hub:
        found = await hub.download(folder, ["*.json", "onnx/model.onnx"], optional=["absent"])
        assert found == {"config.json": folder / "config.json", "onnx/model.onnx": folder / "onnx/model.onnx"}
        model = await hub.fetch_model(str(folder), external)
        assert model.source == str(folder / "onnx/model.onnx")
        assert model.links == frozenset()
        assert len(model.files) == 3
        assert len(await hub.variants(folder)) == 2
        assert (await hub.info(folder)).files["config.json"].size == 2
        with pytest.raises(EntryNotFoundError, match="no file 'absent'"):
            await hub.download(folder, "absent")
        with pytest.raises(EntryNotFoundError, match="is not a folder"):
            await hub.info(tmp_path / "nowhere")
    assert world.events == []
    assert world.asked() == []
    assert not world.cache.exists()


async def test_a_snapshot_folder_given_as_a_local_folder_has_links_that_may_be_followed(
    world: World, tmp_path: Path
) -> None:
    commit = world.fake.repo().commit(FILES)
    await world.load()
    snapshot = world.root / "snapshots" / commit
    async with world.client() as hub:
        model = await hub.fetch_model(snapshot, external)
        assert model.links == set(model.files.values())
        (tmp_path / "secret").write_bytes(b"0" * 5000)
        (snapshot / "onnx/model.onnx_data").unlink()
        (snapshot / "onnx/model.onnx_data").symlink_to(tmp_path / "secret")
        model = await hub.fetch_model(snapshot, external)
        assert snapshot / "onnx/model.onnx_data" not in model.links


async def test_the_token_of_a_call(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.fake.repo().commit({"q": b"1"})
    async with world.client() as hub:
        await hub.info("org/m", token="other")
        await hub.info("org/m", token=False)
        await hub.info("org/m", token=True)
    async with world.client(token=None) as hub:
        await hub.info("org/m")
        with pytest.raises(InvalidReferenceError, match="there is no token"):
            await hub.info("org/m", token=True)
        with pytest.raises(InvalidReferenceError, match="can't be a token"):
            await hub.info("org/m", token="a\nb")
    assert [each.token for each in world.fake.requests] == ["Bearer other", None, "Bearer hf_secretsecretsecret", None]


def test_the_fake_is_deterministic() -> None:
    assert FakeRepo("a/b").commit({"p": b"1"}) == FakeRepo("a/b").commit({"p": b"1"})
