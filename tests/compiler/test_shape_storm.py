"""Many shapes through a small cache: what is evicted is freed, and calls of known shapes keep nothing.

A program takes 0.7 to 2 MiB. JAX keeps the last 2048 traces of each of its own functions (`where`, `take`, `clip`, …), about
15 kB each, which is why programs are traced without calls of them.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

STORM = """
import ctypes, gc, json, sys, weakref
import jax, numpy as np
from tests.compiler.test_facts import broken, rows
from tests.compiler.support import Session

def resident():
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmRSS:")) / 1024

def live():
    gc.collect()
    return len(jax.local_devices()[0].client.live_executables())

before = live()
session = Session(broken(1, between=3), cache_size=4, min_segment_nodes=1)
dropped, worst, compiled = [], 0, 0

def call(size, zeros=1):
    global worst, compiled
    session(rows(size, zeros))
    compiled += session.compiled()
    held = session.cache.segments()
    assert len(held) <= 4 * 2
    worst = max(worst, len(jax.local_devices()[0].client.live_executables()) - before - sum(s.program is not None for s in held))

for size in range(10, 26):
    call(size)
watched = [weakref.ref(segment.program) for segment in session.cache.segments()]
assert all(each() is not None for each in watched)
base, compiled = resident(), 0
for size in range(40, 90):
    call(size)
gc.collect()
grown, count = resident() - base, compiled
alive = sum(each() is not None for each in watched)
base = resident()
for _ in range(300):
    call(89)
    call(88)
print(json.dumps({
    "worst": worst, "alive": alive, "compiled": count, "grown": grown, "warm": resident() - base,
    "live": live() - before, "programs": session.cache.statistics().programs,
}))
"""


def storm() -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", STORM],
        cwd=Path(__file__).resolve().parents[2],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.slow
def test_evicted_programs_are_freed_and_memory_stays_bounded() -> None:
    """In a process of its own: the memory of this one belongs to every test before. MiB after `malloc_trim`."""
    found = storm()
    assert found["alive"] == 0, "evicted segments are still held"
    assert found["worst"] <= 0, "a program lives on without a place in the cache"
    assert found["live"] == found["programs"]
    assert found["compiled"] == 100
    assert found["grown"] <= 0.1 * found["compiled"], "per compiled program"
    assert found["warm"] <= 2, "for 600 calls of cached shapes"
