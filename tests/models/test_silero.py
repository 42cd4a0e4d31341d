"""silero-vad, the voice detector: its state over many steps, both sample rates, and five exports of one network."""

from __future__ import annotations

import anyio
import numpy as np
import pytest

import transmuter_async as tm
from tests import zoo

STEPS = 50
pytestmark = pytest.mark.network


def chunks(rate: int, count: int) -> np.ndarray:
    """Something between tone and noise whose loudness changes: (count, 1, samples of a chunk and its context)."""
    samples = 576 if rate == 16000 else 288
    random = np.random.default_rng(rate)
    time = np.arange(count * samples) / rate
    tone = sum(np.sin(2 * np.pi * 120 * k * time + k) / k for k in range(1, 12))
    loud = 0.5 + 0.5 * np.sin(2 * np.pi * 1.3 * time)
    sound = 0.2 * loud * tone + 0.02 * random.standard_normal(time.shape)
    return sound.reshape(count, 1, samples).astype(np.float32)


@pytest.mark.parametrize(
    ("file", "rate", "takes_rate"),
    [
        ("silero_vad.onnx", 16000, True),
        ("silero_vad.onnx", 8000, True),
        ("silero_vad_op18_ifless.onnx", 16000, True),
        ("silero_vad_op18_ifless.onnx", 8000, True),
        ("silero_vad_16k_op15.onnx", 16000, True),
        ("silero_vad_half.onnx", 16000, False),
        ("silero_vad_openvino_16k.onnx", 16000, False),
    ],
)
async def test_state_is_carried_over_many_steps(file: str, rate: int, takes_rate: bool) -> None:
    path = await anyio.to_thread.run_sync(zoo.path, "silero-vad", file)
    session = await anyio.to_thread.run_sync(zoo.onnxruntime_session, path)
    extra = {"sr": np.array(rate, np.int64)} if takes_rate else {}
    ours = theirs = np.zeros((2, 1, 128), np.float32)
    async with tm.Runtime() as runtime:
        compiled = await runtime.compile(path)
        for step, chunk in enumerate(chunks(rate, STEPS)):
            outputs = await compiled.run({"input": chunk, "state": ours, **extra})
            probability, theirs = session.run(None, {"input": chunk, "state": theirs, **extra})
            ours = outputs["stateN"]
            np.testing.assert_allclose(outputs["output"], probability, rtol=0, atol=1e-4, err_msg=f"step {step}")
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4, err_msg=f"step {step}")


async def test_both_rates_in_one_actor_do_not_mix() -> None:
    """The rate is read on the host: each has a program of its own, and going back finds the right one."""
    path = await anyio.to_thread.run_sync(zoo.path, "silero-vad", "silero_vad.onnx")
    session = await anyio.to_thread.run_sync(zoo.onnxruntime_session, path)
    async with tm.Runtime() as runtime:
        compiled = await runtime.compile(path)
        for rate in (16000, 8000, 16000, 8000):
            inputs = {
                "input": chunks(rate, 1)[0],
                "state": np.full((2, 1, 128), 0.05, np.float32),
                "sr": np.array(rate, np.int64),
            }
            outputs = await compiled.run(inputs)
            probability, state = session.run(None, inputs)
            np.testing.assert_allclose(outputs["output"], probability, rtol=0, atol=1e-4)
            np.testing.assert_allclose(outputs["stateN"], state, rtol=0, atol=1e-4)


async def test_five_exports_agree() -> None:
    """Exports of the same weights, from If inside If to the whole sequence at once, give the same probabilities."""
    sound = chunks(16000, 20)
    found: dict[str, np.ndarray] = {}
    files = ["silero_vad.onnx", "silero_vad_16k_op15.onnx", "silero_vad_op18_ifless.onnx", "silero_vad_openvino_16k.onnx"]
    async with tm.Runtime() as runtime:
        for file in files:
            compiled = await runtime.compile(await anyio.to_thread.run_sync(zoo.path, "silero-vad", file))
            state, probabilities = np.zeros((2, 1, 128), np.float32), []
            extra = {} if "openvino" in file else {"sr": np.array(16000, np.int64)}
            for chunk in sound:
                outputs = await compiled.run({"input": chunk, "state": state, **extra})
                state = outputs["stateN"]
                probabilities.append(outputs["output"].item())
            found[file] = np.array(probabilities)
        path = await anyio.to_thread.run_sync(zoo.path, "silero-vad", "silero_vad_16k_sequence.onnx")
        compiled = await runtime.compile(path)
        zero = np.zeros((1, 1, 128), np.float32)
        outputs = await compiled.run({"input": sound[:, 0], "h": zero, "c": zero})
        found["sequence"] = outputs["speech_probs"]
    first = found.pop("silero_vad.onnx")
    assert first.max() - first.min() > 0.01, "the sound must move the detector, or agreement says nothing"
    for file, probabilities in found.items():
        np.testing.assert_allclose(probabilities, first, rtol=0, atol=1e-4, err_msg=file)
