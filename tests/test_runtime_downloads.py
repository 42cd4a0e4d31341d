"""Models that come from the Hub into the runtime: what is asked for, repaired, cancelled, and what the events say of it."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import anyio
import huggingface_hub
import huggingface_hub.constants
import huggingface_hub.file_download
import numpy as np
import onnx
import pytest

import transmuter_async as tm
from tests.hub.fake_hub import FakeHub, Fault, Lfs
from tests.hub.support import World, in_worker, wait_for
from tests.test_runtime import affine, expected, rows
from transmuter_async.graph import external_locations
from transmuter_async.hub import EntryNotFoundError, HubClient, HubFile, InvalidReferenceError
from transmuter_async.telemetry import CATALOGUE, Telemetry
from transmuter_async.testing import Recorder

MIB = 1 << 20
HOURS = 1000.0


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with FakeHub() as fake:
        yield World(fake, tmp_path / "cache")


def split(folder: Path, *, files: int = 1) -> dict[str, Lfs]:
    """The affine model with its weights beside it, each tensor in a file of its own where `files` is 2."""
    folder.mkdir()
    model = onnx.load_from_string(affine())
    onnx.save_model(
        model,
        folder / "model.onnx",
        save_as_external_data=True,
        all_tensors_to_one_file=files == 1,
        location="model.onnx_data" if files == 1 else None,
        size_threshold=0,
    )
    return {f"onnx/{file.name}": Lfs(file.read_bytes()) for file in sorted(folder.iterdir())}


def told(recorder: Recorder) -> list[tuple[object, ...]]:
    """The events of the Hub and of the load, in short, each checked against the contract."""
    found: list[tuple[object, ...]] = []
    for event in recorder.events:
        kind = CATALOGUE[event.name]
        assert set(kind.measurements) <= set(event.measurements), event
        assert set(kind.metadata) <= set(event.metadata), event
        name = event.name.removeprefix("transmuter.")
        facts = event.metadata
        match name:
            case "hub.hit":
                found.append((name, facts["source"][2], facts["revision"], facts["check"]))
            case "hub.download.stop" | "hub.download.exception":
                found.append((name, facts["source"][2], facts["revision"]))
            case "hub.info.stop":
                found.append((name, facts["revision"], facts["result"]))
            case "load.stop" | "load.exception" | "hub.info.exception":
                found.append((name,))
    recorder.clear()
    return found


async def test_the_data_files_are_fetched_at_once(world: World, tmp_path: Path) -> None:
    files = split(tmp_path / "made", files=2)
    data = [name for name in files if not name.endswith(".onnx")]
    assert len(data) == 2
    world.fake.repo().commit(files)
    for name in data:
        world.fake.fault("cdn", name, Fault(hold=True))
    async with (
        tm.Runtime(hub=HubClient(environment=world.environment())) as runtime,
        anyio.create_task_group() as tasks,
    ):
        loaded = []

        async def load() -> None:
            loaded.append(await runtime.load("hf://org/m/onnx/model.onnx"))

        tasks.start_soon(load)
        # Both are on their way before the first byte of either has come.
        await wait_for(lambda: len(world.fake.asked("cdn")) == 3)
        assert sorted(world.fake.asked("cdn")[1:]) == [f"cdn {name}" for name in sorted(data)]
        world.fake.release()
    assert loaded[0].source == ("hf", "org/m", "onnx/model.onnx")


def damage(path: Path, content: bytes) -> None:
    """Other bytes of the same size and date: our record still seems to fit."""
    stamp = path.stat()
    assert len(content) == stamp.st_size
    path.write_bytes(content)
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))


@pytest.mark.parametrize("revision", ["main", "pinned"])
async def test_a_model_that_does_not_parse_is_checked_and_fetched_again_once(world: World, revision: str) -> None:
    model = affine()
    commit = world.fake.repo().commit({"model.onnx": Lfs(model)})
    asked = commit if revision == "pinned" else revision
    bus = Telemetry()
    async with (
        tm.Runtime(telemetry=bus, hub=HubClient(telemetry=bus, environment=world.environment())) as runtime,
        Recorder(bus) as recorder,
    ):
        await runtime.load("org/m", revision=asked)
        told(recorder)
        # It is protobuf, so the locations of external data can be read, and no model.
        wrong = onnx.load_from_string(model)
        del wrong.opset_import[:]
        short = wrong.SerializeToString()
        wrong.doc_string = "x" * (len(model) - len(short) - 2)
        damage(world.pointer(commit, "model.onnx"), wrong.SerializeToString())
        assert external_locations(world.pointer(commit, "model.onnx")) == ()
        loaded = await runtime.load("org/m", revision=asked)
        assert loaded.node_count == onnx.load_from_string(model).graph.node.__len__()
        info = [] if revision == "pinned" else [("hub.info.stop", asked, "fetched")]
        assert told(recorder) == [
            *info,
            ("hub.hit", "model.onnx", asked, "etag"),
            ("hub.download.stop", "model.onnx", asked),
            ("load.stop",),
        ]
        assert world.pointer(commit, "model.onnx").read_bytes() == model


async def test_a_model_that_the_hub_has_like_that_is_invalid(world: World) -> None:
    world.fake.repo().commit({"model.onnx": Lfs(b"version https://git-lfs.github.com/spec/v1")})
    bus = Telemetry()
    async with (
        tm.Runtime(telemetry=bus, hub=HubClient(telemetry=bus, environment=world.environment())) as runtime,
        Recorder(bus) as recorder,
    ):
        with pytest.raises(tm.InvalidModel):
            await runtime.load("org/m")
        assert told(recorder) == [
            ("hub.info.stop", "main", "fetched"),
            ("hub.download.stop", "model.onnx", "main"),
            ("load.exception",),
        ]
    assert world.fake.asked("resolve") == ["resolve model.onnx"]


async def test_a_cancelled_load_keeps_and_resumes(world: World, tmp_path: Path) -> None:
    def commit() -> None:
        files = split(tmp_path / "made")
        files["onnx/model.onnx_data"] = Lfs(files["onnx/model.onnx_data"].data + bytes(24 * MIB))
        world.fake.repo().commit(files)

    await in_worker(commit)
    world.fake.fault("cdn", "onnx/model.onnx_data", Fault(stall=17 * MIB))
    bus = Telemetry()
    async with (
        tm.Runtime(
            telemetry=bus, hub=HubClient(telemetry=bus, environment=world.environment(download_timeout=HOURS))
        ) as runtime,
        Recorder(bus) as recorder,
    ):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(runtime.load, "hf://org/m/onnx/model.onnx")
            await wait_for(lambda: world.written() >= 16 * MIB)
            tasks.cancel_scope.cancel()
            began = anyio.current_time()
        assert anyio.current_time() - began < 10
        assert told(recorder) == [
            ("hub.info.stop", "main", "fetched"),
            ("hub.download.stop", "onnx/model.onnx", "main"),
            ("hub.download.exception", "onnx/model.onnx_data", "main"),
            ("load.exception",),
        ]
        assert len(world.leftovers()) == 1
        world.fake.requests.clear()
        model = await runtime.load("hf://org/m/onnx/model.onnx")
        (cdn,) = [request for request in world.fake.requests if request.kind == "cdn"]
        assert int(str(cdn.range).removeprefix("bytes=").rstrip("-")) >= 16 * MIB
        assert world.leftovers() == []
        compiled = await runtime.compile(model, compiler="eager")
        x = rows(2)
        np.testing.assert_allclose((await compiled.run({"x": x}))["y"], expected(x), rtol=1e-5, atol=1e-6)


async def test_offline_opens_no_socket(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world.fake.repo().commit(split(tmp_path / "made"))
    async with tm.Runtime(hub=HubClient(environment=world.environment())) as runtime:
        await runtime.load("hf://org/m/onnx/model.onnx")

    def refuse(*arguments: object) -> None:
        raise AssertionError(f"a socket was opened: {arguments}")

    for name in ("connect", "connect_ex"):
        monkeypatch.setattr(socket.socket, name, refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    bus = Telemetry()
    client = HubClient(telemetry=bus, environment=world.environment(offline=True))
    async with tm.Runtime(telemetry=bus, hub=client) as runtime, Recorder(bus) as recorder:
        await runtime.load("org/m")
        assert await runtime.variants("org/m")
        assert await runtime.download("org/m", "*.onnx")
        hits = [("hub.hit", f"onnx/model.onnx{suffix}", "main", "offline") for suffix in ("", "_data", "")]
        assert [each for each in told(recorder) if each[0] != "load.stop"] == hits
        with pytest.raises(EntryNotFoundError, match="Offline"):
            await runtime.load("org/other")


@pytest.mark.parametrize("revision", ["feature/x", "refs/pr/7"])
async def test_a_revision_with_a_slash(world: World, revision: str) -> None:
    repo = world.fake.repo()
    repo.commit({"model.onnx": Lfs(b"of main")})
    repo.commit({"model.onnx": Lfs(affine())}, branch=revision)
    bus = Telemetry()
    client = HubClient(telemetry=bus, environment=world.environment())
    async with tm.Runtime(telemetry=bus, hub=client) as runtime, Recorder(bus) as recorder:
        quoted = revision.replace("/", "%2F")
        ways = [
            (f"hf://org/m@{quoted}/model.onnx", None),
            ("org/m", revision),
            ("hf://org/m/model.onnx", revision),
            (HubFile("org/m", "model.onnx", revision), None),
        ]
        if revision.startswith("refs/"):
            ways.append((f"hf://org/m@{revision}/model.onnx", None))
        for source, given in ways:
            assert (await runtime.load(source, revision=given)).source == ("hf", "org/m", "model.onnx")
        assert {each[2] for each in told(recorder) if each[0] in ("hub.hit", "hub.download.stop")} == {revision}
        assert {each.precision for each in await runtime.variants("org/m", revision=revision)} == {"fp32"}
        assert len(await runtime.download("org/m", revision=revision)) == 1
        with pytest.raises(InvalidReferenceError, match="names another"):
            await runtime.load(f"hf://org/m@{quoted}/model.onnx", revision="main")


async def test_options_that_do_not_fit_the_source_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(affine())
    async with tm.Runtime() as runtime:
        for source in (path, str(path), affine()):
            with pytest.raises(tm.InputError, match="variant='fp16'"):
                await runtime.load(source, variant="fp16")
            with pytest.raises(tm.InputError, match="revision='v1'"):
                await runtime.load(source, revision="v1")
        assert (await runtime.load(tmp_path, variant="")).source == str(path)
        with pytest.raises(EntryNotFoundError, match="no variant 'fp16'"):
            await runtime.load(tmp_path, variant="fp16")


async def test_a_bare_repository_says_what_there_is(world: World) -> None:
    world.fake.repo().commit({"onnx/encoder_model.onnx": b"1", "onnx/decoder_model_merged.onnx": b"2"})
    world.fake.repo("org/none").commit({"config.json": b"{}"})
    async with tm.Runtime(hub=HubClient(environment=world.environment())) as runtime:
        with pytest.raises(InvalidReferenceError, match=r"onnx/decoder_model_merged\.onnx, onnx/encoder_model\.onnx"):
            await runtime.load("org/m")
        with pytest.raises(EntryNotFoundError, match="has no ONNX file"):
            await runtime.load("org/none")
    assert world.fake.asked("resolve") == []


@pytest.mark.parametrize("how", ["links", "copies", "shared store"])
async def test_what_the_official_client_has_cached(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    world.fake.repo().commit(split(tmp_path / "made"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_SYMLINKS", how == "copies", raising=False)
    if how == "copies":
        monkeypatch.setattr(huggingface_hub.file_download, "are_symlinks_supported", lambda *_: False)
    options = {"cache_dir": world.cache, "endpoint": world.fake.endpoint, "token": False}
    await anyio.to_thread.run_sync(lambda: huggingface_hub.snapshot_download("org/m", **options))
    blobs = list((world.root / "blobs").iterdir()) if (world.root / "blobs").is_dir() else []
    assert bool(blobs) == (how != "copies")
    for number, blob in enumerate(blobs if how == "shared store" else ()):
        shared = world.cache / "blobs" / f"{number:02x}" / f"{number:064x}"
        shared.parent.mkdir(parents=True)
        blob.rename(shared)
        blob.symlink_to(os.path.relpath(shared, blob.parent))  # noqa: ASYNC240
    world.fake.requests.clear()
    bus = Telemetry()
    client = HubClient(telemetry=bus, environment=world.environment())
    async with tm.Runtime(telemetry=bus, hub=client) as runtime, Recorder(bus) as recorder:
        for check in ("hash", "etag"):
            model = await runtime.load("org/m")
            assert told(recorder) == [
                ("hub.info.stop", "main", "fetched"),
                ("hub.hit", "onnx/model.onnx", "main", check),
                ("hub.hit", "onnx/model.onnx_data", "main", check),
                ("load.stop",),
            ]
        compiled = await runtime.compile(model, compiler="eager")
        x = rows(2)
        np.testing.assert_allclose((await compiled.run({"x": x}))["y"], expected(x), rtol=1e-5, atol=1e-6)
    assert world.fake.asked() == ["info main"] * 2


async def test_only_the_files_of_the_load_may_be_links(world: World, tmp_path: Path) -> None:
    """A file that somebody put into the snapshot as a link is not followed by a model that names it without being listed."""
    files = split(tmp_path / "made")
    data = files.pop("onnx/model.onnx_data")
    commit = world.fake.repo().commit(files)
    (tmp_path / "secret").write_bytes(data.data)
    place = world.pointer(commit, "onnx/model.onnx_data")
    place.parent.mkdir(parents=True)
    place.symlink_to(tmp_path / "secret")
    async with tm.Runtime(hub=HubClient(environment=world.environment())) as runtime:
        with pytest.raises(EntryNotFoundError, match=r"no file 'onnx/model\.onnx_data'"):
            await runtime.load("org/m")
