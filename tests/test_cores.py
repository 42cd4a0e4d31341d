"""Threads that compute on the CPU: what sets their number is seen at work, each time in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import anyio
import jax
import pytest

import transmuter_async as tm
from tests.test_runtime import affine
from transmuter_async.compiler import cores

ROOT = Path(__file__).resolve().parents[1]
linux = pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads are counted in /proc")

CHILD = """
import json, os, sys, time
from pathlib import Path

import anyio
import numpy as np
from onnx import TensorProto, helper

import transmuter_async as tm
from transmuter_async.testing import Recorder

threads, cache_dir, backend = json.loads(sys.argv[1])
nodes = [helper.make_node("Tanh", ["x"], ["t"]), helper.make_node("Exp", ["t"], ["e"]), helper.make_node("Add", ["e", "x"], ["y"])]
info = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 1000]) for name in "xy"]
graph = helper.make_graph(nodes, "wide", info[:1], info[1:])
MODEL = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9).SerializeToString()
found = {}

def pool():
    names = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    return names.count("tf_XLAEigen")

async def main():
    found["before"] = pool()
    x = np.random.default_rng(0).standard_normal((2000, 1000)).astype(np.float32)
    telemetry = tm.Telemetry()
    async with tm.Runtime(threads=threads, telemetry=telemetry) as runtime:
        async with Recorder(telemetry) as recorder:
            compiled = await runtime.compile(MODEL, {"x": tm.Spec(x.shape, "float32")}, cache_dir=cache_dir)
        found["disk"] = recorder.named("transmuter.segment.compile.stop")[0].metadata["disk_cache"]
        found["after"] = pool()
        found["compiling"] = compiled._actor._compile_threads.limit
        y = (await compiled.run({"x": x}))["y"]
        found["right"] = bool(np.allclose(y, np.exp(np.tanh(x.astype(np.float64))) + x, rtol=1e-5, atol=1e-6))
        wall, processor = time.perf_counter(), time.process_time()
        for _ in range(20):
            await compiled.run({"x": x})
        found["processor"] = (time.process_time() - processor) / (time.perf_counter() - wall)
    found["environment"] = os.environ.get("NPROC")
    async with tm.Runtime(threads=5) as runtime:
        try:
            await runtime.compile(MODEL)
        except tm.MisuseError as error:
            found["refused"] = str(error)

anyio.run(main, backend=backend)
print(json.dumps(found))
"""


def child(
    threads: int | None, *, cache_dir: Path | None = None, nproc: int | None = None, backend: str = "asyncio"
) -> dict[str, object]:
    environment = {key: value for key, value in os.environ.items() if key != "NPROC"}
    if nproc is not None:
        environment["NPROC"] = str(nproc)
    told = json.dumps([threads, None if cache_dir is None else str(cache_dir), backend])
    done = subprocess.run(  # noqa: PLW1510 - the output tells more than the code
        [sys.executable, "-c", CHILD, told], capture_output=True, text=True, cwd=ROOT, env=environment
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return found


@linux
@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_the_threads_of_a_runtime_are_those_that_compute(backend: str) -> None:
    found = child(1, backend=backend)
    assert (found["before"], found["after"], found["compiling"]) == (0, 1, 1)
    assert found["right"]
    assert found["processor"] < 1.3  # type: ignore[operator] - of all threads, the loop's among them
    assert found["environment"] is None  # as it was
    assert "this process has one pool" in str(found["refused"])
    assert "made with 1" in str(found["refused"])
    assert "NPROC=5" in str(found["refused"])


@linux
def test_more_threads_than_cores_may_be_asked_for() -> None:
    assert child(3)["after"] == 3


@linux
def test_nproc_sets_them_for_the_whole_process() -> None:
    found = child(None, nproc=1)
    assert (found["after"], found["compiling"], found["environment"]) == (1, 1, "1")
    assert found["processor"] < 1.3  # type: ignore[operator]


@pytest.mark.slow
@linux
def test_programs_on_disk_are_for_one_number_of_threads(tmp_path: Path) -> None:
    # XLA cuts an operation into as many parts as there are threads when it compiles.
    assert [child(count, cache_dir=tmp_path)["disk"] for count in (1, 2, 1)] == ["miss", "miss", "hit"]


WHO_RUNS = """
import json, os, sys, threading
from pathlib import Path

