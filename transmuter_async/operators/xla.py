"""The one way to XLA: what it is told for every program that this library compiles."""

from __future__ import annotations

from typing import Any

import jax

__all__ = ["compile_program", "module_size"]

_ALWAYS: dict[str, Any] = {"xla_allow_excess_precision": False}
"""A rounding to 16 bits that the graph asks for is not to be optimized away: the host form makes it too."""

_ON_CPU: dict[str, Any] = {
    "xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT,LIBRARY_FUSION_TYPE_INDIVIDUAL_CONVOLUTION"
}
"""Without the third kind that is on by default, of reductions with all that is before them: jaxlib 0.10 to 0.12 then read past
the end of a product's right factor that is one number broadcast, so that `(x @ full(c)).max(-1)` is arbitrary."""


def compile_program(lowered: Any, platform: str) -> Any:
    """Compile what `jax.jit(...).lower(...)` gave, with the options that keep XLA's results right.

    Args:
        lowered: A `jax.stages.Lowered`.
        platform: What it is for, as jax names it: "cpu", "gpu", "tpu".

    Returns:
        A `jax.stages.Compiled`.

    Raises:
        jax.errors.JaxRuntimeError: XLA refused the program.
    """
    if platform == "cpu":
        try:
            return lowered.compile(compiler_options=_ALWAYS | _ON_CPU)
        except jax.errors.JaxRuntimeError as error:
            if "No such compile option" not in str(error):  # a jaxlib that does not know it has no such fusions
                raise
    return lowered.compile(compiler_options=_ALWAYS)


def module_size(lowered: Any) -> int:
    """Operations of the StableHLO module that `jax.jit(...).lower(...)` gave, those of nested regions included."""
    return _operations(lowered.compiler_ir(dialect="stablehlo").operation)


def _operations(around: Any) -> int:
    count = 0
    for region in around.regions:
        for block in region.blocks:
            for operation in block.operations:
                count += 1 + _operations(operation.operation)
    return count
