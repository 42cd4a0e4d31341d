"""Everything at once: any sequence of faults, damage on the disk, moved branches, and two clients whose locks do nothing.

Two promises hold throughout: a path that is handed out has the right content, and once the faults have passed the next load repairs
everything without help, leaving nothing behind.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.hub.fake_hub import FakeHub, Fault, Lfs
from tests.hub.support import World
from transmuter_async.hub import HubError
from transmuter_async.hub.locks import Locks

VERSIONS = [
    {"small": b"ordinary" * 200, "large": Lfs(bytes(range(256)) * 1200), "sub/empty": b""},
    {"small": b"ORDINARY" * 200, "large": Lfs(bytes(range(256)) * 1200), "sub/empty": b""},
    {"small": b"ordinary" * 200, "large": Lfs(bytes(range(255, -1, -1)) * 1200), "sub/empty": b"not any more"},
]
SIZE = 256 * 1200

faults = st.one_of(
    st.builds(Fault, cut=st.integers(0, SIZE)),
    st.builds(Fault, flip=st.integers(0, SIZE - 1)),
    st.builds(Fault, short=st.integers(1, 1000), chunked=st.booleans()),
    st.builds(Fault, long=st.integers(1, 1000)),
    st.builds(Fault, status=st.sampled_from([400, 403, 404, 408, 416, 429, 500, 503])),
    st.sampled_from(
        [
            Fault(gzip=True),
            Fault(chunked=True),
            Fault(ignore_range=True),
            Fault(wrong_range=True),
            Fault(refuse=True),
            Fault(etag="f" * 64),
            Fault(etag=""),
            Fault(commit=""),
            Fault(commit="e" * 40),
            Fault(body=b"<html>"),
            Fault(expired=True),
            Fault(status=429, headers={"Retry-After": "3"}),
            Fault(status=302, headers={"Location": "https://127.0.0.1:9/"}),
            Fault(),
        ]
    ),
)
places = st.sampled_from(
    [
        ("info", "main"),
        ("tree", "main"),
        *((kind, file) for kind in ("resolve", "cache", "cdn") for file in ("small", "large")),
    ]
)
damages = st.sampled_from(
    ["truncate", "flip", "unlink", "dangle", "by hand", "wrong by hand", "old partial", "forget", "forget info", None]
)
steps = st.fixed_dictionaries(
    {
        "version": st.integers(0, len(VERSIONS) - 1),
        "faults": st.lists(st.tuples(places, faults), max_size=6),
        "damage": damages,
        "clients": st.integers(1, 2),
        "locks": st.booleans(),
        "links": st.booleans(),
        "backend": st.sampled_from(["asyncio", "trio"]),
    }
)


@pytest.fixture(scope="module")
def server():
    with FakeHub() as fake:
        yield fake


@settings(
    max_examples=400,
    derandomize=False,
    print_blob=True,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    database=None,
)
@given(history=st.lists(steps, min_size=1, max_size=3))
def test_a_storm(server: FakeHub, history: list[dict]) -> None:
    folder = Path(tempfile.mkdtemp(prefix="transmuter-storm-"))
    try:
        server.repos.clear()
        world = World(server, folder / "cache")
        for step in history:
            expected = VERSIONS[step["version"]]
            server.repo().commit(expected)
            server.heal()
            for (kind, what), fault in step["faults"]:
                if kind in ("info", "tree") and fault.flip is not None:
                    continue  # what the metadata say is what is right: nothing could tell a flipped bit in them
                server.fault(kind, what, fault)
            if step["damage"] is not None:
                damage(world, step["damage"])
            anyio.run(storm, world, step, backend=step["backend"])
        server.heal()
        expected = VERSIONS[history[-1]["version"]]
        for _ in range(2):
            found = anyio.run(world.load)
            check(found, expected)
        assert {each[-1] for each in world.told() if each[0] == "hit"} <= {"etag", "hash"}
        assert world.leftovers() == []
    finally:
        shutil.rmtree(folder)


async def storm(world: World, step: dict) -> None:
    patch = pytest.MonkeyPatch()

    @asynccontextmanager
    async def no_lock(self, path):
        yield

    if not step["locks"]:
        patch.setattr(Locks, "hold", no_lock)

    async def load() -> None:
        try:
            found = await world.load(client={"symlinks": step["links"], "download_timeout": 1})
        except HubError:
            return
        # It may be the saved listing of an older commit: content is judged by the commit in the path.
        commit = next(iter(found.values())).relative_to(world.root).parts[1]
        files = world.fake.repo().commits[commit]
        for name, path in found.items():
            assert path.read_bytes() == files[name].content.read(0, files[name].content.size), name

    try:
        async with anyio.create_task_group() as tasks:
            for _ in range(step["clients"]):
                tasks.start_soon(load)
    finally:
        patch.undo()


def check(found: dict[str, Path], expected: dict) -> None:
    for name, value in expected.items():
        assert found[name].read_bytes() == (value.data if isinstance(value, Lfs) else value), name


def damage(world: World, how: str) -> None:
    """Something that befalls a cache, to its largest content."""
    if not world.root.exists():
        return
    contents = sorted(
        (path for path in world.root.rglob("*") if path.is_file() and ".transmuter" not in path.parts),
        key=lambda each: each.stat().st_size,
    )
    contents = [path for path in contents if path.stat().st_size > 1000]
    match how:
        case "forget":
            world.forget()
        case "forget info":
            shutil.rmtree(world.root / ".transmuter" / "v1" / "info", ignore_errors=True)
        case "old partial":
            (world.root / "blobs").mkdir(exist_ok=True)
            file = Lfs(bytes(range(256)) * 1200)
            left = (
                world.root
                / "blobs"
                / f"{world.fake.repo().commits[world.fake.repo().branches['main']]['large'].etag}.00000000.incomplete"
            )
            left.write_bytes(file.data[:5000])
            os.utime(left, (1, 1))
            for path in contents:  # only a download sweeps; so there must be one
                path.unlink(missing_ok=True)
        case _ if not contents:
            return
        case "truncate":
            os.truncate(contents[-1], 10)
        case "flip":
            body = bytearray(contents[-1].read_bytes())
            body[100] ^= 1
            contents[-1].write_bytes(body)
            os.utime(contents[-1], (2, 2))
        case "unlink":
            contents[-1].unlink()
        case "dangle":
            for blob in (world.root / "blobs").glob("*"):
                blob.unlink()
        case "by hand" | "wrong by hand":
            for pointer in (world.root / "snapshots").rglob("large"):
                body = pointer.read_bytes() if pointer.exists() else b"?"
                pointer.unlink()
                pointer.write_bytes(body if how == "by hand" else b"!" + body[1:])
