"""The fake Hub is true if the official client works on it; and the two clients share one cache."""

from __future__ import annotations

from pathlib import Path

import anyio
import huggingface_hub
import pytest
from huggingface_hub import constants

from tests.hub.fake_hub import FakeHub, Fault, Lfs, sha256
from tests.hub.support import World

FILES = {
    "config.json": b'{"a": 1}',
    "onnx/model.onnx": Lfs(b"graph" * 1000),
    "onnx/model.onnx_data": Lfs(b"weights" * 5000, xet=True),
    "empty": b"",
    "a b#c%20é.txt": b"odd name",
}


@pytest.mark.parametrize("direct", [False, True])
def test_the_official_client_works_on_the_fake(fake: FakeHub, tmp_path: Path, direct: bool, monkeypatch) -> None:
    hub = fake
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    hub.repo().direct = direct
    commit = hub.repo().commit(FILES)
    folder = Path(huggingface_hub.snapshot_download("org/m", endpoint=hub.endpoint, cache_dir=tmp_path, token="secret"))
    assert folder.name == commit
    for name, value in FILES.items():
        assert (folder / name).read_bytes() == (value.data if isinstance(value, Lfs) else value)
        one = huggingface_hub.hf_hub_download(
            "org/m", name, endpoint=hub.endpoint, cache_dir=tmp_path / "2", token=False
        )
        assert Path(one).stat().st_size == (folder / name).stat().st_size
    assert not [each for each in hub.requests if each.kind == "unknown"]
    assert all(each.token is None for each in hub.requests if each.kind == "cdn")
    with pytest.raises(huggingface_hub.errors.EntryNotFoundError):
        huggingface_hub.hf_hub_download("org/m", "absent", endpoint=hub.endpoint, cache_dir=tmp_path)
    with pytest.raises(huggingface_hub.errors.RevisionNotFoundError):
        huggingface_hub.hf_hub_download("org/m", "empty", revision="no", endpoint=hub.endpoint, cache_dir=tmp_path)
    with pytest.raises(huggingface_hub.errors.RepositoryNotFoundError):
        huggingface_hub.hf_hub_download("org/no", "empty", endpoint=hub.endpoint, cache_dir=tmp_path)


def official_download(hub: FakeHub, cache: Path, monkeypatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    huggingface_hub.snapshot_download("org/m", endpoint=hub.endpoint, cache_dir=cache, token=False)


async def test_the_official_client_reads_our_cache_offline(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.fake.repo().commit(FILES)
    found = await world.load()
    world.asked()

    def official() -> None:
        folder = Path(huggingface_hub.snapshot_download("org/m", cache_dir=world.cache, local_files_only=True))
        for name, path in found.items():
            one = huggingface_hub.hf_hub_download("org/m", name, cache_dir=world.cache, local_files_only=True)
            assert Path(one) == folder / name == path
        scan = huggingface_hub.scan_cache_dir(world.cache)
        assert scan.warnings == []
        (repo,) = scan.repos
        (revision,) = repo.revisions
        assert revision.refs == {"main"}
        assert {file.file_name for file in revision.files} == {Path(name).name for name in FILES}

    await anyio.to_thread.run_sync(official)
    assert world.asked() == []


@pytest.mark.parametrize("symlinks", [True, False])
async def test_the_official_client_downloads_nothing_that_we_have(
    world: World, symlinks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.fake.repo().commit(FILES)
    await world.load(client={"symlinks": symlinks})
    world.asked()
    await anyio.to_thread.run_sync(official_download, world.fake, world.cache, monkeypatch)
    assert [each for each in world.fake.requests if each.kind == "cdn"] == []
    assert [each for each in world.fake.requests if each.method == "GET" and each.kind in ("resolve", "cache")] == []
    # And what it has written beside does not disturb us.
    world.told(), world.asked()
    await world.load(client={"symlinks": symlinks})
    assert {each[-1] for each in world.told()} == {"fetched", "etag"}


@pytest.mark.parametrize("form", ["links", "copies", "shared store"])
async def test_we_download_nothing_that_the_official_client_has(
    world: World, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import file_download

    commit = world.fake.repo().commit(FILES)
    if form == "copies":
        monkeypatch.setattr(file_download, "are_symlinks_supported", lambda *_: False)
    await anyio.to_thread.run_sync(official_download, world.fake, world.cache, monkeypatch)
    if form == "shared store":
        # As hf_xet leaves it: the blob itself is a link into a store under a hash of another kind.
        blob = world.root / "blobs" / sha256(b"weights" * 5000)
        store = world.cache / "blobs" / "ab" / ("d" * 64)
        store.parent.mkdir(parents=True)
        blob.rename(store)
        blob.symlink_to(f"../../blobs/ab/{store.name}")
    world.asked()
    before = {name: world.pointer(commit, name).lstat().st_ino for name in FILES}
    await world.load()
    assert sorted(world.told()) == sorted([("info", "fetched"), *(("hit", name, "hash") for name in FILES)])
    await world.load()
    assert sorted(world.told()) == sorted([("info", "fetched"), *(("hit", name, "etag") for name in FILES)])
    assert world.asked() == ["info main"] * 2
    assert before == {name: world.pointer(commit, name).lstat().st_ino for name in FILES}
    # Its own metadata suffice where ours are gone and the Hub is away.
    world.forget()
    world.fake.fault("info", "main", Fault(status=503), always=True)
    if (world.root / "trees" / f"{commit}.json").exists():
        await world.load()
        assert world.told()[0] == ("info", "saved")


async def test_a_wrong_content_of_another_tool_is_replaced(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = world.fake.repo().commit(FILES)
    await anyio.to_thread.run_sync(official_download, world.fake, world.cache, monkeypatch)
    path = world.pointer(commit, "onnx/model.onnx")
    path.write_bytes(b"x" * path.stat().st_size)
    await world.load("onnx/model.onnx")
    assert world.told() == [("info", "fetched"), ("dl", "onnx/model.onnx", 5000)]
    assert path.read_bytes() == b"graph" * 1000