import jax
import numpy as np
from onnx import TensorProto, helper

import transmuter_async as tm

if sys.argv[1] == "used before":
    jax.local_devices()
nodes = [helper.make_node("MatMul", ["x", "x"], ["y"])]
info = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [600, 600]) for name in "xy"]
model = helper.make_model(helper.make_graph(nodes, "square", info[:1], info[1:]), opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
x = np.eye(600, dtype=np.float32)
found = {"right": bool((tm.run_sync(model, {"x": x})["y"] == x).all())}

def worked():
    \"\"\"Nanoseconds on a processor: of this thread, and of all others.\"\"\"
    here, others = 0, 0
    for task in Path("/proc/self/task").iterdir():
        try:
            took = int((task / "schedstat").read_text().split()[0])
        except OSError:  # it has ended meanwhile
            continue
        if int(task.name) == threading.get_native_id():
            here += took
        else:
            others += took
    return here, others

# Products that are too small to be cut into parts, and too large for XLA to take them for nothing.
wave = jax.jit(lambda x: jax.lax.fori_loop(0, 400, lambda i, x: x @ x, x)).lower(x[:100, :100]).compile()
given = jax.block_until_ready(jax.device_put(x[:100, :100]))
wave(given).block_until_ready()
here, others = worked()
for _ in range(20):
    wave(given).block_until_ready()
found["here"], found["others"] = (after - before for after, before in zip(worked(), (here, others)))
found["configuration"] = jax.config.values["jax_cpu_enable_async_dispatch"]
print(json.dumps(found))
"""


@pytest.mark.skipif(not Path("/proc/self/schedstat").is_file(), reason="the time of threads is read in /proc")
@pytest.mark.parametrize(
    ("before", "environment", "by_callers"),
    [
        ("nothing", {}, True),
        ("used before", {}, False),
        ("nothing", {"JAX_CPU_ENABLE_ASYNC_DISPATCH": "true"}, False),
        ("nothing", {"JAX_CPU_ENABLE_ASYNC_DISPATCH": "false"}, True),
    ],
    ids=["started here", "started by others", "as the environment says", "as the environment says too"],
)
def test_a_client_that_is_made_here_runs_programs_in_the_thread_that_calls(
    before: str, environment: dict[str, str], by_callers: bool
) -> None:
    done = subprocess.run(  # noqa: PLW1510 - the output tells more than the code
        [sys.executable, "-c", WHO_RUNS, before], capture_output=True, text=True, cwd=ROOT, env={**os.environ, **environment}
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["right"]
    assert found["configuration"] is True
    assert (found["here"] > 4 * found["others"]) is by_callers, found
    assert (found["others"] > 4 * found["here"]) is not by_callers, found


@linux
async def test_a_client_that_runs_is_not_changed() -> None:
    await anyio.to_thread.run_sync(jax.local_devices)
    async with tm.Runtime(threads=61) as runtime:
        with pytest.raises(tm.MisuseError, match="threads=61: this process has one pool of threads"):
            await runtime.compile(affine())


def test_a_number_of_threads_that_makes_no_sense() -> None:
    with pytest.raises(ValueError, match="threads=0 must be at least 1"):
        tm.Runtime(threads=0)
    wrong: Any  # on purpose
    for wrong in ("2", 1.5, True):
        with pytest.raises(TypeError, match=f"threads={wrong!r} is no whole number"):
            tm.Runtime(threads=wrong)


def test_cores_are_those_that_may_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NPROC", "3")
    assert cores() == 3  # and so with the others: as XLA takes them
    for text in ("0", "-2"):
        monkeypatch.setenv("NPROC", text)
        assert cores() == 1
    for text in ("", "many"):
        monkeypatch.setenv("NPROC", text)
        assert cores() == (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())
