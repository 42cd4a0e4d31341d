"""The one way to XLA: what it is told for every program that this library compiles."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax

__all__ = ["DEFAULT_FUSIONS", "FUSIONS", "compile_program", "module_size"]

_ALWAYS: dict[str, Any] = {"xla_allow_excess_precision": False}
"""A rounding to 16 bits that the graph asks for is not to be optimized away: the host form makes it too."""

_FUSION_OPTION = "xla_cpu_experimental_ynn_fusion_type"

FUSIONS: Mapping[str, str] = MappingProxyType(
    {
        "products and convolutions": "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT,LIBRARY_FUSION_TYPE_INDIVIDUAL_CONVOLUTION",
        "products": "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT",
        "convolutions": "LIBRARY_FUSION_TYPE_INDIVIDUAL_CONVOLUTION",
        "none": "",
    }
)
"""What XLA may give to its library on a CPU, each operation by itself; by a name of ours.

Never a kind that takes what is around an operation along: reductions with all that is before them (the third kind that is on by
default), and products with what follows (`LIBRARY_FUSION_TYPE_DOT`). With both, jaxlib 0.10 to 0.12 read past the end of a
product's right factor that is one number broadcast, so that `(x @ full(c)).max(-1)` and `tanh(x @ full(c))` are arbitrary."""

DEFAULT_FUSIONS = "products"
"""The library cuts a convolution within a row of its result only, by width and channels: most of those in an image network
at batch 1 then use one core. XLA's own use all (two cores: 0.55 to 0.7 of the time from 27×27×32 to 56×56×64, the same from
14×14×256 on). A product is cut well by either."""


def compile_program(lowered: Any, platform: str, fusions: str = DEFAULT_FUSIONS) -> Any:
    """Compile what `jax.jit(...).lower(...)` gave, with the options that keep XLA's results right.

    Args:
        lowered: A `jax.stages.Lowered`.
        platform: What it is for, as jax names it: "cpu", "gpu", "tpu".
        fusions: A name of `FUSIONS`, for a CPU.

    Returns:
        A `jax.stages.Compiled`.

    Raises:
        jax.errors.JaxRuntimeError: XLA refused the program.
    """
    if platform == "cpu":
        try:
            return lowered.compile(compiler_options=_ALWAYS | {_FUSION_OPTION: FUSIONS[fusions]})
        except jax.errors.JaxRuntimeError as error:
            unknown = "No such compile option" in str(error)  # a jaxlib that does not know it has no such fusions
            if not unknown or fusions != DEFAULT_FUSIONS:
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
