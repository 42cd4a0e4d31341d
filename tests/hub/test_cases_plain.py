"""The ordinary ways."""

from __future__ import annotations

import pytest

from tests.hub.fake_hub import Lfs, git_sha1, sha256
from tests.hub.support import TOKEN, World
from transmuter_async.hub import HubConsistencyError

ORDINARY = b'{"hidden": 4}'
LARGE = b"weights" * 40_000
FILES = {"config.json": ORDINARY, "onnx/model.onnx": Lfs(LARGE)}


@pytest.mark.parametrize("form", ["redirect", "direct"])
async def test_01_an_empty_cache_is_filled(world: World, form: str) -> None:
    world.fake.repo().direct = form == "direct"
    commit = world.fake.repo().commit(FILES)
    found = await world.load()
    assert list(found) == ["config.json", "onnx/model.onnx"]
    assert found["config.json"].read_bytes() == ORDINARY
    assert found["onnx/model.onnx"].read_bytes() == LARGE

    told = world.told()
    assert told[0] == ("info", "fetched")
    assert sorted(told[1:]) == [("dl", "config.json", len(ORDINARY)), ("dl", "onnx/model.onnx", len(LARGE))]
    requests = list(world.fake.requests)
    cache = ["cache config.json"] if form == "redirect" else []
    assert sorted(world.asked()) == sorted(
        ["info main", "resolve config.json", *cache, "resolve onnx/model.onnx", "cdn onnx/model.onnx"]
    )
    for request in requests:
        assert request.token == (None if request.kind == "cdn" else f"Bearer {TOKEN}")
        assert "Cookie" not in request.headers
        assert request.headers["User-Agent"].startswith("transmuter_async")
        if request.kind != "info":
            assert request.headers["Accept-Encoding"] == "identity"
        if request.kind == "resolve":
            assert f"/resolve/{commit}/" in request.raw

    assert world.blobs() == sorted([git_sha1(ORDINARY), sha256(LARGE)])
    assert str(world.pointer(commit, "config.json").readlink()) == f"../../blobs/{git_sha1(ORDINARY)}"
    assert str(world.pointer(commit, "onnx/model.onnx").readlink()) == f"../../../blobs/{sha256(LARGE)}"
    assert world.ref() == commit
    ours = world.root / ".transmuter" / "v1"
    assert (ours / "heads" / "main").read_text() == commit
    assert (ours / "info" / f"{commit}.json").exists()
    assert world.record(sha256(LARGE))["size"] == len(LARGE)
    locks = sorted(path.name for path in (world.cache / ".locks" / "models--org--m").iterdir())
    assert locks == sorted([f"{git_sha1(ORDINARY)}.lock", f"{sha256(LARGE)}.lock"])
    assert (world.cache / "CACHEDIR.TAG").read_bytes().startswith(b"Signature: 8a477f597d28d172789f06886806bc55")
    assert world.leftovers() == []


async def test_02_the_same_load_again_asks_for_the_metadata_only(world: World) -> None:
    world.fake.repo().commit(FILES)
    first = await world.load()
    state = world.state()
    world.told(), world.asked()
    assert await world.load() == first
    assert world.told() == [("info", "fetched"), ("hit", "config.json", "etag"), ("hit", "onnx/model.onnx", "etag")]
    assert world.asked() == ["info main"]
    assert world.state() == state


async def test_03_a_moved_branch_with_the_same_file_makes_a_link(world: World) -> None:
    old = world.fake.repo().commit({"p": Lfs(LARGE)})
    await world.load()
    new = world.fake.repo().commit({"p": Lfs(LARGE), "q": b""})
    world.told(), world.asked()
    await world.load("p")
    assert world.told() == [("info", "fetched"), ("hit", "p", "etag")]
    assert world.asked() == ["info main"]
    assert world.pointer(old, "p").readlink() == world.pointer(new, "p").readlink()
    assert world.blobs() == [sha256(LARGE)]
    assert world.ref() == new


async def test_04_a_moved_branch_with_another_file_keeps_the_old_one(world: World) -> None:
    old = world.fake.repo().commit({"p": b"old"})
    await world.load()
    new = world.fake.repo().commit({"p": b"newer"})
    world.told()
    await world.load()
    assert world.told() == [("info", "fetched"), ("dl", "p", 5)]
    assert world.blobs() == sorted([git_sha1(b"old"), git_sha1(b"newer")])
    assert world.pointer(old, "p").read_bytes() == b"old"
    assert world.pointer(new, "p").read_bytes() == b"newer"


async def test_05_a_pinned_and_saved_commit_needs_no_request(world: World) -> None:
    commit = world.fake.repo().commit(FILES)
    await world.load(revision=commit)
    state = world.state()
    world.told(), world.asked()
    await world.load(revision=commit)
    assert world.told() == [("hit", "config.json", "etag"), ("hit", "onnx/model.onnx", "etag")]
    assert world.asked() == []
    assert world.state() == state


async def test_06_a_pinned_commit_must_be_the_one_that_is_answered(world: World) -> None:
    commit = world.fake.repo().commit(FILES)
    other = world.fake.repo().commit({"p": b""})
    world.fake.repo().sha = other
    with pytest.raises(HubConsistencyError, match=f"commit {commit} was asked for, and the Hub answered about {other}"):
        await world.load("config.json", revision=commit)
    assert world.told() == [("info!", "HubConsistencyError")]
    assert not world.root.exists()
    world.fake.repo().sha = None
    await world.load("config.json", revision=commit)
    assert world.told() == [("info", "fetched"), ("dl", "config.json", len(ORDINARY))]
    assert not (world.root / "refs").exists()
    assert not (world.root / ".transmuter" / "v1" / "heads").exists()
    assert (world.root / ".transmuter" / "v1" / "info" / f"{commit}.json").exists()


@pytest.mark.parametrize("revision", ["short", "v1.0", "refs/pr/1", "UPPER", "feature/a b"])
async def test_07_every_other_revision_moves(world: World, revision: str) -> None:
    commit = world.fake.repo().commit(FILES)
    revision = {"short": commit[:8], "UPPER": commit.upper()}.get(revision, revision)
    world.fake.repo().branches.setdefault(revision, commit)
    await world.load("config.json", revision=revision)
    (info,) = [each for each in world.fake.requests if each.kind == "info"]
    quoted = revision.replace("/", "%2F").replace(" ", "%20")
    assert info.raw == f"/api/models/org/m/revision/{quoted}?blobs=true"
    assert world.told()[0] == ("info", "fetched")
    assert world.ref(revision) == commit
    assert (world.root / ".transmuter" / "v1" / "heads" / quoted).read_text() == commit
