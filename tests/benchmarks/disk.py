"""The first answer of a process: with an empty cache folder, and with one that another process has filled."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import anyio
import jax

import transmuter_async as tm
from tests.benchmarks.frame import Figure, benchmark
from tests.benchmarks.models import MINILM, SILERO
from transmuter_async.testing import Recorder

SUBJECTS = {"silero": SILERO, "minilm": MINILM}


def child(name: str, folder: str) -> None:
    """In a process of its own: load, compile and call once; prints how long that took and what was compiled."""
    compiled_by_jax: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(lambda event, seconds, **more: compiled_by_jax.append(event))
    subject = SUBJECTS[name]
    source, inputs = subject.source(), subject.make(subject.sizes[1])  # the file is checked outside of what is measured
    jax.devices()  # the backend starts once for whatever a process does with jax
    told: list[Any] = []

    async def answer() -> float:
        began = time.perf_counter()
        async with tm.Runtime() as runtime, Recorder(runtime.telemetry, "transmuter.segment.compile.stop") as recorder:
            compiled = await runtime.compile(source, cache_dir=folder)
            await compiled.run(inputs)
            took = time.perf_counter() - began
            told.extend(event.metadata["disk_cache"] for event in recorder.events)
        return took

    took = anyio.run(answer)
    compiles = sum("backend_compile" in event for event in compiled_by_jax)
    print(json.dumps({"seconds": took, "compiles": compiles, "disk": told}))


def _process(name: str, folder: str) -> dict[str, Any]:
    script = f"from tests.benchmarks.disk import child; child({name!r}, {folder!r})"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _figures(name: str) -> Iterator[Figure]:
    SUBJECTS[name].source()  # skips here where it can't be had
    with tempfile.TemporaryDirectory() as folder:
        cold = _process(name, folder)
        warm = [_process(name, folder) for _ in range(3)]
    assert set(cold["disk"]) == {"miss"} and all(set(each["disk"]) == {"hit"} for each in warm)
    took = min(each["seconds"] for each in warm)
    yield Figure("load, compile and first answer, cold", cold["seconds"] * 1e3, "ms")
    yield Figure("the same with the programs on disk", took * 1e3, "ms", note="best of three processes")
    yield Figure("with the programs on disk, against cold", took / cold["seconds"], "×", bound=0.25)
    yield Figure("XLA compiles with the programs on disk", max(each["compiles"] for each in warm), "", bound=0)


@benchmark
def silero() -> Iterator[Figure]:
    """A fresh process with silero's programs on disk, against one that compiles them."""
    yield from _figures("silero")


@benchmark
def minilm() -> Iterator[Figure]:
    """A fresh process with MiniLM's programs on disk, against one that compiles them."""
    yield from _figures("minilm")
