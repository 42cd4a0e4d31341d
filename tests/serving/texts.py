"""What MiniLM takes, for the tests of the worker and its benchmarks."""

from __future__ import annotations

import numpy as np

__all__ = ["Text", "text"]

Text = dict[str, np.ndarray]


def text(length: int, seed: int, rows: int = 1) -> Text:
    """Random tokens: three inputs (rows, length) of int64, nothing of which is padding."""
    ids = np.random.default_rng(seed).integers(1000, 30000, (rows, length))
    return {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
