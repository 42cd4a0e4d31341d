"""Names: what may be asked for, and what may touch the disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.hub.fake_hub import Lfs, git_sha1
from tests.hub.support import World
from transmuter_async.hub import (
    CacheError,
    EntryNotFoundError,
    HubClient,
    HubConsistencyError,
    HubFile,
    InvalidReferenceError,
    is_local_folder,
    parse_reference,
)
from transmuter_async.hub.names import check_file, normalize_etag

HOSTILE = [
    "../../x",
    "/etc/x",
    "C:\\x",
    "C:x",
    "\\\\srv\\s",
    "a//b",
    "a/./b",
    "a/../b",
    "",
    "a\0b",
    "a\nb",
    "a/",
    ".",
    "x" * 256,
]


async def test_33_a_file_that_is_not_in_the_listing(world: World) -> None:
    commit = world.fake.repo().commit({"tokenizer.json": b"{}"})
    with pytest.raises(
        EntryNotFoundError, match=r"has no file 'tokenizer_config.json'; near to it are 'tokenizer.json'"
    ) as caught:
        await world.load(["tokenizer.json", "tokenizer_config.json"])
    assert (caught.value.repo, caught.value.file) == ("org/m", "tokenizer_config.json")
    assert world.told() == [("info", "fetched")]
    assert world.asked() == ["info main"]
    assert not (world.root / ".no_exist").exists()
    assert not world.pointer(commit, "tokenizer.json").exists()
    found = await world.load("tokenizer.json", optional=["tokenizer_config.json", "*.model"])
    assert list(found) == ["tokenizer.json"]


async def test_patterns(world: World) -> None:
    world.fake.repo().commit(
        {"a.json": b"1", "onnx/b.json": b"2", "onnx/m.onnx": b"3", "A.JSON": b"4", "w[1].bin": b"5"}
    )
    async with world.client() as hub:
        assert list(await hub.download("org/m", "*.json")) == ["a.json", "onnx/b.json"]
        assert list(await hub.download("org/m", "onnx/")) == ["onnx/b.json", "onnx/m.onnx"]
        assert list(await hub.download("org/m", ["onnx/m.onnx", "onnx/*", "w[1].bin"])) == [
            "onnx/m.onnx",
            "onnx/b.json",
            "w[1].bin",
        ]
        with pytest.raises(EntryNotFoundError, match=r"no file like '\*.bin2'"):
            await hub.download("org/m", ["*.bin2"])
        with pytest.raises(InvalidReferenceError, match="one file on a disk that ignores case"):
            await hub.download("org/m", ["a.json", "A.JSON"])


async def test_38_hostile_names_in_a_listing(world: World) -> None:
    world.fake.repo().extra_names = HOSTILE
    world.fake.repo().commit({"good": b"1"})
    await world.load()
    assert world.told() == [("info", "fetched"), ("dl", "good", 1)]
    for name in HOSTILE:
        if name.endswith("/"):
            continue
        with pytest.raises(InvalidReferenceError, match="is refused"):
            await world.load([name])
    outside = [
        path for path in world.cache.parent.rglob("*") if path.is_file() and not path.is_relative_to(world.cache)
    ]
    assert outside == []


@pytest.mark.parametrize("sha", ["../x", "abc", "A" * 40, ""])
async def test_38_a_hostile_commit(world: World, sha: str) -> None:
    world.fake.repo().sha = sha
    world.fake.repo().commit({"good": b"1"})
    with pytest.raises(HubConsistencyError, match="names no commit"):
        await world.load()
    assert world.told() == [("info!", "HubConsistencyError")]
    assert not world.cache.exists()


async def test_38_a_planted_link_is_not_followed(world: World, tmp_path: Path) -> None:
    commit = world.fake.repo().commit({"sub/p": b"1"})
    await world.load()
    (world.root / "snapshots" / commit / "sub" / "p").unlink()
    (world.root / "snapshots" / commit / "sub").rmdir()
    (tmp_path / "outside").mkdir()
    (world.root / "snapshots" / commit / "sub").symlink_to(tmp_path / "outside")
    with pytest.raises(CacheError, match="leads out of"):
        await world.load()
    assert list((tmp_path / "outside").iterdir()) == []


async def test_odd_names_and_an_empty_file(world: World) -> None:
    files = {"a b": b"1", "c#d?e": b"2", "100%2F": b"3", "é/ü.txt": b"4", "empty": b""}
    commit = world.fake.repo().commit({**files, "empty.bin": Lfs(b"")})
    found = await world.load()
    for name, content in files.items():
        assert found[name].read_bytes() == content
    assert git_sha1(b"") == "e69de29bb2d1d6434b8b29ae775ad8c2e48c5391"
    assert world.pointer(commit, "empty").readlink().name == git_sha1(b"")
    assert not [each.range for each in world.fake.requests if each.range]
    world.told()
    await world.load()
    assert {each[2] for each in world.told()[1:]} == {"etag"}


async def test_many_files_come_from_the_tree(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    from transmuter_async.hub import listing

    monkeypatch.setattr(listing, "_SIBLINGS_LIMIT", 10)
    repo = world.fake.repo()
    repo.page = 4
    commit = repo.commit({f"f{i}": b"%d" % i for i in range(11)})
    await world.load("f10")
    assert world.asked("tree") == [f"tree {commit}"] * 3


async def test_a_renamed_repository_keeps_its_name_in_the_cache(world: World) -> None:
    world.fake.repo("org/m").renamed_to = "org/new"
    world.fake.repo("org/new").commit({"p": Lfs(b"x" * 100), "q": b"1"})
    found = await world.load()
    assert found["p"].is_relative_to(world.root)
    assert world.told()[0] == ("info", "fetched")
    assert not (world.cache / "models--org--new").exists()


async def test_an_endpoint_with_a_path(world: World) -> None:
    world.fake.prefix = "/mirror/hf"
    world.fake.repo().commit({"p": Lfs(b"x" * 100), "q": b"1"})
    await world.load()
    assert len(world.told()) == 3


def test_references() -> None:
    assert parse_reference("org/m") == HubFile("org/m")
    assert parse_reference("name") == HubFile("name")
    assert parse_reference("hf://org/m") == HubFile("org/m")
    assert parse_reference("hf://org/m@main/onnx/model.onnx") == HubFile("org/m", "onnx/model.onnx")
    assert parse_reference("hf://org/m@v1.0/x") == HubFile("org/m", "x", "v1.0")
    assert parse_reference("hf://org/m@refs/pr/1/onnx/x") == HubFile("org/m", "onnx/x", "refs/pr/1")
    assert parse_reference("hf://org/m@refs%2Fpr%2F1/x") == HubFile("org/m", "x", "refs/pr/1")
    assert parse_reference("hf://org/m@feature%2Fa/x") == HubFile("org/m", "x", "feature/a")
    assert parse_reference("hf://org/m/x", revision="feature/a") == HubFile("org/m", "x", "feature/a")
    for reference in (HubFile("org/m", "a/x", "feature/a"), HubFile("org/m"), HubFile("org/m", "x", "refs/pr/1")):
        assert parse_reference(str(reference)) == reference
    for bad in (
        "hf://",
        "hf://m",
        "hf://org//x",
        "hf://org@v/m/x",
        "hf://org/m@/x",
        "hf://org/m/../x",
        "org/m/x",
        "a--b/c",
        "-a/b",
        "o/m.git",
        "a..b/c",
    ):
        with pytest.raises(InvalidReferenceError):
            parse_reference(bad)
    with pytest.raises(InvalidReferenceError, match="names another"):
        parse_reference("hf://org/m@a/x", revision="b")


def test_local_folders_are_told_by_their_form() -> None:
    for local in (Path("org/m"), "./m", "../m", "/m", "~/m", "."):
        assert is_local_folder(local)
    for remote in ("org/m", "m", "hf://org/m"):
        assert not is_local_folder(remote)


def test_etags() -> None:
    sha = "ab" * 20
    for text in (sha, f'"{sha}"', f'W/"{sha}"', f'"{sha.upper()}"'):
        assert normalize_etag(text) == sha
    for text in ("", "*" * 64, sha[:-1], sha + "a", None, 5, f'"{sha}-gzip"'):
        assert normalize_etag(text) is None


def test_file_names() -> None:
    for good in ("a", "a/b.c", ".hidden", "a b", "é", "x" * 255, "con", "ab:c"):
        assert check_file(good) == good
    for bad in HOSTILE:
        with pytest.raises(InvalidReferenceError):
            check_file(bad)


async def test_a_client_must_be_entered() -> None:
    from transmuter_async.errors import MisuseError

    with pytest.raises(MisuseError, match="async with"):
        await HubClient().info("org/m")
