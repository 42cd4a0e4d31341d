"""The embedded model: small enough to carry, right by onnxruntime's judgement and by ours."""

from __future__ import annotations

from importlib import resources

import anyio
import numpy as np

import transmuter_async as tm
from tests import zoo
from transmuter_async.demo import digits_model, digits_test

DIGITS = digits_model()
IMAGES, LABELS = digits_test()


def test_the_files_are_small() -> None:
    folder = resources.files("transmuter_async.demo")
    assert len((folder / "digits.onnx").read_bytes()) <= 200_000
    assert len((folder / "digits_test.npz").read_bytes()) <= 100_000


async def test_answers_are_those_of_onnxruntime_and_right() -> None:
    batch = IMAGES[:, None].astype(np.float32) / 16
    expected = await anyio.to_thread.run_sync(zoo.oracle, DIGITS, {"image": batch})
    assert (expected["probabilities"].argmax(-1) == LABELS).mean() >= 0.98
    async with tm.Runtime() as runtime:
        compiled = await runtime.compile(DIGITS, {"image": tm.Spec(batch.shape, "float32")})
        for size in (len(batch), 1, 37, len(batch)):
            outputs = await compiled.run({"image": batch[:size]})
            np.testing.assert_allclose(outputs["probabilities"], expected["probabilities"][:size], rtol=0, atol=1e-5)
