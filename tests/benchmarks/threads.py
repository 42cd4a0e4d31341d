"""What decides how many threads compute on the CPU: the same calls in processes that were started in different ways.

Told as the processor time of all threads over that of the busiest one, which a busy machine changes little: 1 where one thread
does everything, 2 where two share it evenly. Linux only.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.benchmarks.frame import Figure, benchmark, only_in_full

PROGRAM = """
import json, os, sys
from pathlib import Path

options, after = json.loads(sys.argv[1])
import jax, jax.numpy as jnp, numpy as np

def elementwise(x):
    return jnp.tanh(x) * 1.5 + jnp.exp(-x * x)

def products(x):
    for _ in range(4):
        x = jnp.tanh(jnp.dot(x, x.T @ x * 1e-6, precision="highest"))
    return x

def used():
    # Nanoseconds of processor time, by thread.
    return {task.name: int((task / "schedstat").read_text().split()[0]) for task in Path("/proc/self/task").iterdir()}

found = {}
for function, shape in ((elementwise, (4000, 1000)), (products, (512, 1024))):
    x = jax.device_put(np.ones(shape, np.float32))
    program = jax.jit(function).lower(x).compile(compiler_options=options)
    jax.block_until_ready(program(x))
    if after:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    before = used()
    for _ in range(60):
        jax.block_until_ready(program(x))
    spent = [now - before.get(task, 0) for task, now in used().items()]
    found[function.__name__] = sum(spent) / max(spent)
print(json.dumps(found))
"""
CALLS = """
import sys, time
import anyio, numpy as np
import transmuter_async as tm
from tests.benchmarks.zoo import MODELS
from tests import zoo

public = MODELS["minilm_int8"]

async def main():
    inputs = public.calls["1 × 128"](np.random.default_rng(0))
    async with tm.Runtime(threads=int(sys.argv[1])) as runtime:
        compiled = await runtime.compile(str(zoo.path(public.package, public.file)))
        for _ in range(3):
            await compiled.run(inputs)
        used = time.process_time()
        for _ in range(50):
            await compiled.run(inputs)
        print((time.process_time() - used) / 50)

anyio.run(main)
"""
FLAG = "xla_cpu_multi_thread_eigen"


@benchmark
def knobs() -> Iterator[Figure]:
    """Threads at work, by how the process was started."""
    only_in_full()
    if not Path("/proc/self/schedstat").exists():
        return
    ways: list[tuple[str, dict[str, str], dict[str, Any], bool]] = [
        ("as it comes", {}, {}, False),
        ("NPROC=1", {"NPROC": "1"}, {}, False),
        ("OMP_NUM_THREADS=1", {"OMP_NUM_THREADS": "1"}, {}, False),
        (f"XLA_FLAGS=--{FLAG}=false", {"XLA_FLAGS": f"--{FLAG}=false"}, {}, False),
        (f"{FLAG}=False, an option of the program", {}, {FLAG: False}, False),
        ("sched_setaffinity of one core, after jax has started", {}, {}, True),
    ]
    for name, environment, options, after in ways:
        found = json.loads(_child(PROGRAM, json.dumps([options, after]), environment))
        for what, threads in found.items():
            yield Figure(f"{name}: {what}", threads, "threads")


@benchmark
def minilm() -> Iterator[Figure]:
    """Processor time of a call of MiniLM, 1 × 128, by `Runtime(threads=)`."""
    only_in_full()
    for threads in (1, 2, 8):
        yield Figure(f"threads={threads}", float(_child(CALLS, str(threads), {})) * 1e3, "ms")


def _child(code: str, argument: str, environment: dict[str, str]) -> str:
    command = [sys.executable, "-c", code, argument]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **environment})
    if done.returncode:
        raise RuntimeError(done.stderr)
    return done.stdout.splitlines()[-1]
