"""Every example runs in a process of its own, as its reader would run it, with warnings as errors."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
RUN = sorted(file for file in EXAMPLES.glob("*.py") if file.name != "train_digits.py")
ENVIRONMENT = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(EXAMPLES.parent)}


@pytest.mark.parametrize("file", RUN, ids=lambda file: file.stem)
def test_example_runs(file: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", str(file)],
        cwd=tmp_path,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


@pytest.mark.compiles_itself
def test_the_digits_script_still_fits_the_committed_model(tmp_path: Path, monkeypatch) -> None:
    """One step of training and the writing of the graph; the whole training is `nox -s train_digits`."""
    pytest.importorskip("sklearn")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import numpy as np
    import onnx
    import train_digits

    from transmuter_async.demo import digits_model, digits_test

    _, (images, labels) = train_digits.load_digits()
    kept_images, kept_labels = digits_test()
    assert np.array_equal(images, kept_images)
    assert np.array_equal(labels, kept_labels)
    fresh = train_digits.to_onnx(train_digits.init(train_digits.jax.random.key(0)))
    committed = onnx.load_from_string(digits_model())
    assert fresh.graph.node == committed.graph.node
    shapes = [{each.name: tuple(each.dims) for each in model.graph.initializer} for model in (fresh, committed)]
    assert shapes[0] == shapes[1]
