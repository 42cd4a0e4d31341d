"""Show how a model is compiled: its segments, where it breaks, why, and what to do about it.

  transmuter explain model.onnx --dim batch=1 --dim sequence=128     compiled for these shapes
  transmuter explain model.onnx --fill random --dim batch=1          run once: shows every break on the way
  transmuter explain model.onnx --input sr=16000 --fill zeros …      an input whose value decides the program
  transmuter explain model.onnx --fill random … --svg graph.svg      the same as a picture

Exit code 1 when the graph breaks.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import anyio

from transmuter_async.cli.inputs import add_input_arguments, dims, gather, replacing, shapes, specs
from transmuter_async.cli.output import Output
from transmuter_async.cli.progress import downloads
from transmuter_async.compiler import Spec
from transmuter_async.graph import Model
from transmuter_async.runtime import Runtime


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `explain`."""
    parser.add_argument("model", help="an ONNX file, or hf://owner/repository@revision/path")
    add_input_arguments(parser)
    parser.add_argument(
        "--static", action="append", default=[], metavar="INPUT", help="an input whose value is part of a program's key"
    )
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw segments, breaks and what they cost, as SVG")


def advice(model: Model, sizes: dict[str, int]) -> str:
    """What to add to the command line so that there is something to explain."""
    named = sorted({dim for shape in shapes(model) for dim in shape if isinstance(dim, str) and dim not in sizes})
    options = "".join(f" --dim {name}=SIZE" for name in named)
    return f"To see segments and breaks, let it run once: --fill random{options} (or --input NAME=VALUE)."


async def execute(options: argparse.Namespace, output: Output) -> int:
    """Load, run once or compile where the shapes are known, print the explanation."""
    async with Runtime() as runtime:
        async with downloads(runtime.telemetry, output, f"loading {options.model}"):
            model = await runtime.load(options.model)
        sizes = dims(model, options.dim)
        static = tuple(options.static)
        with output.working("compiling"):
            if options.input or options.fill:
                inputs = await anyio.to_thread.run_sync(gather, model, options)
                compiled = await runtime.compile(model, replacing(model, inputs), static_inputs=static)
                await compiled.run(inputs, seed=options.seed)
            else:
                compiled = await runtime.compile(model, specs(model, sizes, Spec), static_inputs=static)
            explanation = await compiled.explain(verbose=options.verbose)
    output.data = {"model": options.model, **explanation.to_dict()}
    output.line(str(explanation))
    if explanation.graph_break is None and not explanation.segments:
        output.data["advice"] = advice(model, sizes)
        output.line(output.data["advice"])
    if options.svg is not None:
        await anyio.to_thread.run_sync(options.svg.write_text, explanation.svg(), "utf-8")
        output.data["svg"] = str(options.svg)
        output.line(f"written: {options.svg}")
    return 1 if explanation.breaks else 0
