"""What the Hub tests share: a fake Hub, an empty cache, a client between them, and short words for what happened."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import anyio
import anyio.lowlevel

from tests.hub.fake_hub import FakeHub
from transmuter_async.hub import Environment, HubClient
from transmuter_async.telemetry import CATALOGUE, Event, Telemetry

T = TypeVar("T")
TOKEN = "hf_secretsecretsecret"


class Naps:
    """Stands in for waiting: remembers how long, and does not."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    async def __call__(self, seconds: float) -> None:
        self.seconds.append(seconds)
        await anyio.lowlevel.checkpoint()


class World:
    """One test's Hub, cache and events."""

    def __init__(self, fake: FakeHub, cache: Path) -> None:
        self.fake = fake
        self.cache = cache
        self.naps = Naps()
        self.events: list[Event] = []

    def environment(self, **changes: Any) -> Environment:
        base = Environment(
            cache=self.cache, endpoint=self.fake.endpoint, token=TOKEN, metadata_timeout=5, download_timeout=5
        )
        return replace(base, **changes)

    @asynccontextmanager
    async def client(
        self,
        *,
        verify: Any = "once",
        concurrency: int = 8,
        sleep: Any = None,
        bus: Telemetry | None = None,
        **changes: Any,
    ) -> AsyncIterator[HubClient]:
        """A client; what it tells is in `events` afterwards."""
        bus = bus or Telemetry()
        async with bus.subscribe("transmuter.hub", buffer=100_000) as subscription:
            environment = self.environment(**changes)
            try:
                async with HubClient(
                    telemetry=bus,
                    environment=environment,
                    verify=verify,
                    concurrency=concurrency,
                    sleep=sleep or self.naps,
                ) as client:
                    yield client
            finally:
                try:
                    while True:
                        self.events.append(subscription.receive_nowait())
                except anyio.WouldBlock:
                    pass

    async def load(
        self,
        files: Any = None,
        *,
        repo: str = "org/m",
        revision: str = "main",
        client: dict[str, Any] | None = None,
        **options: Any,
    ):
        """One load in a client of its own: what a program does that is started, loads and ends."""
        async with self.client(**(client or {})) as hub:
            return await hub.download(repo, files, revision=revision, **options)

    # -- what happened ----------------------------------------------------------------------------------------------

    def told(self) -> list[tuple[Any, ...]]:
        """The events since the last call, without progress and starts, in short: `("info", "fetched")`, `("hit", file, check)`,
        `("dl", file, bytes)`, and with `!` and the kind of error where a span failed."""
        events, self.events = self.events, []
        short: list[tuple[Any, ...]] = []
        open_spans: set[int] = set()
        for event in events:
            kind = CATALOGUE[event.name]
            assert set(kind.measurements) <= set(event.measurements), event
            assert set(kind.metadata) <= set(event.metadata), event
            name = event.name.removeprefix("transmuter.hub.")
            source = event.metadata["source"]
            assert source[0] == "hf", event
            if name.endswith(".start"):
                open_spans.add(event.metadata["span"])
                continue
            if name.endswith((".stop", ".exception")):
                open_spans.remove(event.metadata["span"])
            match name:
                case "hit":
                    short.append(("hit", source[2], event.metadata["check"]))
                case "info.stop":
                    short.append(("info", event.metadata["result"]))
                case "download.stop":
                    short.append(("dl", source[2], event.measurements["bytes"]))
                case "info.exception":
                    short.append(("info!", type(event.metadata["reason"]).__name__))
                case "download.exception":
                    cancelled = event.metadata["kind"] == "cancelled"
                    short.append(
                        ("dl!", source[2], "cancelled" if cancelled else type(event.metadata["reason"]).__name__)
                    )
                case "download.progress":
                    assert 0 <= event.measurements["bytes"] <= event.measurements["total"]
                    assert event.metadata["span"] in open_spans
                case _:
                    raise AssertionError(event.name)
            assert TOKEN not in repr(event)
            assert "Signature=" not in repr(event)
        assert not open_spans
        return sorted(
            short, key=lambda each: each[1] if each[0] in ("hit", "dl", "dl!") else ""
        )  # stable: a file's own keep their order

    def asked(self, *kinds: str) -> list[str]:
        """What the Hub was asked for since the last call, sorted where the order is not ours to say."""
        requests, self.fake.requests = self.fake.requests, []
        return [f"{each.kind} {each.what}" for each in requests if not kinds or each.kind in kinds]

    # -- the disk ---------------------------------------------------------------------------------------------------

    @property
    def root(self) -> Path:
        return self.cache / "models--org--m"

    def blobs(self) -> list[str]:
        return sorted(path.name for path in (self.root / "blobs").glob("*"))

    def leftovers(self) -> list[str]:
        """Temporary files, whole or partial."""
        return sorted(
            str(path.relative_to(self.cache))
            for pattern in ("*.incomplete", "*.tmp")
            for path in self.cache.rglob(pattern)
        )

    def written(self) -> int:
        """Bytes of the unfinished download, 0 when there is none (or not any more)."""
        size = 0
        for path in (self.root / "blobs").glob("*.incomplete"):
            with suppress(FileNotFoundError):
                size = max(size, path.stat().st_size)
        return size

    def pointer(self, commit: str, file: str) -> Path:
        return self.root / "snapshots" / commit / file

    def ref(self, revision: str = "main") -> str:
        return (self.root / "refs" / revision).read_text()

    def record(self, etag: str) -> dict[str, Any]:
        return json.loads((self.root / ".transmuter" / "v1" / "blobs" / f"{etag}.json").read_text())

    def forget(self) -> None:
        """Removes what only we write: the cache is then as another tool has left it."""
        import shutil

        shutil.rmtree(self.root / ".transmuter", ignore_errors=True)

    def state(self) -> dict[str, Any]:
        """Every file of the cache, locks aside, with what must not change when nothing is to be done."""
        found: dict[str, Any] = {}
        for path in sorted(self.cache.rglob("*")):
            if ".locks" in path.parts or path.is_dir():
                continue
            status = path.lstat()
            found[str(path.relative_to(self.cache))] = (
                status.st_ino,
                status.st_size,
                status.st_mtime_ns,
                path.is_symlink(),
            )
        return found


async def in_worker(work: Callable[..., T], *arguments: Any) -> T:
    """What a test does itself and takes time: large files are made and read outside of the loop that is being watched."""
    return await anyio.to_thread.run_sync(work, *arguments)


async def wait_for(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    """Until something that happens elsewhere (a server, a process) has happened."""
    with anyio.fail_after(seconds):
        while not condition():  # there is nothing to wait on; a turn of the loop lets the threads of others run
            await anyio.lowlevel.checkpoint()
