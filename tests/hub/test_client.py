"""The client as an object: entering, leaving, several calls at once, and that nothing blocks or leaks."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest

from tests.hub.fake_hub import Fault, Lfs
from tests.hub.support import World, in_worker, wait_for
from transmuter_async.errors import MisuseError
from transmuter_async.hub import (
    EntryNotFoundError,
    Environment,
    HubClient,
    HubConnectionError,
    InvalidReferenceError,
    background,
)
from transmuter_async.telemetry import Telemetry

LARGE = b"weights" * 200_000


async def test_it_must_be_entered_and_only_once(world: World) -> None:
    client = HubClient(environment=world.environment())
    with pytest.raises(MisuseError, match="async with"):
        await client.info("org/m")
    assert not client.entered
    async with client:
        assert client.entered
        with pytest.raises(MisuseError, match="entered already"):
            await client.__aenter__()
    with pytest.raises(MisuseError, match="async with"):
        await client.info("org/m")
    await client.aclose()
    with pytest.raises(InvalidReferenceError, match="concurrency=0"):
        HubClient(concurrency=0)


async def test_it_can_be_entered_again(world: World) -> None:
    world.fake.repo().commit({"p": b"1"})
    client = HubClient(environment=world.environment())
    for _ in range(2):
        async with client:
            assert (await client.download("org/m"))["p"].read_bytes() == b"1"


async def test_many_first_calls_at_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "b", "c", "d"):
        world.fake.repo(f"org/{name}").commit({"p": name.encode()})
    monkeypatch.setenv("HF_HUB_CACHE", str(world.cache))
    monkeypatch.setenv("HF_ENDPOINT", world.fake.endpoint)
    found = {}

    async def load(hub: HubClient, name: str) -> None:
        found[name] = (await hub.download(f"org/{name}", "p"))["p"]

    async with HubClient() as hub, anyio.create_task_group() as tasks:
        for name in ("a", "b", "c", "d"):
            tasks.start_soon(load, hub, name)
    assert {name: path.read_bytes() for name, path in found.items()} == {name: name.encode() for name in "abcd"}


async def test_closing_ends_what_is_running(world: World) -> None:
    world.fake.repo().commit({"p": Lfs(LARGE)})
    world.fake.fault("cdn", "p", Fault(stall=1000))
    outcome: list[BaseException] = []

    async def load(hub: HubClient) -> None:
        try:
            await hub.download("org/m")
        except MisuseError as error:
            outcome.append(error)

    async with anyio.create_task_group() as tasks, world.client() as hub:
        tasks.start_soon(load, hub)
        await wait_for(lambda: world.fake.asked("cdn") == ["cdn p"])
    assert "was closed while it was loading" in str(outcome[0])
    assert world.told() == [("info", "fetched"), ("dl!", "p", "cancelled")]
    assert world.leftovers() == []


async def test_events_come_in_the_callers_loop_in_order_and_nested(world: World) -> None:
    world.fake.repo().commit({"p": Lfs(LARGE)})
    bus = Telemetry()
    names = []
    async with bus.subscribe("transmuter") as events, HubClient(telemetry=bus, environment=world.environment()) as hub:
        with bus.span("transmuter.load", {"source": ("hf", "org/m", "p")}) as span:
            await hub.download("org/m")
        bus.close()
        async for event in events:
            if not event.name.endswith("progress"):
                names.append(event.name.removeprefix("transmuter."))
            if event.name.startswith("transmuter.hub") and not event.name.endswith("progress"):
                assert event.metadata["parent"] == span.id
    assert names == [
        "load.start",
        "hub.info.start",
        "hub.info.stop",
        "hub.download.start",
        "hub.download.stop",
        "load.stop",
    ]


async def test_nobody_listens(world: World) -> None:
    world.fake.repo().commit({"p": b"1"})
    async with HubClient(environment=world.environment()) as hub:
        await hub.download("org/m")
        await hub.download("org/m")


@asynccontextmanager
async def undisturbed() -> AsyncIterator[None]:
    """Nothing in the block keeps the loop's thread busy for long. (What neighbours on the processor take is not counted.)"""
    longest = 0.0

    async def heartbeat() -> None:
        nonlocal longest
        while True:
            used = time.thread_time()
            await anyio.lowlevel.checkpoint()
            longest = max(longest, time.thread_time() - used)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(heartbeat)
        yield
        tasks.cancel_scope.cancel()
    assert longest < 0.05


