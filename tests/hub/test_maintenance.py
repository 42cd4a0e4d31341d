"""`transmuter cache ls | verify | rm | path`: the functions behind."""

from __future__ import annotations

import os
import time
from pathlib import Path

import anyio
import huggingface_hub
import pytest
from filelock import FileLock

from tests.hub.fake_hub import Lfs, git_sha1, sha256
from tests.hub.support import World
from transmuter_async.hub import (
    InvalidReferenceError,
    LocalEntryNotFoundError,
    cache_path,
    list_cache,
    remove_from_cache,
    verify_cache,
)
from transmuter_async.hub.local import snapshot_links
from transmuter_async.hub.workers import Stop, Stopped

LARGE = b"weights" * 1000


@pytest.fixture
def filled(world: World) -> World:
    """Two commits that share a file, and another repository without links."""
    world.old = world.fake.repo().commit({"p": Lfs(LARGE), "q": b"old"})  # type: ignore[attr-defined]
    anyio.run(world.load)
    world.new = world.fake.repo().commit({"p": Lfs(LARGE), "sub/q": b"newer"})  # type: ignore[attr-defined]
    anyio.run(world.load)
    world.fake.repo("plain").commit({"r": b"regular"})
    world.fake.repos["org/plain"] = world.fake.repos.pop("plain")
    anyio.run(lambda: world.load(repo="org/plain", client={"symlinks": False}))
    return world


def test_ls(filled: World) -> None:
    (filled.root / "blobs" / "unknown.00000000.incomplete").write_bytes(b"12345")
    first, second = list_cache(filled.cache)
    assert (first.repo, first.size, first.partial) == ("org/m", len(LARGE) + 8, 5)
    by_commit = {each.commit: each for each in first.revisions}
    assert by_commit[filled.new].refs == ("main",)
    assert by_commit[filled.old].refs == ()
    assert [(each.file, each.size, each.etag, each.checked) for each in by_commit[filled.new].files] == [
        ("p", len(LARGE), sha256(LARGE), True),
        ("sub/q", 5, git_sha1(b"newer"), True),
    ]
    assert (second.repo, second.size) == ("org/plain", 7)
    assert second.revisions[0].files[0].checked
    assert list_cache(filled.cache, "org/plain") == (second,)
    assert list_cache(filled.cache / "nowhere") == ()
    # The official tool counts the same.
    scan = huggingface_hub.scan_cache_dir(filled.cache)
    assert not scan.warnings
    assert {each.repo_id: each.size_on_disk for each in scan.repos} == {"org/m": first.size, "org/plain": second.size}


def test_verify(filled: World) -> None:
    told: list[object] = []
    results = verify_cache(filled.cache, report=told.append)
    assert told == list(results)
    assert sorted((each.repo, each.file, each.result) for each in results) == [
        ("org/m", "p", "right"),
        ("org/m", "q", "right"),
        ("org/m", "sub/q", "right"),
        ("org/plain", "r", "right"),
    ]
    blob = filled.root / "blobs" / sha256(LARGE)
    stamp = blob.stat()
    blob.write_bytes(b"x" + LARGE[1:])
    os.utime(blob, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))  # our record still seems to fit
    hand = filled.pointer(filled.new, "mine")
    hand.write_bytes(b"put here by hand")
    results = {each.file: each for each in verify_cache(filled.cache, "org/m")}
    assert results["p"].result == "wrong"
    assert results["p"].expected == sha256(LARGE)
    assert results["mine"].result == "unknown"
    filled.told()
    anyio.run(filled.load)
    assert ("dl", "p", len(LARGE)) in filled.told()
    assert blob.read_bytes() == LARGE


def test_verify_finds_a_wrong_link_and_looks_at_contents_without_one(filled: World) -> None:
    place = filled.pointer(filled.new, "sub/q")
    place.unlink()
    place.symlink_to(filled.root / "blobs" / sha256(LARGE))  # right content, of another file
    filled.pointer(filled.old, "q").unlink()
    (filled.root / "blobs" / git_sha1(b"old")).write_bytes(b"OLD")
    results = {each.file: each for each in verify_cache(filled.cache, "org/m")}
    assert {name: each.result for name, each in results.items()} == {
        "p": "right",
        "sub/q": "wrong",
        git_sha1(b"old"): "wrong",
        git_sha1(b"newer"): "right",
    }
    assert results["sub/q"].expected == git_sha1(b"newer")
    anyio.run(filled.load)
    anyio.run(lambda: filled.load(revision=filled.old))
    assert place.read_bytes() == b"newer"
    assert filled.pointer(filled.old, "q").read_bytes() == b"old"
    assert {each.result for each in verify_cache(filled.cache)} == {"right"}


