"""Compare the outputs of a model compiled with its outputs in numpy, or with onnxruntime's where that is installed.

  transmuter compare model.onnx --fill random --dim batch=2

Exit code 1 when an output differs by more than the tolerance.
"""

from __future__ import annotations

import argparse
import importlib
import os
from typing import Any

import anyio
import numpy as np

from transmuter_async.cli.inputs import add_input_arguments, gather
from transmuter_async.cli.output import Output
from transmuter_async.errors import InputError
from transmuter_async.runtime import Runtime


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `compare`."""
    parser.add_argument("model", help="an ONNX file")
    add_input_arguments(parser)
    parser.add_argument("--against", choices=("eager", "onnxruntime"), default="eager", help="the other side (eager: numpy)")
    parser.add_argument("--atol", type=float, default=1e-4, help="absolute tolerance of floats (default 1e-4)")
    parser.add_argument("--rtol", type=float, default=1e-4, help="relative tolerance of floats (default 1e-4)")


def _onnxruntime(path: str, inputs: dict[str, np.ndarray]) -> dict[str, Any]:
    try:
        onnxruntime = importlib.import_module("onnxruntime")
    except ImportError:
        raise InputError("--against onnxruntime needs it: pip install onnxruntime, or compare with eager") from None
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return dict(zip([each.name for each in session.get_outputs()], session.run(None, inputs), strict=True))


def compared(ours: Any, theirs: Any, atol: float, rtol: float) -> dict[str, Any]:
    """One output on both sides: `same`, the largest absolute difference, and why not where it is not."""
    if not isinstance(ours, np.ndarray) or not isinstance(theirs, np.ndarray):
        same = repr(ours) == repr(theirs)
        return {"same": same, "difference": None, "why": "" if same else "values differ"}
    if ours.shape != theirs.shape or (ours.dtype != theirs.dtype and ours.dtype.kind not in "OUT"):
        why = f"{ours.dtype}{ours.shape} against {theirs.dtype}{theirs.shape}"
        return {"same": False, "difference": None, "why": why}
    if ours.dtype.kind in "OUST":
        same = bool(np.array_equal(ours.astype(str), theirs.astype(str)))
        return {"same": same, "difference": None, "why": "" if same else "texts differ"}
    if ours.dtype.kind in "iub":
        wrong = int((ours != theirs).sum())
        return {"same": not wrong, "difference": None, "why": f"{wrong} elements differ" if wrong else ""}
    kind = np.complex128 if ours.dtype.kind == "c" else np.float64
    a, b = ours.astype(kind), theirs.astype(kind)
    near = np.isclose(a, b, rtol=rtol, atol=atol, equal_nan=True)
    with np.errstate(invalid="ignore"):
        difference = float(np.nanmax(np.where(np.isfinite(a) & np.isfinite(b), np.abs(a - b), 0.0), initial=0.0))
    wrong = int((~near).sum())
    return {"same": not wrong, "difference": difference, "why": f"{wrong} of {a.size} elements" if wrong else ""}


async def execute(options: argparse.Namespace, output: Output) -> int:
    """Run both sides on the same inputs."""
    async with Runtime() as runtime:
        with output.working(f"loading {options.model}"):
            model = await runtime.load(options.model)
        inputs = await anyio.to_thread.run_sync(gather, model, options)
        with output.working("running both sides"):
            ours = await (await runtime.compile(model)).run(inputs, seed=options.seed)
            if options.against == "onnxruntime":
                theirs = await anyio.to_thread.run_sync(_onnxruntime, os.fspath(options.model), inputs)
            else:
                theirs = await (await runtime.compile(model, compiler="eager")).run(inputs, seed=options.seed)
    results = {name: compared(ours[name], theirs[name], options.atol, options.rtol) for name in ours}
    same = all(each["same"] for each in results.values())
    output.data = {"model": options.model, "against": options.against, "same": same, "outputs": results}
    rows = [
        (
            name,
            "same" if each["same"] else "DIFFERENT",
            "" if each["difference"] is None else f"{each['difference']:.3g}",
            each["why"],
        )
        for name, each in results.items()
    ]
    output.table(("output", "verdict", "largest difference", "why"), rows, right=("largest difference",))
    return 0 if same else 1
