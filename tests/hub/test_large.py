"""A large download: little memory, an undisturbed loop. In a child process, so that only the client is measured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.hub.fake_hub import FakeHub, Lfs, Repeated

ROOT = Path(__file__).parents[2]
MIB = 1 << 20

CHILD = """
import json, sys, time, types
from pathlib import Path
package = types.ModuleType("transmuter_async")  # the hub only: the whole package would import jax
package.__path__ = [str(Path.cwd() / "transmuter_async")]
sys.modules["transmuter_async"] = package
import anyio
from transmuter_async.hub import Environment, HubClient

def memory(name):
    for line in open("/proc/self/status"):
        if line.startswith(name):
            return int(line.split()[1]) * 1024

async def main():
    environment = Environment(cache=Path(sys.argv[1]), endpoint=sys.argv[2])
    late, busy = [], []
    async with HubClient(environment=environment) as hub, anyio.create_task_group() as tasks:
        await hub.download("org/m", "small")
        async def heartbeat():
            while True:
                began, used = time.perf_counter(), time.thread_time()
                await anyio.sleep(0.005)
                late.append(time.perf_counter() - began - 0.005)
                busy.append(time.thread_time() - used)
        tasks.start_soon(heartbeat)
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts again here
        before = memory("VmRSS")
        began = time.perf_counter()
        await hub.download("org/m", "large*")
        seconds = time.perf_counter() - began
        tasks.cancel_scope.cancel()
    late.sort(), busy.sort()
    p99 = lambda values: values[int(len(values) * 0.99)]
    print(json.dumps({"growth": memory("VmHWM") - before, "late": p99(late), "busy": p99(busy), "beats": len(late), "seconds": seconds}))
anyio.run(main, backend=sys.argv[3])
"""


def measure(fake: FakeHub, cache: Path, backend: str) -> dict[str, float]:
    command = [sys.executable, "-c", CHILD, str(cache), fake.endpoint, backend]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True, timeout=110)
    return json.loads(done.stdout)


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
@pytest.mark.parametrize("files", [1, 8])
def test_memory_and_heartbeat(fake: FakeHub, tmp_path: Path, files: int, backend: str) -> None:
    size = 128 * MIB // files
    fake.repo().commit({"small": b"1", **{f"large{i}": Lfs(Repeated(size, b"%d" % i)) for i in range(files)}})
    measured = measure(fake, tmp_path, backend)
    print(measured)
    assert measured["growth"] < 64 * MIB
    assert measured["beats"] > 10
    # Time that the loop's thread was busy between two beats: what a neighbour on the processor takes is not counted.
    assert measured["busy"] < 0.020


@pytest.mark.slow
@pytest.mark.skipif(
    "TRANSMUTER_SLOW" not in os.environ, reason="takes a while, and an idle machine: set TRANSMUTER_SLOW=1"
)
@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_memory_and_heartbeat_of_a_gibibyte(fake: FakeHub, tmp_path: Path, backend: str) -> None:
    fake.repo().commit({"small": b"1", "large": Lfs(Repeated(1024 * MIB))})
    measured = measure(fake, tmp_path, backend)
    print(measured)
    assert measured["growth"] < 64 * MIB
    assert measured["late"] < 0.020
