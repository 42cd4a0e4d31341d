"""Compare a model with onnxruntime, and find the first node that makes a difference.

  transmuter compare model.onnx --fill random --dim batch=2

Exit code 1 when an output differs by more than the tolerance.
"""

from __future__ import annotations

import argparse
from functools import partial

import anyio

from transmuter_async.cli.inputs import add_input_arguments, gather
from transmuter_async.cli.output import Output
from transmuter_async.cli.progress import downloads
from transmuter_async.compare import ORACLES, compare
from transmuter_async.runtime import Runtime


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `compare`."""
    parser.add_argument("model", help="an ONNX file")
    add_input_arguments(parser)
    parser.add_argument(
        "--oracle",
        choices=ORACLES,
        default="onnxruntime",
        help="the other side (reference: onnx's evaluator in Python; host: our own numpy form)",
    )
    parser.add_argument("--compiler", choices=("xla", "eager"), default="xla", help="our side (eager: numpy)")
    parser.add_argument("--atol", type=float, help="absolute tolerance of floats (by dtype; float32 has 1e-4)")
    parser.add_argument("--rtol", type=float, help="relative tolerance of floats (by dtype; float32 has 1e-3)")


async def execute(options: argparse.Namespace, output: Output) -> int:
    """Run both sides on the same inputs, halving the graph where they differ."""
    async with Runtime() as runtime:
        async with downloads(runtime.telemetry, output, f"loading {options.model}"):
            model = await runtime.load(options.model)
        inputs = await anyio.to_thread.run_sync(gather, model, options)
        search = partial(
            compare,
            model,
            inputs,
            options.oracle,
            compiler=options.compiler,
            rtol=options.rtol,
            atol=options.atol,
            seed=options.seed,
        )
        with output.working("running both sides"):
            found = await anyio.to_thread.run_sync(search)
    output.data = {"model": options.model, **found.to_dict()}
    rows = [
        (
            each.name,
            "same" if each.same else "DIFFERENT",
            "" if each.largest is None else f"{each.largest:.3g}",
            each.why,
        )
        for each in found.outputs
    ]
    output.table(("output", "verdict", "largest difference", "why"), rows, right=("largest difference",))
    if not found.same:
        output.line()
        output.line(str(found))
    return 0 if found.same else 1
