"""How weights are rearranged before programs use them: by name, so that the disk cache can name what a program takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from transmuter_async.operators.numeric import widen
from transmuter_async.operators.registry import xp

__all__ = ["PREPARED_INPUTS", "RECIPES"]

PREPARED_INPUTS: frozenset[tuple[str, str, str]] = frozenset({("", "Gemm", "B")})
"""Inputs, as (domain, operator, name), that a definition takes with `Context.prepared` itself where they are weights."""

Recipe = Callable[[Any], Any]


def _same(weight: Any) -> Any:
    return weight


def _filters_last(weight: Any) -> Any:
    """(M, C / group, *kernel) as (*kernel, C / group, M), narrow floats as float32."""
    return xp(weight).moveaxis(widen(weight), (0, 1), (-1, -2))


def _channels_last(rank: int) -> Recipe:
    def spread(value: Any) -> Any:
        """A value that broadcasts against one of that rank, with the channels as its last axis."""
        whole = value.reshape((1,) * (rank - value.ndim) + tuple(value.shape))
        return xp(value).moveaxis(whole, 1, -1)

    return spread


def _transposed(weight: Any) -> Any:
    return weight.T


RECIPES: Mapping[str, Recipe] = MappingProxyType(
    {
        "same": _same,
        "transposed": _transposed,
        "filters last": _filters_last,
        "channels last 3": _channels_last(3),
        "channels last 4": _channels_last(4),
    }
)
"""What each recipe makes of a weight, host or traced."""
