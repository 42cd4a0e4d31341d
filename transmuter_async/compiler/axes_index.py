"""How operators that look up or write by index treat followed axes; see `axes`. Sources: ai.onnx 1 to 24."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from transmuter_async.compiler.axes import (
    GARBAGE,
    Atom,
    Axis,
    Follower,
    Mixing,
    Rule,
    Tensor,
    Undecided,
    labels,
    plain,
    size_of,
)
from transmuter_async.compiler.axes_rules import attribute, shape_key, taint_of, unsure
from transmuter_async.compiler.sizes import poly
from transmuter_async.graph import Node

__all__ = ["INDEX"]

INDEX: dict[tuple[str, str], Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register a rule for some operators."""

    def register(function: Rule) -> Rule:
        for name in names:
            INDEX["", name] = function
        return function

    return register


def judge_index(follower: Follower, index: Tensor, value: Any, axis: Axis) -> None:
    """Whether indices into a plain axis stay in range on padding too."""
    size = size_of(axis).constant()
    if isinstance(value, np.ndarray) or not index.fed:
        if index.content is not None and index.content[0] == "iota" and size is not None:
            most = follower.dims[index.content[1]].largest
            if most is not None and most > size:
                raise Mixing(
                    index.content[1], f"looks up positions among {size}, so a bucket of {most} is not possible"
                )
        return
    for held in index.axes or ():
        for atom in held:
            if atom.dim is None or atom.dim in follower.rows_only:
                continue
            state = atom.state
            low, high = state.span
            if state.finite and size is not None and -size <= low and high < size:
                continue
            if state.kind != "constant":
                raise Mixing(atom.dim, "looks up indices that padding computes, which may be out of range")
            if size is not None and not -size <= int(state.value) < size:
                raise Mixing(
                    atom.dim, f"looks up index {int(state.value)} of the padding among {size}; pad with another value"
                )


@rule("Gather")
def gather(follower: Follower, node: Node, values: list[Any]) -> list[Any]:
    """Looks up along one axis."""
    tensor = follower.tensor(values[0])
    index = follower.tensor(values[1])
    axes, places = follower.ranked(tensor), follower.ranked(index)
    at = int(attribute(node, "axis", 0)) % len(axes)
    taint = taint_of(follower.as_data(tensor), index)
    looked = axes[at]
    kept = [list(axes[:at]), list(axes[at + 1 :])]
    if labels([looked]):
        name = min(labels([looked]))
        own = index.content == ("iota", name) and len(looked) == 1
        zero = isinstance(values[1], np.ndarray) and bool((values[1] == 0).all()) and follower.kind(name) == "padded"
        if not own and not (zero and len(looked) == 1):
            raise Mixing(name, "looks up elements along it")
        places = places if zero else tuple(_from(axis, looked) for axis in places)
    else:
        judge_index(follower, index, values[1], looked)
        if index.content is not None:
            taint = taint or follower.as_data(index).taint
        places = tuple(tuple(a if a.dim is None else Atom(a.size, a.dim) for a in axis) for axis in places)
    out = (*kept[0], *places, *kept[1])
    return [Tensor(out, None, taint, tensor.fed or index.fed)]


def _from(axis: Axis, source: Axis) -> Axis:
    """An index axis with the states of the axis that it runs over."""
    return tuple(a if a.dim is None or a.dim != source[0].dim else Atom(a.size, a.dim, source[0].state) for a in axis)


@rule("GatherElements")
def gather_elements(follower: Follower, node: Node, values: list[Any]) -> list[Any]:
    """Looks up along one axis, other axes at their own place."""
    tensor = follower.as_data(follower.tensor(values[0]))
    index = follower.as_data(follower.tensor(values[1]))
    axes, places = follower.ranked(tensor), follower.ranked(index)
    at = int(attribute(node, "axis", 0)) % len(axes)
    if labels([axes[at]]):
        raise Mixing(min(labels([axes[at]])), "looks up elements along it")
    judge_index(follower, index, values[1], axes[at])
    out: list[Axis] = []
    for i, (held, place) in enumerate(zip(axes, places, strict=True)):
        if i != at and labels([held, place]) and shape_key(held) != shape_key(place):
            raise Mixing(min(labels([held, place])), "its indices are not along the same dimension")
        out.append(tuple(a if a.dim is None else Atom(a.size, a.dim) for a in place))
    return [Tensor(tuple(out), None, taint_of(tensor, index), True)]


@rule("GatherND")
def gather_nd(follower: Follower, node: Node, values: list[Any]) -> list[Any]:
    """Looks up along the first axes; a followed one only at its own place."""
    tensor, index = follower.tensor(values[0]), follower.tensor(values[1])
    axes, places = follower.ranked(tensor), follower.ranked(index)
    width = size_of(places[-1]).constant()
    if width is None or attribute(node, "batch_dims", 0):
        raise Undecided("this form of index is not followed")
    if index.content is not None and index.content[0] == "selected":
        return [follower.select(tensor, index)]
    columns = index.content[1] if index.content is not None and index.content[0] == "columns" else (None,) * width
    sources: dict[str, Axis] = {}
    for column, axis in zip(columns, axes, strict=False):
        if labels([axis]):
            name = min(labels([axis]))
            if column != name or len(axis) > 1:
                raise Mixing(name, "looks up elements along it")
            sources[name] = axis
        elif column is not None and follower.kind(column) == "batch":
            raise Mixing(column, "computes with a row's place in the batch")
        elif labels(places) and not index.fed:
            continue
        else:
            judge_index(follower, index, values[1], axis)
    out: list[Axis] = []
    for axis in places[:-1]:
        atoms = [
            a if a.dim is None else Atom(a.size, a.dim, sources[a.dim][0].state if a.dim in sources else GARBAGE)
            for a in axis
        ]
        out.append(tuple(atoms))
    out.extend(axes[width:])
    return [Tensor(tuple(out), None, taint_of(follower.as_data(tensor), index), True)]


