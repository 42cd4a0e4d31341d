"""Where work is done: reading, hashing, preparing, tracing, compiling, running and copying, and never on the loop."""

from __future__ import annotations

import hashlib
import os
import pickle
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import transmuter_async as tm
from tests.test_runtime import affine, breaking, rows
from transmuter_async.compiler import CompileJob, Execution, Prepared
from transmuter_async.compiler import disk as disk_module


class Spy:
    """Counts in which threads functions run."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._patch = patch
        self._loop = threading.get_ident()
        self.elsewhere: Counter[str] = Counter()
        self.on_loop: Counter[str] = Counter()

    def watch(self, owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def noted(*arguments: Any, **options: Any) -> Any:
            (self.on_loop if threading.get_ident() == self._loop else self.elsewhere)[name] += 1
            return real(*arguments, **options)

        self._patch.setattr(owner, name, noted)


async def test_nothing_that_takes_time_runs_on_the_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "affine.onnx"
    path.write_bytes(affine())
    spy = Spy(monkeypatch)
    for owner, names in (
        (os, ("preadv", "open", "stat", "replace", "listdir", "scandir")),
        (hashlib, ("sha256",)),
        (pickle, ("loads", "dumps")),
        (jax, ("jit", "eval_shape", "device_put")),
        (np, ("copyto",)),
        (Prepared, ("start", "spec_job", "find_break", "release", "weight_bytes")),
        (CompileJob, ("run", "statics", "breaks")),
        (Execution, ("advance",)),
        (disk_module.DiskCache, ("read", "write")),
    ):
        for name in names:
            if hasattr(owner, name):
                spy.watch(owner, name)
    async with tm.Runtime() as runtime:
        for source in (path, breaking()):
            model = await runtime.load(source)
            compiled = await runtime.compile(model, cache_dir=tmp_path / "programs", cache_size=1)
            for count in (1, 2, 1):
                x = rows(count) if source is path else rows(count).ravel()
                await compiled.run({"x": x})
                await compiled.run({"x": x}, device=True)
            spec = tm.Spec((3, 4), "float32") if source is path else tm.Spec((12,), "float32")
            await compiled.warm({"x": spec})
            await compiled.explain()
            await compiled.why({"x": x})
            await compiled.statistics()
            await compiled.clear_cache()
            await compiled.aclose()
        await runtime.memory_statistics()
    assert spy.on_loop == {}
    assert spy.elsewhere.keys() >= {
        "preadv",
        "sha256",
        "jit",
        "eval_shape",
        "device_put",
        "start",
        "advance",
        "run",
        "release",
    }
