"""Nodes that a padded graph needs beside its own: sizes brought up to a bucket, and padding put back before windows.

A dimension that is born inside of the graph has its size in some integer N. The node that makes N gives `N@true`
instead, and N becomes the smallest bucket that holds it (N itself where none does: the call is refused at its end).

Where windows of a convolution or a pool read across a padded axis, what stands beyond the true length is put back to
what they would see beyond the edge of unpadded data: zero, or minus infinity for a maximum. The true length of a
dimension of the inputs is a value `@size DIM` that every call brings along.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from transmuter_async.compiler.axes_values import Mask
from transmuter_async.compiler.writer import Writer
from transmuter_async.graph import Graph, Node, TensorType

__all__ = ["Born", "find_born", "lengths_below", "rewrite", "size_name", "true_name"]

_INT64, _DOUBLE = 7, 11
_SAME_NUMBER = frozenset({"Identity", "Cast", "Squeeze", "Unsqueeze", "Reshape"})


@dataclass(frozen=True, slots=True)
class Born:
    """A dimension whose size is an integer of the graph.

    Attributes:
        dim: Its name, as `Batching` says it.
        tensor: The integer that is its size.
        given: Whether the caller gives it, as an input.
    """

    dim: str
    tensor: str
    given: bool


def size_name(dim: str) -> str:
    """The value that is a dimension's true size, where inputs carry it."""
    return f"@size {dim}"


def true_name(tensor: str) -> str:
    """The true value of an integer that is brought up to a bucket."""
    return f"{tensor}@true"


def find_born(graph: Graph, name: str) -> Born | None:
    """The dimension that a name of the graph bears: an integer, or the Range that counts up to one."""
    inputs = {value.name: value for value in graph.inputs}
    if name in inputs:
        held = inputs[name].type
        fits = (
            isinstance(held, TensorType)
            and held.dtype is not None
            and held.dtype.kind in "iu"
            and held.shape in ((), (1,))
        )
        return Born(name, name, True) if fits else None
    for node in graph.nodes:
        if name in node.outputs:
            if node.op_type == "Range" and not node.domain:
                limit = node.inputs[1]
                source = find_born(graph, limit)
                return None if source is None else replace(source, dim=name)
            return Born(name, name, False)
    return None


def lengths_below(graph: Graph, born: Iterable[Born]) -> dict[str, str]:
    """Names of integers of which none is above a born size, because that is their maximum; with the dimension."""
    producers = {name: node for node in graph.nodes for name in node.outputs if name}
    found: dict[str, str] = {}
    for each in born:
        name = each.tensor
        while name in producers and producers[name].op_type in _SAME_NUMBER and not producers[name].domain:
            if producers[name].op_type == "Cast" and int(producers[name].attributes["to"]) not in (6, 7):  # type: ignore[call-overload]
                break
            name = producers[name].inputs[0]
        node = producers.get(name)
        if node is None or node.op_type != "ReduceMax" or node.domain:
            continue
        if "axes" in node.attributes or (len(node.inputs) > 1 and node.inputs[1]):
            axes = node.attributes.get("axes")
            axes = graph.initializers.get(node.inputs[1]) if axes is None else axes
            held = graph.types.get(node.inputs[0])
            rank = len(held.shape) if isinstance(held, TensorType) and held.shape is not None else None
            if axes is None or rank is None or len(np.unique(np.asarray(axes) % max(rank, 1))) != rank:
                continue
        elif node.attributes.get("noop_with_empty_axes", 0):
            continue
        found[node.inputs[0]] = each.dim
    return found


