"""The command line and the Hub: `download`, `run hf://…` with their display, `cache`, against a fake Hub."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.hub.fake_hub import FakeHub, Lfs, Repeated, git_sha1
from tests.hub.support import TOKEN, World
from tests.test_runtime import affine
from transmuter_async.cli.app import main
from transmuter_async.cli.progress import Board
from transmuter_async.hub import maintenance
from transmuter_async.telemetry import Event

MIB = 1 << 20
MODEL = Lfs(affine())


class Terminal(io.StringIO):
    """Standard error of somebody who looks."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    with FakeHub() as fake:
        found = World(fake, tmp_path / "cache")
        for name, value in (
            ("HF_HUB_CACHE", str(found.cache)),
            ("HF_ENDPOINT", fake.endpoint),
            ("HF_TOKEN", TOKEN),
            ("NO_PROXY", "*"),
            ("COLUMNS", "150"),
        ):
            monkeypatch.setenv(name, value)
        yield found


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, Any]:
    """Exit code, and what `--json` printed."""
    code = main([*arguments, "--json"])
    captured = capsys.readouterr()
    assert TOKEN not in captured.out + captured.err
    return code, json.loads(captured.out) if captured.out else None


def look(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Somebody looks at standard error, from now on."""
    found = Terminal()
    monkeypatch.setattr(sys, "stderr", found)
    return found


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_download_and_its_display(
    world: World, backend: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {"model.onnx": MODEL, "big.bin": Lfs(Repeated(20 * MIB)), "[/x].json": b"{}", "turn\u202eed.json": b"{}"}
    commit = world.fake.repo().commit(files)
    screen = look(monkeypatch)
    assert main(["download", "org/m", "*.json", "--backend", backend]) == 0
    assert main(["download", "org/m", "--backend", backend]) == 0
    shown = screen.getvalue()
    for text in ("org/m", "2/2 files", "4/4 files", "21.0 MB of 21.0 MB", "/s"):
        assert text in shown, text
    assert TOKEN not in shown
    assert str(world.pointer(commit, "model.onnx")) in capsys.readouterr().out


def event(name: str, span: int, file: str, **measurements: int) -> Event:
    facts = {"source": ("hf", "org/m", file), "revision": "main", "span": span, "check": "etag"}
    return Event(f"transmuter.hub.{name}", measurements, facts)


def test_the_display_counts_what_was_there_and_leaves_it_out_of_the_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(100))  # two looks at it for each event with bytes
    monkeypatch.setattr("transmuter_async.cli.progress.time.monotonic", lambda: next(clock) // 2)
    console = Console(file=io.StringIO(), force_terminal=True, width=140)
    board = Board(console, "org/m")

    def lines() -> list[str]:
        with console.capture() as capture:
            console.print(board.progress.make_tasks_table([task for task in board.progress.tasks if task.visible]))
        return [" ".join(part for part in line.split() if "━" not in part) for line in capture.get().splitlines()]

    board.take(event("hit", 1, "config.json", count=1, bytes=10))
    assert "1/1 files" in lines()[0]
    board.take(event("download.start", 2, "big"))
    board.take(event("download.progress", 2, "big", bytes=60_000_000, total=80_000_000))  # 59 of them are of yesterday
    assert "60.0 MB of 80.0 MB" in lines()[0]
    board.take(event("download.progress", 2, "big", bytes=62_000_000, total=80_000_000))
    assert "62.0 MB of 80.0 MB" in lines()[1]
    assert "2.0 MB/s" in lines()[1]
    assert "1/2 files" in lines()[0]
    board.take(event("download.start", 3, "other"))
    board.take(event("download.progress", 3, "other", bytes=30_000_000, total=40_000_000))
    assert "92.0 MB of 120.0 MB" in lines()[0]
    board.take(event("download.progress", 3, "other", bytes=31_000_000, total=40_000_000))
    assert "31.0 MB of 40.0 MB" in lines()[2]
    assert "MB/s" in lines()[0]
    assert not any(f"{rate}.0 MB/s" in lines()[0] for rate in range(5, 99)), "the resumed part came at once"
    board.take(event("download.stop", 2, "big", bytes=80_000_000))
    board.take(event("download.exception", 3, "other"))
    assert len(lines()) == 1
    assert "2/3 files" in lines()[0]
    for span, name, shown in ((4, "[/x].json", "[/x].json"), (5, "turn\u202eed", "turn?ed")):
        board.take(event("download.start", span, name))
        assert lines()[-1].startswith(shown)


def test_run_of_a_repository_shows_its_downloads(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.fake.repo().commit({"onnx/model.onnx": MODEL})
    screen = look(monkeypatch)
    assert (
        main(["run", "hf://org/m@main/onnx/model.onnx", "--fill", "random", "--dim", "n=2", "--compiler", "eager"]) == 0
    ), screen.getvalue()
    assert "loading hf://org/m@main/onnx/model.onnx" in screen.getvalue()
    assert "1/1 files" in screen.getvalue()


def test_download_says_what_it_did_as_json(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    files = {
        "onnx/model.onnx": MODEL,
        "onnx/model_fp16.onnx": Lfs(b"half"),
        "onnx/model.onnx_data": Lfs(b"d"),
        "a.json": b"{}",
    }
    commit = world.fake.repo().commit(files)
    code, data = call(capsys, "download", "org/m", "--list")
    assert code == 0
    assert [(each["file"], each["precision"], each["size"], each["data_size"]) for each in data["variants"]] == [
        ("onnx/model.onnx", "fp32", len(affine()), 1),
        ("onnx/model_fp16.onnx", "fp16", 4, 0),
    ]
    assert not (world.root / "blobs").exists(), "a list downloads nothing"
    code, data = call(capsys, "download", "org/m", "onnx/*_fp16.onnx", "a.json", "--revision", "main")
    assert code == 0
    assert data["files"] == {name: str(world.pointer(commit, name)) for name in ("onnx/model_fp16.onnx", "a.json")}
    assert {request.token for request in world.fake.requests if request.kind != "cdn"} == {f"Bearer {TOKEN}"}
    world.fake.requests.clear()
    assert call(capsys, "download", "org/m", "a.json", "--anonymous")[0] == 0
    assert {request.token for request in world.fake.requests} == {None}
    for arguments, kind in (
        (("org/m", "absent.bin"), "EntryNotFoundError"),
        (("org/m", "--revision", "v9"), "RevisionNotFoundError"),
        (("org/none",), "RepositoryNotFoundError"),
        (("a/b/c",), "InvalidReferenceError"),
    ):
        code, data = call(capsys, "download", *arguments)
        assert (code, data["kind"]) == (5, kind)


def test_cache(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    old = world.fake.repo().commit({"model.onnx": MODEL, "a.json": b"old"})
    call(capsys, "download", "org/m")
    new = world.fake.repo().commit({"model.onnx": MODEL, "a.json": b"new!"})
    call(capsys, "download", "org/m")

    code, data = call(capsys, "cache", "ls")
    assert code == 0
    assert data["cache"] == str(world.cache)
    (repo,) = data["repositories"]
    assert (repo["repo"], repo["folder"], repo["size"]) == ("org/m", str(world.root), len(affine()) + 7)
    found = {each["commit"]: each for each in repo["revisions"]}
    assert found[new]["refs"] == ["main"]
    assert {"file": "a.json", "size": 4, "etag": git_sha1(b"new!"), "checked": True} in found[new]["files"]
    assert call(capsys, "cache", "ls", "org/m") == (code, data)

    code, data = call(capsys, "cache", "path", "org/m", "a.json")
    assert (code, data["path"]) == (0, str(world.pointer(new, "a.json")))
    code, data = call(capsys, "cache", "path", "org/m", "a.json", "--revision", old)
    assert (code, data["path"]) == (0, str(world.pointer(old, "a.json")))

    code, data = call(capsys, "cache", "verify")
    assert code == 0
    assert {each["result"] for each in data["results"]} == {"right"}
    (world.root / "blobs" / git_sha1(b"new!")).write_bytes(b"NEW!")
    code, data = call(capsys, "cache", "verify", "org/m")
    assert code == 1
    assert [each["file"] for each in data["results"] if each["result"] == "wrong"] == ["a.json"]
    call(capsys, "download", "org/m")
    assert call(capsys, "cache", "verify")[0] == 0

    # What would be passed over is refused, and nothing is removed.
    before = world.state()
    for arguments in (
        ("rm", "org/m", "a.json"),
        ("rm", "org/m", "a.json", "--revision", old),
        ("ls", "org/m", "a.json"),
        ("verify", "org/m", "--revision", old),
        ("rm",),
    ):
        assert call(capsys, "cache", *arguments)[0] == 2, arguments
    for action in ("ls", "verify", "rm", "path"):
        for name, kind in (("org/none", "LocalEntryNotFoundError"), ("../m", "InvalidReferenceError")):
            code, data = call(capsys, "cache", action, name)
            assert (code, data["kind"]) == (5, kind)
    assert world.state() == before

    code, data = call(capsys, "cache", "rm", "org/m", "--revision", old)
    assert (code, data) == (0, {"size": 3, "files": 1, "kept": 0})
    assert world.pointer(new, "model.onnx").read_bytes() == affine()
    code, data = call(capsys, "cache", "rm", "org/m")
    assert (code, data["files"]) == (0, 2)
    assert not world.root.exists()


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_verify_ends_when_it_is_interrupted(
    world: World, backend: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C while a large cache is hashed: the command ends, and so does the hashing."""
    ended = threading.Event()

    def endless(cache: Path | None = None, repo: str | None = None, *, stop: maintenance.Stop, **_: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        try:
            while True:
                stop.check()
        finally:
            ended.set()

    monkeypatch.setattr("transmuter_async.cli.cache.verify_cache", endless)
    assert main(["cache", "verify", "--backend", backend]) == 130
    assert "interrupted" in capsys.readouterr().err
    assert ended.wait(10)
