"""Several devices: `four_devices.py` in a process that has four. Here, what holds where there is one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import pytest

import transmuter_async as tm
from tests.test_runtime import affine, rows
from transmuter_async.actors import Compiled
from transmuter_async.compiler import Prepared
from transmuter_async.testing import Recorder

ROOT = Path(__file__).resolve().parents[1]
FOUR = ROOT / "tests" / "four_devices.py"


@pytest.mark.timeout(400)
@pytest.mark.parametrize("backend", [pytest.param("asyncio"), pytest.param("trio", marks=pytest.mark.slow)])
def test_on_four_devices(backend: str) -> None:
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", str(FOUR), "-k", f"{backend} or there_are"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        check=False,
    )
    passed = re.search(r"(\d+) passed", done.stdout)
    assert done.returncode == 0 and passed is not None, done.stdout[-8000:] + done.stderr[-2000:]
    assert int(passed[1]) >= FOUR.read_text("utf-8").count("\nasync def test_")


@pytest.mark.skipif(len(jax.local_devices()) > 1, reason="this machine has several devices")
async def test_with_one_device_nothing_is_different() -> None:
    async with tm.Runtime() as runtime, Recorder(runtime.telemetry, "transmuter") as recorder:
        compiled = await runtime.compile(affine())
        await compiled.run({"x": rows(2)})
        assert type(compiled) is Compiled
        assert type(compiled._prepared) is Prepared, "no look at where a call's arrays are"
        assert not [e for e in recorder.events if "device" in e.metadata or "devices" in e.metadata]
        with pytest.raises(tm.MisuseError, match="replicas=2 need a device each, and there are 1"):
            await runtime.compile(affine(), replicas=2)
        split = await runtime.compile(affine(), sharding="batch", batching=tm.Batching(batch="n"))
        assert (await split.run({"x": rows(3)}))["y"].shape == (3, 3)
