"""silero-vad with its state donated: many steps whose state never leaves the device give what onnxruntime gives."""

from __future__ import annotations

import anyio
import jax
import numpy as np
import pytest

import transmuter_async as tm
from tests import zoo

STEPS = 30
pytestmark = pytest.mark.network


@pytest.mark.parametrize(
    ("file", "takes_rate"),
    [
        ("silero_vad.onnx", True),
        ("silero_vad_op18_ifless.onnx", True),
        ("silero_vad_half.onnx", False),
    ],
)
async def test_a_donated_state_over_many_steps(file: str, takes_rate: bool) -> None:
    path = await anyio.to_thread.run_sync(zoo.path, "silero-vad", file)
    session = await anyio.to_thread.run_sync(zoo.onnxruntime_session, path)
    extra = {"sr": np.array(16000, np.int64)} if takes_rate else {}
    random = np.random.default_rng(1)
    ours: np.ndarray | jax.Array = np.zeros((2, 1, 128), np.float32)
    theirs = np.zeros((2, 1, 128), np.float32)
    async with tm.Runtime() as runtime:
        compiled = await runtime.compile(path, donate=["state"])
        for step in range(STEPS):
            chunk = (0.1 * np.sin(np.arange(576) / (3 + step % 7)) + 0.02 * random.standard_normal(576))[None].astype(
                "f4"
            )
            outputs = await compiled.run({"input": chunk, "state": ours, **extra}, device=True)
            if isinstance(ours, jax.Array):
                assert ours.is_deleted()
            probability, theirs = session.run(None, {"input": chunk, "state": theirs, **extra})
            ours = outputs["stateN"]
            np.testing.assert_allclose(
                np.array(outputs["output"]), probability, rtol=0, atol=1e-4, err_msg=f"step {step}"
            )
            np.testing.assert_allclose(np.array(ours), theirs, rtol=0, atol=1e-4, err_msg=f"step {step}")
