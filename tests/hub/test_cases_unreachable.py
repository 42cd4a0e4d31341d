"""The Hub is away, refuses, or must not be asked."""

from __future__ import annotations

import json
import logging
import shutil
import socket

import pytest

from tests.hub.fake_hub import Fault, Lfs, git_sha1
from tests.hub.support import TOKEN, World
from transmuter_async.hub import (
    EntryNotFoundError,
    HubAuthError,
    HubConnectionError,
    HubConsistencyError,
    HubError,
    HubHTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

FILES = {"config.json": b"{}", "model.onnx": Lfs(b"weights" * 1000)}
SENT = {False: 1, True: 2}
"""aiohttp itself sends a GET once more, at once, where the connection was closed without an answer."""
AWAY = {
    "refused": Fault(refuse=True),
    "503": Fault(status=503),
    "429": Fault(status=429, headers={"Retry-After": "7"}),
    "stall": Fault(stall=10),
    "captive portal": Fault(body=b"<html>log in</html>"),
    "deleted branch": Fault(status=404, headers={"X-Error-Code": "RevisionNotFound"}),
    "private now": Fault(status=401, headers={"X-Error-Code": "RepoNotFound"}),
    "bad token": Fault(status=401, headers={"X-Error-Message": "Invalid credentials in Authorization header"}),
}


@pytest.mark.parametrize("why", AWAY)
async def test_08_saved_metadata_stands_in_at_once(world: World, why: str, caplog: pytest.LogCaptureFixture) -> None:
    world.fake.repo().commit(FILES)
    await world.load()
    world.told(), world.asked()
    state = world.state()
    world.fake.fault("info", "main", AWAY[why], always=True)
    timeout = {"metadata_timeout": 0.2} if why == "stall" else {}
    with caplog.at_level(logging.WARNING, "transmuter_async.hub"):
        await world.load(client=timeout)
    assert world.told() == [("info", "saved"), ("hit", "config.json", "etag"), ("hit", "model.onnx", "etag")]
    assert world.asked() == ["info main"] * SENT[why == "refused"]
    assert world.naps.seconds == []
    assert world.state() == state
    (warning,) = [record.getMessage() for record in caplog.records]
    assert warning.startswith("using the saved metadata of org/m@main")
    assert TOKEN not in warning


async def test_08_a_dead_port_and_a_dead_name(world: World) -> None:
    world.fake.repo().commit(FILES)
    await world.load()
    world.told()
    for endpoint in ("http://127.0.0.1:9", "http://does-not-exist.invalid"):
        await world.load(client={"endpoint": endpoint})
        assert world.told()[0] == ("info", "saved")


async def test_09_a_file_that_is_not_cached_is_tried_and_fails_alone(world: World) -> None:
    commit = world.fake.repo().commit(FILES)
    await world.load("config.json")
    world.told(), world.asked()
    world.fake.fault("info", "main", Fault(status=503), always=True)
    world.fake.fault("resolve", "model.onnx", Fault(status=503), always=True)
    with pytest.raises(HubHTTPError, match=r"org/m@main/model\.onnx: the Hub answered 503") as caught:
        await world.load(client={"concurrency": 1})
    assert caught.value.status == 503
    assert world.told() == [("info", "saved"), ("hit", "config.json", "etag"), ("dl!", "model.onnx", "HubHTTPError")]
    assert world.asked() == ["info main"] + ["resolve model.onnx"] * 6
    assert len(world.naps.seconds) == 5
    assert not world.pointer(commit, "model.onnx").exists()
    assert world.leftovers() == []


async def test_10_nothing_saved_means_six_attempts_and_the_error(world: World) -> None:
    world.fake.repo().commit(FILES)
    world.fake.fault("info", "main", Fault(refuse=True), always=True)
    with pytest.raises(HubConnectionError, match=r"Check the network\.$"):
        await world.load()
    assert world.told() == [("info!", "HubConnectionError")]
    assert world.asked() == ["info main"] * 6 * SENT[True]
    for slept, wanted in zip(world.naps.seconds, (1, 2, 4, 8, 8), strict=True):
        assert 0.8 * wanted <= slept <= 1.2 * wanted
    assert not world.cache.exists()


async def test_10_files_of_another_tool_are_named_and_not_used(world: World) -> None:
    commit = world.fake.repo().commit(FILES)
    await world.load()
    world.forget()
    world.told()
    world.fake.fault("info", "main", Fault(status=500), always=True)
    state = world.state()
    for revision, kind in (("main", "main"), (commit, commit)):
        world.fake.fault("info", kind, Fault(status=500), always=True)
        with pytest.raises(HubHTTPError, match="set HF_HUB_OFFLINE=1 to use the cached files unchecked"):
            await world.load(revision=revision)
    assert world.told() == [("info!", "HubHTTPError")] * 2
    assert world.state() == state


async def test_11_offline_opens_no_socket(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = world.fake.repo().commit(FILES)
    await world.load()
    world.told(), world.asked()
    # Another tool has moved the branch on, after fetching one file: what we know to be complete counts.
    (world.root / "refs" / "main").write_text("0" * 40)
    state = world.state()
    tried: list[object] = []
    for owner, name in ((socket.socket, "connect"), (socket.socket, "connect_ex"), (socket, "getaddrinfo")):
        monkeypatch.setattr(owner, name, lambda *arguments, **_: tried.append(arguments))
    for options in ({"client": {"offline": True}}, {"revision": commit, "client": {"offline": True}}):
        found = await world.load(**options)
        assert found["model.onnx"].read_bytes() == b"weights" * 1000
        assert world.told() == [("hit", "config.json", "offline"), ("hit", "model.onnx", "offline")]
    await world.load(revision=commit)  # pinned and saved: not offline, and no question either
    assert world.told() == [("hit", "config.json", "etag"), ("hit", "model.onnx", "etag")]
    assert tried == []
    assert world.asked() == []
    assert world.state() == state


async def test_11_offline_on_a_cache_of_another_tool(world: World) -> None:
    world.fake.repo().commit(FILES)
    await world.load()
    world.forget()
    world.told(), world.asked()
    found = await world.load(["*.json", "model.onnx"], client={"offline": True})
    assert sorted(found) == ["config.json", "model.onnx"]
    assert world.told() == [("hit", "config.json", "offline"), ("hit", "model.onnx", "offline")]


async def test_12_offline_and_missing(world: World) -> None:
    commit = world.fake.repo().commit(FILES)
    with pytest.raises(LocalEntryNotFoundError, match="nothing of org/m@main is in the cache"):
        await world.load(client={"offline": True})
    await world.load("config.json")
    world.told(), world.asked()
    with pytest.raises(
        LocalEntryNotFoundError, match=r"org/m@main/model.onnx is not to be had: it is not in the cache"
    ):
        await world.load("model.onnx", client={"offline": True})
    (world.root / "blobs" / git_sha1(b"{}")).unlink()  # the link dangles now
    with pytest.raises(LocalEntryNotFoundError, match=r"config\.json"):
        await world.load("config.json", client={"offline": True})
    with pytest.raises(EntryNotFoundError, match="has no file 'other'"):
        await world.load("other", client={"offline": True})
    shutil.rmtree(world.root / ".transmuter")
    world.pointer(commit, "x").write_bytes(b"")
    note = world.root / ".no_exist" / commit / "other"
    note.parent.mkdir(parents=True)
    note.touch()
    with pytest.raises(LocalEntryNotFoundError, match="it is not in the repository"):
        await world.load("other", client={"offline": True})
    assert world.told() == []
    assert world.asked() == []


async def test_offline_and_always_verified(world: World) -> None:
    world.fake.repo().commit(FILES)
    found = await world.load()
    world.told()
    await world.load(client={"offline": True, "verify": "always"})
    assert world.told() == [("hit", "config.json", "hash"), ("hit", "model.onnx", "hash")]
    found["config.json"].write_bytes(b"[]")
    with pytest.raises(HubError, match="does not have the hash"):
        await world.load("config.json", client={"offline": True, "verify": "always"})


ERRORS = {
    "private": (Fault(status=401), RepositoryNotFoundError, "does not exist .* or is private"),
    "missing": (Fault(status=404, headers={"X-Error-Code": "RepoNotFound"}), RepositoryNotFoundError, "or is private"),
    "bad token": (
        Fault(status=401, headers={"X-Error-Message": "Invalid credentials in Authorization header"}),
        HubAuthError,
        "wrong or has expired",
    ),
    "bad token in the body": (
        Fault(status=401, body=json.dumps({"error": "Invalid credentials in Authorization header"}).encode()),
        HubAuthError,
        "wrong or has expired",
    ),
    "revision": (
        Fault(status=404, headers={"X-Error-Code": "RevisionNotFound"}),
        RevisionNotFoundError,
        "has no revision 'main'",
    ),
    "portal": (Fault(body=b"<html>log in</html>"), HubConsistencyError, "not the Hub's"),
    "teapot": (
        Fault(status=418, headers={"X-Request-Id": "r-1"}, body=b'{"errors": [{"message": "short"}]}'),
        HubHTTPError,
        "418.*short.*r-1",
    ),
    "too large": (Fault(body=b" " * 100), HubConsistencyError, "not the Hub's"),
}


@pytest.mark.parametrize("which", ERRORS)
async def test_32_refusals_say_why_and_are_not_repeated(world: World, which: str) -> None:
    fault, kind, text = ERRORS[which]
    world.fake.repo().commit(FILES)
    world.fake.fault("info", "main", fault, always=True)
    with pytest.raises(kind, match=text) as caught:
        await world.load()
    assert type(caught.value) is kind
    assert TOKEN not in str(caught.value)
    assert world.told() == [("info!", kind.__name__)]
    assert world.asked() == ["info main"]
    assert not world.cache.exists()