async def test_a_large_listing_is_not_parsed_in_the_loop(world: World) -> None:
    files = {f"folder/file-{i:06}.bin": b"%d" % (i % 7) for i in range(5_000)}
    await in_worker(world.fake.repo().commit, files)
    async with world.client() as hub, undisturbed():
        await hub.download("org/m", "*file-004999.bin")
    assert world.told() == [("info", "fetched"), ("dl", "folder/file-004999.bin", 1)]


def fill(folder: Path, names: Sequence[str]) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_bytes(b"1")


async def test_many_names_are_not_looked_at_in_the_loop(world: World, tmp_path: Path) -> None:
    names = [f"{'layer_' * 20}{i:05}/model.onnx" for i in range(1_500)]
    world.fake.repo().commit(dict.fromkeys(names, b"1"))
    folder = tmp_path / "folder"
    await in_worker(fill, folder, names)
    async with world.client() as hub, undisturbed():
        assert len(await hub.variants("org/m")) == 1_500
        assert len(await hub.variants(folder)) == 1_500
        for repo in ("hf://org/m", folder):
            with pytest.raises(InvalidReferenceError, match="and 1470 more") as caught:
                await hub.fetch_model(repo, lambda path: ())
            assert len(str(caught.value)) < 10_000
        with pytest.raises(EntryNotFoundError):
            await hub.download("org/m", [*names, "absent.onnx"])
        assert len(await hub.download(folder)) == 1_500


async def test_the_token_is_in_no_text(world: World) -> None:
    environment = Environment(cache=world.cache, endpoint=world.fake.endpoint, token="hf_secret")
    assert "hf_secret" not in repr(environment)
    world.fake.fault("info", "main", Fault(status=500, headers={"X-Error-Message": "a\u2028b"}), always=True)
    async with world.client() as hub:
        with pytest.raises(Exception, match="500") as caught:
            await hub.info("org/m")
    assert "hf_secret" not in str(caught.value)


async def test_nobody_waits_for_a_name_server_that_is_silent(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, answers = threading.Event(), threading.Event()

    def silent(*_: object, **__: object) -> None:
        asked.set()
        answers.wait(60)
        raise OSError("nobody is there")

    monkeypatch.setattr(socket, "getaddrinfo", silent)
    began = time.monotonic()
    async with (
        world.client(endpoint="http://hub.invalid", metadata_timeout=50) as hub,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(hub.info, "org/m")
        await wait_for(asked.is_set)
        tasks.cancel_scope.cancel()
    assert time.monotonic() - began < 20
    assert world.told() == [("info!", "CancelledError")]
    asked.clear()
    async with world.client(endpoint="http://hub.invalid", metadata_timeout=0.05) as hub:
        with pytest.raises(HubConnectionError, match="no byte came in time"):
            await hub.info("org/m")
    answers.set()


async def test_where_no_loop_can_be_started(
    world: World, monkeypatch: pytest.MonkeyPatch, anyio_backend_name: str
) -> None:
    if anyio_backend_name == "asyncio":
        pytest.skip("there the caller's loop is used")

    def refuse(*_: object, **__: object) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(background.anyio, "run", refuse)
    with anyio.fail_after(30):
        async with world.client() as hub:
            with pytest.raises(HubConnectionError, match="Too many open files"):
                await hub.info("org/m")
