"""From a file to the first answer, each in a process of its own: ours without and with programs on disk, and onnxruntime.

Imports are not counted, but stated by themselves. Memory is what the process grew by, of what it is when a tiny model has been answered.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from tests import zoo
from tests.benchmarks.build import Draft
from tests.benchmarks.frame import Figure, benchmark, each, only_in_full
from tests.benchmarks.light import filled
from tests.benchmarks.zoo import MODELS

ZOO = ("silero_vad", "magika", "minilm_int8", "ocr_detector", "ocr_recogniser", "ocr_classifier", "piper")
LIGHT = ("resnet50", "densenet121")
QUICK = ("silero_vad", "minilm_int8")


@each({name: name for name in (*ZOO, *LIGHT)})
def model(name: str) -> Iterator[Figure]:
    """Load, first answer, warm start and memory: {}."""
    if name not in QUICK:
        only_in_full()
    with tempfile.TemporaryDirectory() as box:
        folder = Path(box)
        path, inputs = _subject(name, folder)
        np.savez(folder / "inputs.npz", **inputs)
        ours = _child("ours", path, folder)
        cold = _child("cached", path, folder)
        warm = _child("cached", path, folder)
        theirs = _child("onnxruntime", path, folder)
    size = path.stat().st_size if path.exists() else ours["size"]
    yield Figure("load", ours["load"], "s", note=f"onnxruntime's session {theirs['load']:.2f} s")
    yield Figure("load and first answer", ours["load"] + ours["first"], "s")
    yield Figure("the same, when programs are kept on disk for the first time", cold["load"] + cold["first"], "s")
    yield Figure("the same, from the disk cache", warm["load"] + warm["first"], "s", note="another process wrote them")
    yield Figure("onnxruntime: load and first answer", theirs["load"] + theirs["first"], "s")
    yield Figure(
        "peak memory while it is loaded", ours["load_peak"] / 1e6, "MB", note=f"{size / 1e6:.0f} MB in the file"
    )
    yield Figure(
        "peak memory with the first answer", ours["peak"] / 1e6, "MB", note=f"onnxruntime {theirs['peak'] / 1e6:.0f} MB"
    )
    yield Figure(
        "memory after ten calls", ours["steady"] / 1e6, "MB", note=f"onnxruntime {theirs['steady'] / 1e6:.0f} MB"
    )


@benchmark
def imports() -> Iterator[Figure]:
    """What importing the library takes, in a new interpreter."""
    for what in ("import numpy", "import jax", "import onnxruntime", "import transmuter_async"):
        times = []
        for _ in range(3):
            began = time.perf_counter()
            subprocess.run([sys.executable, "-c", what], check=True)
            times.append(time.perf_counter() - began)
        yield Figure(what, min(times), "s")


def _subject(name: str, folder: Path) -> tuple[Path, dict[str, np.ndarray]]:
    if name in MODELS:
        public = MODELS[name]
        make = next(iter(public.calls.values()))
        return zoo.path(public.package, public.file), make(np.random.default_rng(0))
    path = folder / f"{name}.onnx"
    network = filled(name)
    onnx.save(network, path)
    [value] = network.graph.input
    shape = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
    return path, {value.name: np.random.default_rng(1).standard_normal(shape, np.float32)}


def _child(how: str, path: Path, folder: Path) -> dict[str, float]:
    command = [sys.executable, "-m", "tests.benchmarks.starts", how, str(path), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def _main(how: str, path: Path, folder: Path) -> None:
    """In the child: load, answer ten times, tell seconds and bytes."""
    with np.load(folder / "inputs.npz") as kept:
        inputs = dict(kept)
    draft = Draft()
    tiny = draft.case("tiny", draft("Tanh", draft.input((4,))))
    open_: Any = _onnxruntime if how == "onnxruntime" else _ours
    cache = str(folder / "programs") if how == "cached" else None
    open_(tiny.source, None)(tiny.inputs)  # libraries are loaded, XLA is up
    before = _memory("VmRSS")
    _reset()
    began = time.perf_counter()
    call = open_(path, cache)
    loaded = time.perf_counter()
    load_peak = _memory("VmHWM")
    call(inputs)
    first = time.perf_counter()
    peak = _memory("VmHWM")
    for _ in range(10):
        call(inputs)
    found = {"load": loaded - began, "first": first - loaded, "size": path.stat().st_size}
    found |= {"load_peak": load_peak - before, "peak": peak - before, "steady": _memory("VmRSS") - before}
    print(json.dumps(found))


def _ours(source: Path | bytes, cache: str | None) -> Any:
    from tests.benchmarks.versus import Ours

    ours = Ours(source, cache_dir=cache)

    def call(inputs: dict[str, np.ndarray]) -> Any:
        with ours.pinned():
            return ours(inputs)

    return call


def _onnxruntime(source: Path | bytes, cache: str | None) -> Any:
    from tests.benchmarks.versus import session

    made = session(source, 2)
    return lambda inputs: made.run(None, inputs)


def _memory(what: str) -> int:
    """Bytes of the process, "VmRSS" now or "VmHWM" at most; 0 where the system does not tell."""
    try:
        lines = Path("/proc/self/status").read_text("ascii").splitlines()
    except OSError:
        return 0
    return next(int(line.split()[1]) for line in lines if line.startswith(what)) * 1024


def _reset() -> None:
    """The peak starts again here."""
    try:
        Path("/proc/self/clear_refs").write_text("5", "ascii")
    except OSError:
        pass


if __name__ == "__main__":
    _main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
