"""Several who want one file, and those who stop in the middle."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import anyio
import filelock
import pytest

from tests.hub.fake_hub import Fault, Lfs, Repeated, sha256
from tests.hub.support import World, in_worker, wait_for
from transmuter_async.hub import HubError
from transmuter_async.hub.workers import Stop, Stopped

ROOT = Path(__file__).parents[2]
LARGE = b"weights" * 200_000
BIG = Repeated(24 << 20, b"big")
assert len(BIG.sha256) == 64  # computed here once, not on the loop of the first test that asks
MIB = 1 << 20

CHILD = """
import sys, types
from pathlib import Path
package = types.ModuleType("transmuter_async")  # the hub only: the whole package would import jax, for seconds
package.__path__ = [str(Path.cwd() / "transmuter_async")]
sys.modules["transmuter_async"] = package
import anyio
from transmuter_async.hub import Environment, HubClient
if len(sys.argv) > 5:  # a file system on which locks do nothing
    import filelock
    filelock.FileLock.acquire = lambda self, *_, **__: None
async def main():
    environment = Environment(cache=Path(sys.argv[1]), endpoint=sys.argv[2])
    async with HubClient(environment=environment) as hub:
        print((await hub.download("org/m", sys.argv[3]))[sys.argv[3]], flush=True)
