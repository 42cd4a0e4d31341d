"""Show how a model is compiled: its segments, where it breaks, why, and what to do about it.

With the sizes of all open dimensions (--dim) the model is traced for these shapes; without, over what the graph declares.
Exit code 1 when the graph breaks.
"""

from __future__ import annotations

import argparse

from transmuter_async.cli.inputs import add_dim_argument, dims, specs
from transmuter_async.cli.output import Output
from transmuter_async.compiler import Spec
from transmuter_async.runtime import Runtime


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `explain`."""
    parser.add_argument("model", help="an ONNX file, or hf://owner/repository@revision/path")
    add_dim_argument(parser)
    parser.add_argument(
        "--static", action="append", default=[], metavar="INPUT", help="an input whose value is known before"
    )


async def execute(options: argparse.Namespace, output: Output) -> int:
    """Load, compile where the shapes are known, print the explanation."""
    async with Runtime() as runtime:
        with output.working(f"loading {options.model}"):
            model = await runtime.load(options.model)
        shapes = specs(model, dims(options.dim), Spec)
        with output.working("compiling"):
            compiled = await runtime.compile(model, shapes, static_inputs=tuple(options.static))
            explanation = await compiled.explain()
    output.data = {"model": options.model, **explanation.to_dict()}
    output.line(str(explanation))
    return 1 if explanation.breaks else 0
