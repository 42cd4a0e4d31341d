"""Which form an operator takes in a program: the one place where forms that only some platforms gain from are chosen.

A definition computes in its *plain* form, which XLA lowers well on accelerators. Where another form of the same result is
faster on a CPU, it has a name in `LOWERINGS`, and the definition asks `context.lowers(name)` once it knows that the shapes
fit; the answer is noted, so `explain(verbose=True)` can tell for each node what was taken. `optimize=False` and platforms that a
lowering is not for get the plain form. Every form gives the plain form's result up to the order of float sums; the
integer ones are exact.

The gains are in docs/lowering.md, with what was tried and lost.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType

__all__ = ["LOWERINGS", "lowerings_for"]

LOWERINGS: Mapping[str, str] = MappingProxyType(
    {
        "channels last": "convolutions and what lies between them keep the channels as the last axis in memory",
        "shifted taps": "a convolution of thin groups as multiply-adds of shifted inputs",
        "pointwise product": "a convolution of one element as a matrix product",
        "unit axes": "spatial axes of size one are dropped",
        "unfolded": "a convolution as one product of its unfolded input",
        "depth in channels": "a 3-D convolution as one in 2-D, with what lies behind each other as channels",
        "space to depth": "the first, strided convolution of an image takes blocks of pixels as channels",
        "block diagonal": "a grouped convolution as a few dense ones of neighbouring groups",
        "separable": "a pooling goes axis by axis, by shifted slices",
        "overlapping products": "a transposed convolution in groups as one product, whose parts are added where they overlap",
        "packed sort": "a sort by 32-bit keys as one of 64-bit integers, with the positions in the lower half",
        "small angles": "sine and cosine as polynomials where no angle is huge",
        "8-bit product": "a product of few rows with an 8-bit weight as one of 8-bit integers",
        "row lanes": "an extreme along rows, also that of a Softmax, as sixteen beside each other",
        "row product": "a sum or mean along rows as a product with a constant vector",
    }
)
"""What each lowering does, by name. All of them are for CPUs."""

_INSTRUCTIONS: Mapping[str, frozenset[str]] = MappingProxyType({"8-bit product": frozenset({"avx512_vnni", "avx_vnni"})})
"""Lowerings that only gain where the processor has one of these, by the names of Linux."""


@functools.cache
def instructions() -> frozenset[str]:
    """What the processor can do, as /proc/cpuinfo names it; nothing where the system does not tell. Reads a file once."""
    try:
        lines = Path("/proc/cpuinfo").read_text("ascii", "replace").splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line for line in lines if line.startswith("flags")), "").split())


def lowerings_for(platform: str, *, optimize: bool = True, forced: Iterable[str] | None = None) -> frozenset[str]:
    """The names of the lowerings that programs take.

    Args:
        platform: "cpu", "gpu" or "tpu", where the program will run.
        optimize: Off, every operator takes its plain form.
        forced: These instead, whatever the platform and its processor; for tests and measurements.

    Raises:
        ValueError: `forced` names one that there is not.
    """
    if forced is not None:
        chosen = frozenset(forced)
        if strangers := sorted(chosen - LOWERINGS.keys()):
            raise ValueError(f"{strangers} are no lowerings; there are {', '.join(LOWERINGS)}")
        return chosen
    if platform != "cpu" or not optimize:
        return frozenset()
    missing = {name for name, needed in _INSTRUCTIONS.items() if not needed & instructions()}
    return frozenset(LOWERINGS) - missing