anyio.run(main, backend=sys.argv[4])
"""


def is_big(path: Path) -> bool:
    """Whether a file has the content of `BIG`."""
    return sha256(path.read_bytes()) == BIG.sha256


@contextmanager
def child(world: World, file: str, *options: str, backend: str = "asyncio") -> Iterator[subprocess.Popen]:
    """A process that loads the file with a client of its own."""
    command = [sys.executable, "-c", CHILD, str(world.cache), world.fake.endpoint, file, backend, *options]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


async def ended(process: subprocess.Popen) -> Path:
    """What a child that has ended has loaded."""
    out, _ = await anyio.to_thread.run_sync(process.communicate)
    return Path(out.strip())


async def test_34_two_processes_share_one_download(world: World) -> None:
    world.fake.repo().commit({"p": Lfs(LARGE)})
    world.fake.fault("resolve", "p", Fault(hold=True))
    with child(world, "p") as process:
        await wait_for(lambda: "resolve p" in world.fake.asked())
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(world.load)
            await wait_for(lambda: world.fake.asked("info") == ["info main"] * 2)
            world.fake.release()  # whether the second waits for the lock already or comes to it later is all one
            assert (await ended(process)).read_bytes() == LARGE
    assert world.told() == [("info", "fetched"), ("hit", "p", "etag")]
    assert world.asked("resolve") == ["resolve p"]
    assert (world.cache / ".locks" / "models--org--m" / f"{sha256(LARGE)}.lock").exists()
    assert world.leftovers() == []


async def test_34_two_clients_and_two_loads_share_one_download(world: World) -> None:
    world.fake.repo().commit({"p": Lfs(LARGE)})
    world.fake.fault("resolve", "p", Fault(hold=True))
    async with world.client() as one, world.client() as other, anyio.create_task_group() as tasks:
        for hub in (one, one, other):
            tasks.start_soon(hub.download, "org/m")
        await wait_for(lambda: len(world.fake.asked("info")) == 3)
        world.fake.release()
    assert sorted(world.told()) == [("dl", "p", len(LARGE)), *[("hit", "p", "etag")] * 2, *[("info", "fetched")] * 3]
    assert world.asked("resolve") == ["resolve p"]


async def test_34_a_waiter_takes_over_when_the_leader_fails(world: World) -> None:
    world.fake.repo().commit({"p": Lfs(LARGE)})
    world.fake.fault("resolve", "p", Fault(status=400, hold=True))
    outcomes = []

    async def load(hub) -> None:
        try:
            outcomes.append(await hub.download("org/m"))
        except HubError as error:
            outcomes.append(error)

    async with world.client() as hub, anyio.create_task_group() as tasks:
        for _ in range(3):
            tasks.start_soon(load, hub)
        await wait_for(lambda: len(world.fake.asked("info")) == 3)
        world.fake.release()
    assert len([each for each in outcomes if isinstance(each, dict)]) == 2
    # The last may ask for its facts while the first fails already.
    assert sorted(each[0] for each in world.told()) == ["dl", "dl!", "hit", "info", "info", "info"]


async def test_35_where_locks_do_nothing_both_download(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filelock.FileLock, "acquire", lambda self, *_, **__: None)
    commit = world.fake.repo().commit({"p": Lfs(LARGE)})
    world.fake.fault("cdn", "p", *[Fault(hold=True)] * 2)
    with child(world, "p", "no locks") as process:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(world.load)
            await wait_for(lambda: world.fake.asked("cdn") == ["cdn p"] * 2)
            world.fake.release()
            assert (await ended(process)).read_bytes() == LARGE
    assert world.told() == [("info", "fetched"), ("dl", "p", len(LARGE))]
    assert world.pointer(commit, "p").read_bytes() == LARGE
    assert world.blobs() == [sha256(LARGE)]
    assert world.leftovers() == []


async def _cancelled_load(world: World, how: str, loaded: int) -> None:
    """A load that is cancelled after `loaded` bytes are on the disk."""

    async with world.client() as hub:
        if how == "native" and hub._home.__class__.__name__ == "Direct":
            task = asyncio.ensure_future(hub.download("org/m"))
            await wait_for(lambda: world.written() >= loaded)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            assert task.cancelled()
            return
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(hub.download, "org/m")
            await wait_for(lambda: world.written() >= loaded)
            began = time.monotonic()
            tasks.cancel_scope.cancel()
        assert time.monotonic() - began < 5  # the server itself would never end it


@pytest.mark.parametrize("how", ["scope", "native"])
async def test_36_a_cancelled_download_is_resumed(world: World, how: str) -> None:
    world.fake.repo().commit({"p": Lfs(BIG)})
    world.fake.fault("cdn", "p", Fault(stall=(12 << 20) + 500))
    await _cancelled_load(world, how, 11 << 20)
    assert world.told() == [("info", "fetched"), ("dl!", "p", "cancelled")]
    (left,) = world.leftovers()
    kept = (world.cache / left).stat().st_size
    assert 11 << 20 <= kept <= (12 << 20) + 500
    world.asked()
    found = await world.load()
    assert await in_worker(is_big, found["p"])
    assert world.told() == [("info", "fetched"), ("dl", "p", BIG.size)]
    (cdn,) = [each for each in world.fake.requests if each.kind == "cdn"]
    assert cdn.range == f"bytes={kept}-"
    assert world.leftovers() == []


async def test_36_little_is_not_kept(world: World) -> None:
    world.fake.repo().commit({"p": Lfs(BIG)})
    world.fake.fault("cdn", "p", Fault(stall=(2 << 20) + 500))
    await _cancelled_load(world, "scope", 1 << 20)
    assert world.told() == [("info", "fetched"), ("dl!", "p", "cancelled")]
    assert world.leftovers() == []
    assert world.blobs() == []


async def test_36_a_waiter_takes_over_from_a_cancelled_leader(world: World) -> None:
    world.fake.repo().commit({"p": Lfs(LARGE)})
    world.fake.fault("cdn", "p", Fault(stall=1000))
    async with world.client() as hub, anyio.create_task_group() as tasks:
        scope = anyio.CancelScope()

        async def leader() -> None:
            with scope:
                await hub.download("org/m")

        tasks.start_soon(leader)
        await wait_for(lambda: world.fake.asked("cdn") == ["cdn p"])
        tasks.start_soon(hub.download, "org/m")
        await wait_for(lambda: len(world.fake.asked("info")) == 2)
        scope.cancel()
    assert [each[0] for each in world.told()] == ["info", "info", "dl!", "dl"]
    assert world.leftovers() == []


async def test_36_a_deadline_ends_a_download_in_time(world: World) -> None:
    world.fake.repo().commit({"p": Lfs(LARGE)})
    world.fake.fault("cdn", "p", Fault(stall=1000))
    async with world.client() as hub:
        began = time.monotonic()
        with anyio.move_on_after(0.4) as scope:
            await hub.download("org/m")
        assert scope.cancelled_caught
        assert time.monotonic() - began < 5
    assert world.told()[-1] == ("dl!", "p", "cancelled")


@pytest.mark.parametrize("mebibytes", [2, 12])
async def test_a_killed_process_leaves_what_is_resumed_or_swept(world: World, mebibytes: int) -> None:
    world.fake.repo().commit({"p": Lfs(BIG)})
    world.fake.fault("cdn", "p", Fault(stall=mebibytes * MIB + 500))
    with child(world, "p") as process:
        await wait_for(lambda: world.written() >= (mebibytes - 1) * MIB)
        process.send_signal(signal.SIGKILL)
        await anyio.to_thread.run_sync(process.wait)
    (left,) = world.leftovers()
    # Young partial files may still have a writer: they are let alone for a minute.
    young = (world.cache / left).stat().st_size
    os.utime(world.cache / left, (time.time() - 61, time.time() - 61))
    world.asked()
    found = await world.load()
    assert world.told() == [("info", "fetched"), ("dl", "p", BIG.size)]
    (cdn,) = [each for each in world.fake.requests if each.kind == "cdn"]
    assert cdn.range == (f"bytes={young}-" if mebibytes == 12 else None)
    assert await in_worker(is_big, found["p"])
    assert world.leftovers() == []


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_36_ctrl_c_keeps_what_can_be_resumed(world: World, backend: str) -> None:
    world.fake.repo().commit({"p": Lfs(BIG)})
    world.fake.fault("cdn", "p", Fault(stall=12 * MIB + 500))
    with child(world, "p", backend=backend) as process:
        anyio.run(wait_for, lambda: world.written() >= 11 * MIB)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) != 0
    assert 11 * MIB <= world.written() <= 12 * MIB + 500
    assert anyio.run(world.load)["p"].stat().st_size == BIG.size
    assert world.told() == [("info", "fetched"), ("dl", "p", BIG.size)]
    assert [each.range for each in world.fake.requests if each.kind == "cdn"][1:] != [None]


@pytest.mark.parametrize("damage", ["wrong", "too long", "too young"])
async def test_a_partial_file_that_is_of_no_use(world: World, damage: str) -> None:
    world.fake.repo().commit({"p": Lfs(BIG)})
    left = world.root / "blobs" / f"{BIG.sha256}.0123abcd.incomplete"

    def write() -> None:
        content = BIG.read(0, BIG.size + 1 if damage == "too long" else 9 << 20)
        left.parent.mkdir(parents=True)
        left.write_bytes(b"x" + content[1:] if damage == "wrong" else content)
        if damage == "too long":
            with left.open("ab") as file:
                file.write(b"x")

    await in_worker(write)
    if damage != "too young":
        os.utime(left, (1, 1))
    found = await world.load()
    assert world.told() == [("info", "fetched"), ("dl", "p", BIG.size)]
    assert await in_worker(is_big, found["p"])
    ranges = [each.range for each in world.fake.requests if each.kind == "cdn"]
    assert ranges == (["bytes=9437184-", None] if damage == "wrong" else [None])
    assert world.leftovers() == ([str(left.relative_to(world.cache))] if damage == "too young" else [])


async def test_36_a_cancel_while_the_partial_file_is_read_loses_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.fake.repo().commit({"p": Lfs(BIG)})
    left = world.root / "blobs" / f"{BIG.sha256}.0123abcd.incomplete"

    def write() -> None:
        left.parent.mkdir(parents=True)
        left.write_bytes(BIG.read(0, 20 << 20))
        os.utime(left, (1, 1))

    await in_worker(write)
    reading = threading.Event()

    def check(self: Stop) -> None:
        reading.set()
        if self._flag.wait(10):
            raise Stopped

    monkeypatch.setattr(Stop, "check", check)
    async with world.client() as hub, anyio.create_task_group() as tasks:
        tasks.start_soon(hub.download, "org/m")
        await wait_for(reading.is_set)
        tasks.cancel_scope.cancel()
    monkeypatch.undo()
    (kept,) = world.leftovers()
    assert (world.cache / kept).stat().st_size == 20 << 20
    world.told(), world.asked()
    await world.load()
    assert world.told() == [("info", "fetched"), ("dl", "p", BIG.size)]
    assert [each.range for each in world.fake.requests if each.kind == "cdn"] == [f"bytes={20 << 20}-"]


async def test_a_partial_file_that_is_taken_away_under_our_hands(world: World) -> None:
    world.fake.repo().commit({"p": Lfs(LARGE)})
    world.fake.fault("cdn", "p", Fault(hold=True))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(world.load)
        await wait_for(lambda: world.fake.asked("cdn") == ["cdn p"])
        (left,) = world.leftovers()
        (world.cache / left).rename(world.cache / "elsewhere")
        world.fake.release()
    assert world.told() == [("info", "fetched"), ("dl", "p", len(LARGE))]
    assert world.asked("cdn") == ["cdn p"] * 2


async def test_no_thread_is_left_behind(world: World) -> None:
    world.fake.repo().commit({"p": Lfs(LARGE), "q": b"1"})
    await world.load()
    await wait_for(lambda: not [each for each in threading.enumerate() if each.name.startswith("transmuter")], 5)
    with anyio.CancelScope() as scope:
        async with world.client() as hub:
            await hub.download("org/m")
            scope.cancel()
            await anyio.sleep_forever()
    await wait_for(lambda: not [each for each in threading.enumerate() if each.name.startswith("transmuter")], 5)


async def test_progress_is_told_sparingly_and_counts_what_was_there(world: World) -> None:
    world.fake.repo().commit({"p": Lfs(BIG)})
    left = world.root / "blobs" / f"{BIG.sha256}.0123abcd.incomplete"
    left.parent.mkdir(parents=True)
    await in_worker(left.write_bytes, BIG.read(0, 9 << 20))
    os.utime(left, (1, 1))
    began = time.monotonic()
    await world.load()
    seconds = time.monotonic() - began
    told = [each.measurements for each in world.events if each.name.endswith("progress")]
    assert 1 <= len(told) <= 10 * seconds + 2
    assert all(9 << 20 <= each["bytes"] <= each["total"] == BIG.size for each in told)
    assert [each["bytes"] for each in told] == sorted(each["bytes"] for each in told)
