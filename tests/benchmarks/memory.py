"""What calls of ever new shapes leave behind, and what calls of known shapes do. Linux with glibc only."""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Iterator

import anyio
import jax
import pytest

import transmuter_async as tm
from tests.benchmarks.frame import Figure, benchmark
from tests.benchmarks.models import MINILM
from tests.compiler.test_facts import broken, rows

SHAPES, CALLS = 500, 2000


def resident() -> float:
    """Resident memory in MB, after what is free was given back."""
    if sys.platform != "linux":
        pytest.skip("resident memory is read from /proc")
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/status") as status:
        kilobytes = next(int(line.split()[1]) for line in status if line.startswith("VmRSS:"))
    return kilobytes * 1024 / 1e6


def live() -> int:
    """Programs that are alive in this process."""
    gc.collect()
    return len(jax.local_devices()[0].client.live_executables())


@benchmark
def storm() -> Iterator[Figure]:
    """2000 calls of 500 shapes through a cache of 16: a graph with a break, two programs for each shape."""

    async def calls() -> list[Figure]:
        async with tm.Runtime() as runtime:
            before = live()
            compiled = await runtime.compile(await runtime.load(broken(1)), cache_size=16)
            for size in range(10, 60):  # the allocator's own growth is not of the calls that follow
                await compiled.run(rows(size))
            start, at_start = resident(), await compiled.statistics()
            for size in range(100, 100 + SHAPES):
                for _ in range(CALLS // SHAPES):
                    await compiled.run(rows(size))
            grown, held = resident() - start, await compiled.statistics()
            compiles = held.compiles - at_start.compiles
            spare = live() - before - held.cache.programs
            known = resident()
            for _ in range(CALLS):
                await compiled.run(rows(99 + SHAPES))
            return [
                Figure("programs compiled", compiles, ""),
                Figure("memory for each program compiled", grown / compiles, "MB", bound=0.1),
                Figure(f"memory for {CALLS} calls of a known shape", resident() - known, "MB", bound=1.0),
                Figure("programs alive beside those in the cache", spare, "", bound=0),
            ]

    yield from anyio.run(calls)


@benchmark
def minilm() -> Iterator[Figure]:
    """The same for MiniLM, 60 shapes through a cache of 4: the memory of the last 30."""

    async def calls() -> list[Figure]:
        async with tm.Runtime() as runtime:
            compiled = await runtime.compile(MINILM.source(), cache_size=4)
            for length in range(4, 34):
                await compiled.run(MINILM.make(length))
            start = resident()
            for length in range(34, 64):
                await compiled.run(MINILM.make(length))
            return [Figure("memory for each program compiled", (resident() - start) / 30, "MB")]

    yield from anyio.run(calls)
