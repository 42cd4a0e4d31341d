"""Weights that lie in memory as programs on a CPU read them, so that there is one copy of each.

    conv.weight (M, C, 3, 3)    is held as (3, 3, C, M), and the graph has the view of it that is (M, C, 3, 3)

What a recipe of `operators.RECIPES` then makes of the weight is that memory itself. Shape and elements stay what they were for
every other reader.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import cast

import numpy as np

from transmuter_async.compiler.common import LEAST, let_go, one_of_equal
from transmuter_async.graph import Graph, Node, freeze, lasting_empty
from transmuter_async.operators import RECIPES

__all__ = ["lay_out", "lay_out_in_place", "with_arrays"]

_LINE = 64
"""Bytes of a line of the processor's caches."""

_WEIGHTS: Mapping[str, Mapping[int, str]] = MappingProxyType(
    {
        "Conv": {1: "filters last"},
        "Gemm": {1: "transposed"},
        **{name: {1: "gates of inputs", 2: "gates of state"} for name in ("GRU", "LSTM", "RNN")},
    }
)
"""By operator and input: the recipe that its programs ask for, each a rearrangement of elements and nothing else."""

_BACK: Mapping[str, Callable[[np.ndarray, tuple[int, ...]], np.ndarray]] = MappingProxyType(
    {
        "filters last": lambda made, _: np.moveaxis(made, (-1, -2), (0, 1)),
        "transposed": lambda made, _: made.T,
        "gates of inputs": lambda made, shape: made.T.reshape(shape),
        "gates of state": lambda made, _: made.swapaxes(1, 2),
    }
)
"""The view of what a recipe made that has the weight's own shape."""


def lay_out(graph: Graph) -> dict[int, np.ndarray]:
    """By `id` of a weight: the same elements, in the layout that all of its readers ask for.

    Left out are weights that a call may replace, narrow floats, which programs widen, and those that lie so already.

    Args:
        graph: Ready to be compiled; its arrays are read-only.
    """
    wanted = _wanted(graph)
    arrays = {id(array): array for each in _with_bodies(graph) for array in each.initializers.values()}
    moved = {number: _moved(arrays[number], recipe) for number, recipe in wanted.items()}
    return {number: one_of_equal(array) for number, array in moved.items() if array is not arrays[number]}


def lay_out_in_place(graph: Graph, held: Sequence[Mapping[str, np.ndarray]] = ()) -> None:
    """The same for a graph that nobody else has yet: it is changed, and each weight is let go of as soon as it lies anew.

    So there is one copy of all but one weight at any time.

    Args:
        graph: As for `lay_out`; nobody has any of its arrays.
        held: What else holds its initializers and nobody needs.
    """
    wanted = _wanted(graph)
    moved: dict[int, np.ndarray] = {}
    # Each once: an array that was moved may have the `id` of one that went.
    for own in {id(each.initializers): each.initializers for each in _with_bodies(graph)}.values():
        for name, array in own.items():
            number = id(array)  # stays that array's until the last of its names was seen
            if number not in wanted:
                continue
            if number not in moved:
                moved[number] = one_of_equal(_moved(array, wanted[number]))
            if moved[number] is not array:
                cast("dict[str, np.ndarray]", own)[name] = moved[number]
                let_go(name, array, held)


def with_arrays(graph: Graph, others: Mapping[int, np.ndarray]) -> Graph:
    """The graph, bodies included, with other arrays for some of its initializers, named by `id`."""
    nodes = []
    for node in graph.nodes:
        bodies = {name: with_arrays(body, others) for name, body in node.attributes.items() if isinstance(body, Graph)}
        nodes.append(replace(node, attributes={**node.attributes, **bodies}) if bodies else node)
    return replace(
        graph,
        nodes=tuple(nodes),
        initializers={name: others.get(id(array), array) for name, array in graph.initializers.items()},
    )


def _wanted(graph: Graph) -> dict[int, str]:
    """By `id` of a weight: the recipe that everything that reads it asks for."""
    asked: dict[int, set[str | None]] = {}
    for array, recipe in _asked(graph, {}):
        if array.nbytes >= LEAST and array.dtype in (np.float32, np.float64) and not array.flags.writeable:
            asked.setdefault(id(array), set()).add(recipe)
    return {
        number: recipe
        for number, recipes in asked.items()
        for recipe in recipes
        if len(recipes) == 1 and recipe is not None
    }


def _moved(array: np.ndarray, recipe: str) -> np.ndarray:
    """The weight in memory that lies as the recipe says; the array itself where it does."""
    made = RECIPES[recipe](array)
    if made.flags.c_contiguous:
        return array
    block = lasting_empty(math.prod(made.shape), array.dtype).reshape(made.shape)
    line = _LINE // array.itemsize
    for start in range(0, made.shape[-1], line):  # 3 to 6 times as fast as in one go: each line is written once
        block[..., start : start + line] = made[..., start : start + line]
    return freeze(_BACK[recipe](freeze(block), array.shape))


def _with_bodies(graph: Graph) -> Iterator[Graph]:
    yield graph
    for node in graph.walk():
        yield from node.subgraphs()


def _asked(graph: Graph, around: Mapping[str, np.ndarray]) -> Iterator[tuple[np.ndarray, str | None]]:
    """Each weight with what a reader asks for, bodies included: None where it takes the weight as it is."""
    known = {**around, **graph.initializers}
    plain = (*graph.overridable, *(value.name for value in graph.outputs))
    yield from ((known[name], None) for name in plain if name in known)
    for node in graph.nodes:
        for place, name in enumerate(node.inputs):
            if name in known:
                yield known[name], _recipe(node, place, known[name])
        for body in node.subgraphs():
            yield from _asked(body, known)


def _recipe(node: Node, place: int, array: np.ndarray) -> str | None:
    recipe = _WEIGHTS.get(node.op_type, {}).get(place) if node.domain == "" else None
    if node.op_type == "Gemm":
        fits = bool(node.attributes.get("transB")) and array.ndim == 2
    elif node.op_type == "Conv":
        # What `channels_last` surely takes whole: those of one element or in groups depend on what is around them.
        fits = node.attributes.get("group", 1) == 1 and array.ndim in (3, 4) and math.prod(array.shape[2:]) > 1
    else:
        fits = array.ndim == 3
    return recipe if fits else None
