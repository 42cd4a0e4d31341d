"""What is in the cache already, put there by whomever."""

from __future__ import annotations

import errno
import io
import logging
import os
import shutil
from pathlib import Path

import anyio
import pytest

from tests.hub.fake_hub import Fault, Lfs, sha256
from tests.hub.support import World, wait_for
from transmuter_async.hub import CacheError, ChecksumError, DiskFullError, HubHTTPError

LARGE = b"weights" * 1000
E = sha256(LARGE)
FILES = {"p": Lfs(LARGE)}


def place(world: World, commit: str, content: bytes) -> Path:
    """A regular file, put into a snapshot by hand."""
    path = world.pointer(commit, "p")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("content", [LARGE, b"small ordinary file"])
async def test_13_a_right_file_is_hashed_once(world: World, content: bytes) -> None:
    commit = world.fake.repo().commit({"p": Lfs(content) if content is LARGE else content})
    path = place(world, commit, content)
    inode = path.lstat().st_ino
    await world.load()
    assert world.told() == [("info", "fetched"), ("hit", "p", "hash")]
    assert world.asked() == ["info main"]
    assert (path.lstat().st_ino, path.is_symlink()) == (inode, False)
    assert (world.root / ".transmuter/v1/etags" / commit / "p.json").exists()
    await world.load()
    assert world.told() == [("info", "fetched"), ("hit", "p", "etag")]


