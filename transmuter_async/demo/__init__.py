"""The embedded model: a classifier of handwritten digits that this project trained itself.

`digits.onnx` and `digits_test.npz` are written by examples/train_digits.py, which tells the architecture and the data.
Everything here blocks (it reads files); call it in a thread.
"""

from __future__ import annotations

from importlib import resources

import numpy as np

__all__ = ["digits_model", "digits_test"]


def digits_model() -> bytes:
    """The .onnx file: `image`, float32 (batch, 1, 8, 8) in 0 to 1 → `probabilities`, float32 (batch, 10)."""
    return (resources.files("transmuter_async.demo") / "digits.onnx").read_bytes()


def digits_test() -> tuple[np.ndarray, np.ndarray]:
    """The test split, which the training did not see: images, uint8 (359, 8, 8) in 0 to 16, and labels, uint8 (359,)."""
    with (resources.files("transmuter_async.demo") / "digits_test.npz").open("rb") as file, np.load(file) as kept:
        return kept["images"], kept["labels"]