@rule("ScatterND")
def scatter_nd(follower: Follower, node: Node, values: list[Any]) -> list[Any]:
    """Writes rows. Followed: each row at its own place, or plain places of a followed tensor."""
    tensor, index, updates = (follower.tensor(v) for v in values)
    axes, places = follower.ranked(tensor), follower.ranked(index)
    if index.content is not None and index.content[0] == "selected":
        return [follower.put(node, tensor, index, updates)]
    width = size_of(places[-1]).constant()
    if width is None:
        raise Undecided("this form of index is not followed")
    names = labels([*axes, *places, *follower.ranked(updates)])
    if not names:
        return [Tensor(axes, None, taint_of(tensor, index, updates), True)]
    columns = index.content[1] if index.content is not None and index.content[0] == "columns" else (None,) * width
    followed = {min(labels([axis])): at for at, axis in enumerate(axes[:width]) if labels([axis])}
    written = follower.ranked(updates)
    expected = (*places[:-1], *axes[width:])
    if attribute(node, "reduction", "none") != "none" or len(written) != len(expected):
        raise Mixing(min(names), "writes in a way that is not followed")
    for name, at in followed.items():
        if at >= len(columns) or columns[at] != name or len(axes[at]) > 1:
            raise Mixing(name, "writes elements along it")
    for have, want in zip(written, expected, strict=True):
        if labels([have, want]) and shape_key(have) != shape_key(want):
            raise Mixing(min(labels([have, want])), "writes rows that are not along the same dimension")
    stray = labels(places) - followed.keys()
    if stray:
        raise Mixing(min(stray), "many of its rows write to one place")
    out = tuple(tuple(a if a.dim is None else Atom(a.size, a.dim) for a in axis) for axis in axes)
    taint = taint_of(follower.as_data(tensor), index, follower.as_data(updates))
    return [Tensor(out, None, taint, True)]


@rule("OneHot")
def one_hot(follower: Follower, node: Node, values: list[Any]) -> list[Any]:
    """A new axis; every index gives its own row."""
    index = follower.as_data(follower.tensor(values[0]))
    axes = list(follower.ranked(index))
    depth = follower.sizes(values[1])
    if follower.tensor(values[2]).dims or (depth is not None and depth[0].symbols() & follower.dims.keys()):
        raise Mixing(min(index.dims or follower.tensor(values[2]).dims), "its depth depends on it")
    at = int(attribute(node, "axis", -1)) % (len(axes) + 1)
    axes = [unsure(axis) for axis in axes]
    axes.insert(at, plain(follower.fresh("depth") if depth is None else depth[0]))
    return [Tensor(tuple(axes), None, index.taint, index.fed)]


@rule("TopK")
def top(follower: Follower, node: Node, values: list[Any]) -> list[Any]:
    """The largest along one axis."""
    tensor = follower.as_data(follower.tensor(values[0]))
    axes = list(follower.ranked(tensor))
    at = int(attribute(node, "axis", -1)) % len(axes)
    if labels([axes[at]]):
        raise Mixing(min(labels([axes[at]])), "sorts along it")
    count = follower.sizes(values[1]) if len(values) > 1 else [poly(int(attribute(node, "k", 1)))]
    if count is not None and count[0].symbols() & follower.dims.keys():
        raise Mixing(min(count[0].symbols() & follower.dims.keys()), "how many it takes depends on it")
    out = [unsure(axis) for axis in axes]
    out[at] = plain(follower.fresh("top") if count is None else count[0])
    return [replace(tensor, axes=tuple(out))] * 2


@rule("DepthToSpace", "SpaceToDepth")
def depth(follower: Follower, node: Node, values: list[Any]) -> list[Any]:
    """Moves blocks between channels and places; rows stay."""
    tensor = follower.as_data(follower.tensor(values[0]))
    axes = follower.ranked(tensor)
    if labels(axes[1:]):
        raise Mixing(min(labels(axes[1:])), "moves elements along it")
    block = poly(int(attribute(node, "blocksize", 1)))
    up = node.op_type == "DepthToSpace"
    channels = size_of(axes[1])
    area = block * block
    new = channels.divide(area) if up else channels * area
    sides = [size_of(axis) * block if up else size_of(axis).divide(block) for axis in axes[2:]]
    out = [axes[0], *(plain(follower.fresh("block") if s is None else s) for s in (new, *sides))]
    return [replace(tensor, axes=tuple(out))]


@rule("NonZero")
def nonzero(follower: Follower, node: Node, values: list[Any]) -> list[Any]:
    """How many there are depends on values."""
    tensor = follower.as_data(follower.tensor(values[0]))
    if tensor.dims or tensor.taint is not None:
        name = min(tensor.dims) if tensor.dims else tensor.taint.axis  # type: ignore[union-attr]
        raise Mixing(name, "counts elements along it, padding included")
    return [follower.positions(node, tensor)]