@pytest.mark.parametrize("wrong", [b"x" + LARGE[1:], b"another size"])
async def test_14_a_wrong_file_is_replaced_at_the_end(
    world: World, wrong: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    commit = world.fake.repo().commit(FILES)
    path = place(world, commit, wrong)
    world.fake.fault("cdn", "p", *[Fault(flip=3)] * 2)
    with pytest.raises(ChecksumError):
        await world.load()
    assert path.read_bytes() == wrong
    assert world.told() == [("info", "fetched"), ("dl!", "p", "ChecksumError")]
    caplog.clear()
    with caplog.at_level(logging.WARNING, "transmuter_async.hub"):
        await world.load()
    assert world.told() == [("info", "fetched"), ("dl", "p", len(LARGE))]
    assert path.read_bytes() == LARGE
    assert path.is_symlink()
    assert "p in the cache is not what the Hub has: it is replaced" in caplog.text
    assert world.leftovers() == []


@pytest.mark.parametrize("then", ["touched", "rewritten", "grown"])
async def test_15_a_file_that_changed_is_not_believed(world: World, then: str) -> None:
    commit = world.fake.repo().commit(FILES)
    path = place(world, commit, LARGE)
    await world.load()
    world.told()
    record = world.root / ".transmuter/v1/etags" / commit / "p.json"
    before = record.read_bytes()
    if then != "touched":
        path.write_bytes(LARGE + b"x" if then == "grown" else b"x" + LARGE[1:])
    os.utime(path, (1, 1))
    await world.load()
    assert world.told()[1] == (("hit", "p", "hash") if then == "touched" else ("dl", "p", len(LARGE)))
    assert path.read_bytes() == LARGE
    if then == "touched":
        assert record.read_bytes() != before
    await world.load()
    assert world.told()[1] == ("hit", "p", "etag")


@pytest.mark.parametrize("why", ["mirror", "masked"])
async def test_16_no_hash_in_the_metadata(world: World, why: str) -> None:
    repo = world.fake.repo()
    commit = repo.commit(FILES)
    repo.blobs, repo.tree, repo.masked = why != "mirror", why != "mirror", why == "masked"
    world.fake.fault("resolve", "p", Fault(headers={"X-Linked-ETag": None}), always=True)
    await world.load()
    assert world.told() == [("info", "fetched"), ("dl", "p", len(LARGE))]
    assert world.asked() == ["info main", f"tree {commit}", "resolve p", "cdn p"]
    path = world.pointer(commit, "p")
    assert path.read_bytes() == LARGE
    assert not path.is_symlink()
    assert world.blobs() == []
    assert not (world.root / ".transmuter/v1/etags").exists()
    await world.load()
    assert world.told() == [("info", "fetched"), ("hit", "p", "none")]
    assert world.leftovers() == []


async def test_16_a_mirror_without_blobs_but_with_a_tree(world: World) -> None:
    repo = world.fake.repo()
    repo.blobs, repo.page = False, 2
    commit = repo.commit({**FILES, "a": b"1", "b/c": b"2", "b/d": b"3"})
    await world.load("p")
    assert world.told() == [("info", "fetched"), ("dl", "p", len(LARGE))]
    assert world.asked("info", "tree") == ["info main", *[f"tree {commit}"] * 3]
    assert world.blobs() == [E]


async def test_17_a_cache_without_our_records_is_hashed_once(world: World) -> None:
    world.fake.repo().commit(FILES)
    await world.load()
    world.forget()
    world.told(), world.asked()
    await world.load(client={"verify": "never"})
    assert world.told() == [("info", "fetched"), ("hit", "p", "etag")]
    await world.load()
    assert world.told() == [("info", "fetched"), ("hit", "p", "hash")]
    state = world.state()
    await world.load()
    assert world.told() == [("info", "fetched"), ("hit", "p", "etag")]
    assert world.state() == state
    await world.load(client={"verify": "always"})
    assert world.told() == [("info", "fetched"), ("hit", "p", "hash")]
    assert world.asked() == ["info main"] * 4


async def test_18_a_blob_in_the_shared_store(world: World) -> None:
    commit = world.fake.repo().commit(FILES)
    store = world.cache / "blobs" / "ab" / ("c" * 64)
    store.parent.mkdir(parents=True)
    store.write_bytes(LARGE)
    store.chmod(0o444)
    blob = world.root / "blobs" / E
    blob.parent.mkdir(parents=True)
    blob.symlink_to(f"../../blobs/ab/{store.name}")
    pointer = world.pointer(commit, "p")
    pointer.parent.mkdir(parents=True)
    pointer.symlink_to(f"../../blobs/{E}")
    for check in ("hash", "etag"):
        await world.load()
        assert world.told() == [("info", "fetched"), ("hit", "p", check)]
    assert blob.is_symlink()
    store.chmod(0o644)
    store.write_bytes(b"x" + LARGE[1:])
    os.utime(store, (1, 1))
    await world.load()
    assert world.told()[1] == ("dl", "p", len(LARGE))
    assert store.read_bytes() == b"x" + LARGE[1:], "the shared store is not ours to write"
    assert not blob.is_symlink()
    assert pointer.read_bytes() == LARGE


async def test_19_a_dangling_link(world: World) -> None:
    commit = world.fake.repo().commit(FILES)
    await world.load()
    (world.root / "blobs" / E).unlink()
    world.told()
    await world.load()
    assert world.told() == [("info", "fetched"), ("dl", "p", len(LARGE))]
    assert world.pointer(commit, "p").read_bytes() == LARGE


async def test_20_a_truncated_blob(world: World) -> None:
    commit = world.fake.repo().commit(FILES)
    await world.load()
    world.told()
    os.truncate(world.root / "blobs" / E, 100)
    await world.load()
    assert world.told() == [("info", "fetched"), ("dl", "p", len(LARGE))]
    assert world.pointer(commit, "p").read_bytes() == LARGE
    assert world.leftovers() == []


@pytest.mark.parametrize("right", [True, False])
async def test_a_blob_without_a_link(world: World, right: bool) -> None:
    commit = world.fake.repo().commit(FILES)
    await world.load()
    world.pointer(commit, "p").unlink()
    world.forget()
    if not right:
        (world.root / "blobs" / E).write_bytes(b"x" + LARGE[1:])
    world.told()
    await world.load()
    assert world.told()[1] == (("hit", "p", "hash") if right else ("dl", "p", len(LARGE)))
    assert world.pointer(commit, "p").read_bytes() == LARGE


async def test_a_link_to_elsewhere_counts_once_it_is_hashed(world: World, tmp_path: Path) -> None:
    commit = world.fake.repo().commit(FILES)
    mine = tmp_path / "my copy"
    mine.write_bytes(LARGE)
    pointer = world.pointer(commit, "p")
    pointer.parent.mkdir(parents=True)
    pointer.symlink_to(mine)
    for check in ("hash", "etag"):
        await world.load()
        assert world.told()[1] == ("hit", "p", check)
    assert pointer.readlink() == mine


async def test_37_disk_full(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.fake.repo().commit(FILES)
    real = os.write

    def write(fd: int, data) -> int:
        if ".incomplete" in str(Path(f"/proc/self/fd/{fd}").readlink()):
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, data)

    monkeypatch.setattr(os, "write", write)
    with pytest.raises(DiskFullError, match="7000 more bytes are needed") as caught:
        await world.load()
    assert caught.value.needed == len(LARGE)
    assert world.told() == [("info", "fetched"), ("dl!", "p", "DiskFullError")]
    assert world.naps.seconds == []
    assert world.leftovers() == []
    assert world.blobs() == []


async def test_37_a_read_only_cache_still_hits(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    old = world.fake.repo().commit({**FILES, "q": b"1"})
    await world.load("p")
    world.forget()  # records of ours can't be made either
    world.fake.repo().commit({**FILES, "r": b"2"}, branch="other")
    world.told(), world.asked()
    state = world.state()
    _read_only(monkeypatch, world.cache)
    for _ in range(2):
        await world.load("p")
        assert world.told() == [("info", "fetched"), ("hit", "p", "hash")]
    with pytest.raises(CacheError, match="can't be written"):
        await world.load("q", revision=old)
    assert world.state() == state


def _read_only(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    """As a read-only mount (file modes stop nobody who is root)."""

    def guard(owner: object, name: str, position: int, writes=lambda *_: True) -> None:
        real = getattr(owner, name)

        def guarded(*arguments, **options):
            path = arguments[position]
            if isinstance(path, str | Path) and str(path).startswith(str(cache)) and writes(*arguments):
                if name == "mkdir" and Path(path).is_dir():
                    raise FileExistsError(errno.EEXIST, "File exists", str(path))
                raise OSError(errno.EROFS, "Read-only file system", str(path))
            return real(*arguments, **options)

        monkeypatch.setattr(owner, name, guarded)

    guard(os, "open", 0, lambda path, flags, *_: flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
    guard(io, "open", 0, lambda path, mode="r", *_: set(mode) & set("wxa+"))
    guard(os, "mkdir", 0)
    for name in ("replace", "rename", "unlink", "utime"):
        guard(os, name, 0)
    for name in ("symlink", "link"):
        guard(os, name, 1)


async def test_40_without_links(world: World) -> None:
    repo = world.fake.repo()
    old = repo.commit({**FILES, "sub/q": b"1"})
    options = {"client": {"symlinks": False}}
    await world.load(**options)
    assert world.told()[1:] == [("dl", "p", len(LARGE)), ("dl", "sub/q", 1)]
    assert world.blobs() == []
    assert not world.pointer(old, "p").is_symlink()
    await world.load(**options)
    assert world.told()[1:] == [("hit", "p", "etag"), ("hit", "sub/q", "etag")]
    new = repo.commit({"renamed": Lfs(LARGE), "sub/q": b"2"})
    world.asked()
    await world.load(**options)
    assert world.told()[1:] == [("hit", "renamed", "etag"), ("dl", "sub/q", 1)]
    assert "resolve renamed" not in world.asked()
    assert world.pointer(new, "renamed").read_bytes() == LARGE
    assert world.pointer(new, "sub/q").read_bytes() == b"2"
    assert world.pointer(old, "sub/q").read_bytes() == b"1"
    assert world.blobs() == []
    assert world.leftovers() == []


async def test_40_links_are_probed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.fake.repo().commit(FILES)
    monkeypatch.setattr(os, "symlink", lambda *_, **__: (_ for _ in ()).throw(OSError(errno.EPERM, "no links here")))
    found = await world.load()
    assert world.told()[1:] == [("dl", "p", len(LARGE))]
    assert not found["p"].is_symlink()


async def test_a_repair(world: World) -> None:
    world.fake.repo().commit(FILES)
    found = await world.load()
    stamp = found["p"].stat()
    found["p"].write_bytes(b"x" + LARGE[1:])
    os.utime(found["p"], ns=(stamp.st_atime_ns, stamp.st_mtime_ns))  # damage that leaves no trace but the hash
    world.told(), world.asked()
    async with world.client() as hub:
        assert await hub.download("org/m", "p") == found
        assert await hub.repair("org/m", "p")
        assert not await hub.repair("org/m", "p")
    assert [each for each in world.told() if each[0] != "info"] == [("hit", "p", "etag"), ("dl", "p", len(LARGE))]
    assert found["p"].read_bytes() == LARGE


async def test_a_failed_replacement_keeps_the_old_file(world: World) -> None:
    commit = world.fake.repo().commit(FILES)
    path = place(world, commit, b"x" + LARGE[1:])
    world.fake.fault("resolve", "p", Fault(status=403), always=True)
    with pytest.raises(HubHTTPError):
        await world.load()
    assert path.read_bytes() == b"x" + LARGE[1:]
    assert world.leftovers() == []


async def test_40_always_verified_is_no_file_of_another_commit_believed(world: World) -> None:
    old = world.fake.repo().commit({"p": Lfs(LARGE)})
    await world.load(client={"symlinks": False})
    wrong = b"x" + LARGE[1:]
    place = world.pointer(old, "p")
    stamp = place.stat()
    place.write_bytes(wrong)
    os.utime(place, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))  # our record still seems to fit
    world.fake.repo().commit({"p": Lfs(LARGE), "q": b"2"})
    found = await world.load("p", client={"symlinks": False, "verify": "always"})
    assert found["p"].read_bytes() == LARGE
    world.fake.repo().commit({"p": Lfs(LARGE), "q": b"3"})
    world.told()
    found = await world.load("p", client={"symlinks": False, "verify": "always"})
    assert found["p"].read_bytes() == LARGE
    assert world.told() in ([("info", "fetched"), ("hit", "p", "hash")], [("info", "fetched"), ("dl", "p", len(LARGE))])


async def test_a_long_name_is_recorded_as_well(world: World) -> None:
    name = "/".join(["ä" * 100] * 3) + ".bin"  # quoted, it is longer than a file's name can be
    world.fake.repo().commit({name: b"1"})
    await world.load(client={"symlinks": False})
    world.fake.repo().commit({name: b"1", "q": b"2"})
    for _ in range(2):
        await world.load(name, client={"symlinks": False})
    assert [each for each in world.told() if each[0] != "info"] == [
        ("dl", name, 1),
        ("hit", name, "etag"),
        ("hit", name, "etag"),
    ]


async def test_a_branch_that_is_a_folder_of_branches_now(world: World) -> None:
    repo = world.fake.repo()
    repo.commit({"p": b"1"}, branch="feature")
    await world.load(revision="feature")
    del repo.branches["feature"]
    commit = repo.commit({"p": b"2"}, branch="feature/x")
    await world.load(revision="feature/x")
    repo.branches.clear()
    world.told()
    found = await world.load(revision="feature/x")
    assert found["p"].read_bytes() == b"2"
    assert found["p"] == world.pointer(commit, "p")
    assert world.told() == [("info", "saved"), ("hit", "p", "etag")]
    assert (await world.load(revision="feature/x", client={"offline": True}))["p"].read_bytes() == b"2"


async def test_a_long_branch_is_found_offline(world: World) -> None:
    branch = "ö" * 100
    world.fake.repo().commit({"p": b"1"}, branch=branch)
    await world.load(revision=branch)
    assert (await world.load(revision=branch, client={"offline": True}))["p"].read_bytes() == b"1"


async def test_a_repository_removed_under_our_hands(world: World) -> None:
    """`cache rm` of another process takes the whole folder away between the making of the partial file and its end."""
    world.fake.repo().commit({"p": Lfs(LARGE)})
    world.fake.fault("cdn", "p", Fault(hold=True))
    async with world.client() as hub, anyio.create_task_group() as tasks:
        tasks.start_soon(hub.download, "org/m")
        await wait_for(lambda: world.fake.asked("cdn") == ["cdn p"])
        shutil.rmtree(world.root)
        world.fake.release()
    assert (await world.load())["p"].read_bytes() == LARGE
    assert ("dl", "p", len(LARGE)) in world.told()
    assert world.leftovers() == []