def rewrite(graph: Graph, born: Iterable[Born], buckets: Mapping[str, Sequence[int]], masks: Iterable[Mask]) -> Graph:
    """The graph with its born sizes brought up to buckets, and padding put back before windows.

    Args:
        graph: As it is padded.
        born: Dimensions born inside; those that the caller gives need no nodes.
        buckets: Sizes by dimension.
        masks: What has to be put back.

    Returns:
        A graph that reads `size_name` of dimensions of the inputs beside its inputs, and makes the true value of each born
        size. The graph itself where nothing is to be done.
    """
    made = {each.tensor: each for each in born if not each.given}
    by_output: dict[str, list[Mask]] = {}
    for mask in masks:
        by_output.setdefault(mask.output, []).append(mask)
    if not made and not by_output:
        return graph
    sources = {each.dim: true_name(each.tensor) for each in born}
    constants: dict[str, np.ndarray] = {}
    nodes: list[Node] = []
    for node in graph.nodes:
        writer = Writer(node, constants)
        for mask in by_output.get(node.outputs[0] if node.outputs else "", ()):
            source = sources.get(mask.dim, size_name(mask.dim))
            held = _put_back(writer, mask, node.inputs[0], source)
            node = replace(node, inputs=(held, *node.inputs[1:]))
        nodes.extend(writer.nodes)
        for name in node.outputs:
            if name in made:
                true = true_name(name)
                nodes.append(replace(node, outputs=tuple(true if n == name else n for n in node.outputs)))
                after = Writer(node, constants)
                _to_bucket(after, name, true, buckets[made[name].dim])
                nodes.extend(after.nodes)
                break
        else:
            nodes.append(node)
    return replace(graph, nodes=tuple(nodes), initializers={**graph.initializers, **constants})


def _to_bucket(writer: Writer, name: str, true: str, sizes: Sequence[int]) -> None:
    """The smallest bucket that holds a size; 0 stays 0, and what no bucket holds stays as it is.

    Computed in floats, exactly: integers that follow from an input by integer arithmetic alone would enter a program by the
    value of that input, which makes a program for each.
    """
    ladder = writer.constant([0, *sizes], np.float64)
    wide = writer.add("Cast", [true], f"{name}@wide", to=_DOUBLE)
    flat = writer.add("Reshape", [wide, writer.constant([1])], f"{name}@flat")
    all_sizes = writer.add("Concat", [ladder, flat], f"{name}@ladder", axis=0)
    below = writer.add("Less", [ladder, flat], f"{name}@below")
    count = writer.add("Cast", [below], f"{name}@ones", to=_INT64)
    place = writer.add("ReduceSum", [count, writer.constant([0])], f"{name}@place", keepdims=1)
    chosen = writer.add("Gather", [all_sizes, place], f"{name}@chosen", axis=0)
    shape = writer.add("Shape", [true], f"{name}@shape")
    formed = writer.add("Reshape", [chosen, shape], f"{name}@formed")
    writer.add("CastLike", [formed, true], name)


def _put_back(writer: Writer, mask: Mask, name: str, source: str) -> str:
    base = f"{mask.output}@mask{mask.axis}"
    size = writer.add("Shape", [name], f"{base} size", start=mask.axis, end=mask.axis + 1)
    count = writer.add("Squeeze", [size], f"{base} count")
    places = writer.add("Range", [writer.constant(0), count, writer.constant(1)], f"{base} places")
    length = writer.add("Cast", [source], f"{base} true", to=_INT64)
    length = writer.add("Reshape", [length, writer.constant([1])], f"{base} flat")
    if mask.factor != 1:
        length = writer.add("Mul", [length, writer.constant([mask.factor])], f"{base} length")
    live = writer.add("Less", [places, length], f"{base} live")
    after = mask.rank - 1 - mask.axis
    if after:
        live = writer.add("Unsqueeze", [live, writer.constant(list(range(1, 1 + after)))], f"{base} shaped")
    fill = mask.fill
    if fill in ("", "-inf"):
        value = writer.constant(-np.inf if fill else 0, np.float32)
        fill = writer.add("CastLike", [value, name], f"{base} fill")
    elif mask.fill:
        fill = writer.add("Reshape", [fill, writer.constant([1])], f"{base} fill")
    return writer.add("Where", [live, name, fill], base)