def test_a_repository_that_is_not_there(filled: World) -> None:
    for function in (list_cache, verify_cache):
        with pytest.raises(LocalEntryNotFoundError, match="org/no is not in the cache"):
            function(filled.cache, "org/no")
        with pytest.raises(InvalidReferenceError):
            function(filled.cache, "../m")


def test_verify_can_be_stopped(filled: World) -> None:
    stop = Stop()
    stop.set()
    with pytest.raises(Stopped):
        verify_cache(filled.cache, stop=stop)


def test_rm_of_a_revision_keeps_what_others_need(filled: World) -> None:
    removed = remove_from_cache("org/m", filled.old, cache=filled.cache)
    assert (removed.files, removed.size, removed.kept) == (1, 3, 0)
    assert filled.pointer(filled.new, "p").read_bytes() == LARGE
    assert filled.blobs() == sorted([sha256(LARGE), git_sha1(b"newer")])
    assert not huggingface_hub.scan_cache_dir(filled.cache).warnings
    with pytest.raises(LocalEntryNotFoundError):
        remove_from_cache("org/m", filled.old, cache=filled.cache)
    removed = remove_from_cache("org/m", "main", cache=filled.cache)
    assert removed.files == 2
    assert not (filled.root / "refs" / "main").exists()
    anyio.run(filled.load)
    assert filled.pointer(filled.new, "p").read_bytes() == LARGE


def test_rm_of_a_repository(filled: World) -> None:
    young = filled.root / "blobs" / "unknown.00000000.incomplete"
    young.write_bytes(b"12345")
    with FileLock(filled.cache / ".locks" / "models--org--m" / f"{sha256(LARGE)}.lock"):
        removed = remove_from_cache("org/m", cache=filled.cache)
    assert (removed.kept, removed.size, removed.files) == (1, 8, 2)
    assert young.exists(), "somebody may be writing it"
    os.utime(young, (time.time() - 100, time.time() - 100))
    removed = remove_from_cache("org/m", cache=filled.cache)
    assert removed.size == len(LARGE) + 5
    assert not filled.root.exists()
    assert remove_from_cache("org/plain", cache=filled.cache).size == 7
    assert list_cache(filled.cache) == ()
    with pytest.raises(LocalEntryNotFoundError, match="org/m is not in the cache"):
        remove_from_cache("org/m", cache=filled.cache)


def test_path(filled: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(filled.cache))
    assert cache_path() == filled.cache
    assert cache_path("org/m") == filled.root / "snapshots" / filled.new
    assert cache_path("org/m", "p", filled.old) == filled.pointer(filled.old, "p")
    filled.forget()
    assert cache_path("org/m", "sub/q") == filled.pointer(filled.new, "sub/q")
    for arguments in (("org/no",), ("org/m", "absent"), ("org/m", "p", "v2")):
        with pytest.raises(LocalEntryNotFoundError):
            cache_path(*arguments)
    assert isinstance(cache_path(), Path)


def test_a_cache_whose_path_goes_up_and_down(world: World) -> None:
    """The same folder by another path: links are compared, not their spelling."""
    (world.cache.parent / "there").mkdir()
    world.cache = world.cache.parent / "there" / ".." / "cache"
    old = world.fake.repo().commit({"p": Lfs(LARGE), "q": b"old"})
    anyio.run(world.load)
    world.fake.repo().commit({"p": Lfs(LARGE), "q": b"new"})
    anyio.run(world.load)
    assert [each for each in world.told() if each[0] == "hit"] == [("hit", "p", "etag")]
    anyio.run(world.load)
    assert [each for each in world.told() if each[0] != "info"] == [("hit", "p", "etag"), ("hit", "q", "etag")]
    assert remove_from_cache("org/m", old, cache=world.cache).files == 1
    assert sorted(world.blobs()) == sorted([sha256(LARGE), git_sha1(b"new")])
    assert len(snapshot_links(world.root / "snapshots" / world.ref(), ["p", "q"])) == 2
