"""How operators that move elements treat followed axes; see `axes` for what is proved. Sources: ai.onnx 1 to 24."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    State,
    Tensor,
    Undecided,
    everywhere,
    is_unit,
    labels,
    merged,
    plain,
    size_of,
)
from transmuter_async.compiler.axes_live import ONE_AND_OTHER, point
from transmuter_async.compiler.axes_rules import (
    attribute,
    axes_of,
    joined,
    loosened,
    shape_key,
    taint_of,
    unsure,
)
from transmuter_async.compiler.sizes import ONE, Poly, Sizes, object_array, poly
from transmuter_async.graph import Node

__all__ = ["MOVES", "regroup"]

FAR = 10**9
"""Exporters write "to the end" as a large number; no axis is this long within the budget of elements."""

MOVES: dict[tuple[str, str], Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register a rule for some operators."""

    def register(function: Rule) -> Rule:
        for name in names:
            MOVES["", name] = function
        return function

    return register


def keep(tensor: Tensor, axes: Sequence[Axis]) -> Tensor:
    """The tensor with other axes, elements and what they mean unchanged."""
    stays = tensor.content is not None and tensor.content[0] in ("iota", "atmost", "number", "everywhere")
    content = tensor.content if stays else None
    return replace(tensor, axes=tuple(axes), content=content)


# --- shapes -----------------------------------------------------------------------------------------------------------


@rule("Shape")
def shape(follower: Follower, node: Node, values: list[Any]) -> list[Any]:
    """Sizes of the axes."""
    sizes = [size_of(axis) for axis in follower.ranked(values[0])]
    stop = attribute(node, "end", None)
    found = sizes[int(attribute(node, "start", 0)) : None if stop is None else int(stop)]
    return [follower._settled(Sizes(object_array(found, (len(found),))))]


@rule("Size")
def size(follower: Follower, node: Node, values: list[Any]) -> list[Any]:
    """Number of elements."""
    total = ONE
    for axis in follower.ranked(values[0]):
        total = total * size_of(axis)
    return [follower._settled(Sizes(object_array([total], ())))]


def made(follower: Follower, sizes: Sequence[Poly]) -> tuple[Axis, ...]:
    """Axes of a tensor made in a given shape: a followed dimension where the size is one."""
    axes: list[Axis] = []
    for each in sizes:
        found: Axis | None = None
        for name in sorted(each.symbols() & follower.dims.keys()):
            rest = each.divide(Poly.symbol(name))
            if rest == ONE:
                found = (Atom(each, name),)
        if found is None and each.symbols() & follower.dims.keys():
            name = min(each.symbols() & follower.dims.keys())
            raise Mixing(name, f"makes an axis of size {each!r}, which is not the dimension itself")
        axes.append(found or plain(each))
    return tuple(axes)


def wanted_shape(follower: Follower, value: Any, tensor: Tensor) -> list[Poly] | None:
    """The elements of a shape input; None where they are not known and nothing followed depends on them."""
    sizes = follower.sizes(value)
    if sizes is not None:
        return sizes
    given = follower.tensor(value)
    if given.taint is not None or given.dims or tensor.dims:
        name = given.taint.axis if given.taint is not None else min(given.dims | tensor.dims)
        raise Mixing(name, "its shape is computed in a way that is not followed")
    return None


@rule("ConstantOfShape")
def constant_of_shape(follower: Follower, node: Node, values: list[Any]) -> list[Any]:
    """One value in a given shape: the same beyond the length as before it."""
    sizes = wanted_shape(follower, values[0], Tensor(()))
    if sizes is None:
        axes = follower.tensor(values[0]).axes
        count = size_of(axes[0]).constant() if axes else None
        return [Tensor(None if count is None else tuple(plain(follower.fresh()) for _ in range(count)), fed=False)]
    value = np.asarray(attribute(node, "value", np.zeros(1, np.float32))).reshape(())
    axes = made(follower, sizes)
    return [Tensor(_filled(axes, everywhere(value)), ("everywhere", value), fed=False)]


def _filled(axes: Sequence[Axis], state: State) -> tuple[Axis, ...]:
    return tuple(tuple(a if a.dim is None else replace(a, state=state, level=True) for a in axis) for axis in axes)


def _counted(follower: Follower, value: Any) -> list[Poly] | None:
    """Start, limit or step: integers, or floats that are whole."""
    if isinstance(value, Tensor) and value.content is not None and value.content[0] == "size":
        return [value.content[1]]
    if (
        isinstance(value, np.ndarray)
        and value.dtype.kind == "f"
        and value.size == 1
        and float(value.reshape(())).is_integer()
    ):
        return [poly(int(value.reshape(())))]
    return follower.sizes(value)


@rule("Range")
def range_of(follower: Follower, node: Node, values: list[Any]) -> list[Any]:
    """Indices; along a followed dimension when they count from zero to its size."""
    found = [_counted(follower, value) for value in values]
    if any(each is None or len(each) != 1 for each in found):
        tensors = [follower.tensor(value) for value in values]
        marked = taint_of(*tensors)
        if marked is not None:
            raise Mixing(marked.axis, "its length is computed in a way that is not followed")
        return [Tensor((plain(follower.fresh("range")),), fed=any(t.fed for t in tensors))]
    start, limit, delta = (each[0] for each in found if each is not None)
    if start == poly(0) and delta == ONE:
        axes = made(follower, [limit])
        dim = axes[0][0].dim
        if dim is not None:  # its first element is zero
            state = replace(GARBAGE, live=(point(np.int64(0)),) * ONE_AND_OTHER)
            axes = ((replace(axes[0][0], state=state),),)
        return [Tensor(axes, None if dim is None else ("iota", dim), fed=False)]
    count = (limit - start).divide(delta) if delta.constant() else None
    if (start.symbols() | limit.symbols() | delta.symbols()) & follower.dims.keys():
        raise Mixing(
            min((start.symbols() | limit.symbols() | delta.symbols()) & follower.dims.keys()), "counts from its end"
        )
    return [Tensor((plain(follower.fresh("range") if count is None else count),), fed=False)]


@rule("Reshape")
def reshape(follower: Follower, node: Node, values: list[Any]) -> list[Any]:
    """Axes are merged and split as products of atoms."""
    tensor = follower.tensor(values[0])
    sizes = wanted_shape(follower, values[1], tensor)
    if sizes is None:
        rank = follower.tensor(values[1]).axes
        count = size_of(rank[0]).constant() if rank else None
        return [Tensor(None if count is None else tuple(plain(follower.fresh()) for _ in range(count)), fed=tensor.fed)]
    if tensor.axes is None:
        free = [s if s.constant() not in (0, -1) else follower.fresh("reshape") for s in sizes]
        return [Tensor(tuple(plain(s) for s in free), taint=tensor.taint, fed=tensor.fed)]
    axes = tensor.axes
    if not attribute(node, "allowzero", 0):
        sizes = [size_of(axes[i]) if s.constant() == 0 and i < len(axes) else s for i, s in enumerate(sizes)]
    out = regroup(follower, axes, _without_minus_one(follower, axes, sizes))
    return [keep(tensor, out)]


def _without_minus_one(follower: Follower, axes: Sequence[Axis], sizes: list[Poly]) -> list[Poly | None]:
    open_places = [index for index, each in enumerate(sizes) if each.constant() == -1]
    if not open_places:
        return list(sizes)
    total, used = ONE, ONE
    for axis in axes:
        total = total * size_of(axis)
    for index, each in enumerate(sizes):
        if index not in open_places:
            used = used * each
    rest = total.divide(used)
    out: list[Poly | None] = list(sizes)
    out[open_places[0]] = rest
    return out


def regroup(follower: Follower, axes: Sequence[Axis], sizes: Sequence[Poly | None]) -> list[Axis]:
    """The atoms of some axes in their order, cut into axes of other sizes.

    Raises:
        Mixing: A followed dimension would be cut within.
    """
    atoms = [atom for axis in axes for atom in axis if not (atom.dim is None and atom.size == ONE)]
    names = labels(axes)
    out: list[Axis] = []
    for place, wanted in enumerate(sizes):
        if wanted is None:
            if names:
                raise Undecided("its shape is computed in a way that is not followed")
            return [*out, *(plain(follower.fresh("reshape") if s is None else s) for s in sizes[place:])]
        held: list[Atom] = []
        room = wanted
        while room != ONE:
            if not atoms:
                break
            atom = atoms[0]
            rest = room.divide(atom.size)
            if rest is not None:
                held.append(atoms.pop(0))
                room = rest
                continue
            split = atom.size.divide(room) if atom.dim is None else None
            if split is None:
                break
            held.append(Atom(room))
            atoms[0] = Atom(split)
            room = ONE
        if room != ONE:
            if not names or not labels([tuple(held), tuple(atoms)]) and not labels(out):
                return [*out, *(plain(follower.fresh("reshape") if s is None else s) for s in sizes[place:])]
            _undecided_if_free([*atoms, *held], wanted)
            raise Mixing(min(names), f"it does not keep the axis together (to {wanted!r})")
        out.append(merged(held))
    if labels([tuple(atoms)]):
        _undecided_if_free(atoms, ONE)
        raise Mixing(min(labels([tuple(atoms)])), "it does not keep the axis together")
    return out


def _undecided_if_free(atoms: Sequence[Atom], wanted: Poly) -> None:
    """Sizes that only a call knows may still fit."""
    free = wanted.symbols().union(*(atom.size.symbols() for atom in atoms if atom.dim is None))
    if any("?" in name for name in free):
        raise Undecided(f"whether it keeps the axis together (to {wanted!r}) depends on sizes that only a call knows")


@rule("Flatten")
def flatten(follower: Follower, node: Node, values: list[Any]) -> list[Any]:
    """Two axes."""
    tensor = follower.tensor(values[0])
    axes = follower.ranked(tensor)
    at = int(attribute(node, "axis", 1))
    at = at + len(axes) if at < 0 else at
    parts = [merged([a for axis in part for a in axis]) for part in (axes[:at], axes[at:])]
    return [keep(tensor, parts)]


@rule("Transpose")
def transpose(follower: Follower, node: Node, values: list[Any]) -> list[Any]:
    """Axes in another order."""
    tensor = follower.tensor(values[0])
    axes = follower.ranked(tensor)
    order = attribute(node, "perm", tuple(reversed(range(len(axes)))))
    out = keep(tensor, [axes[i] for i in order])
    if tensor.content is not None and tensor.content[0] == "selected" and tuple(order) == (1, 0):
        out = replace(out, content=("selected", tensor.content[1], not tensor.content[2]))
    return [out]


@rule("Unsqueeze")
def unsqueeze(follower: Follower, node: Node, values: list[Any]) -> list[Any]:
    """New axes of one element."""
    tensor = follower.tensor(values[0])
    axes = list(follower.ranked(tensor))
    given = attribute(node, "axes", None)
    count = len(given) if given is not None else (values[1].size if isinstance(values[1], np.ndarray) else None)
    if count is None:
        raise Undecided("its axes are not known")
    for at in axes_of(node, values, len(axes) + count):
        axes.insert(at, plain(1))
    return [keep(tensor, axes)]


@rule("Squeeze")
def squeeze(follower: Follower, node: Node, values: list[Any]) -> list[Any]:
    """Axes of one element go; without `axes` all that have one."""
    tensor = follower.tensor(values[0])
    axes = follower.ranked(tensor)
    named = attribute(node, "axes", None) is not None or (len(values) > 1 and values[1] is not None)
    if named:
        chosen = axes_of(node, values, len(axes))
        for at in chosen:
            if labels([axes[at]]):
                raise Mixing(min(labels([axes[at]])), "takes it for an axis of one element")
    else:
        if tensor.dims:
            raise Mixing(min(tensor.dims), "drops it only when it has one element")
        if any(size_of(axis).constant() is None for axis in axes):
            return [Tensor(None, taint=tensor.taint, fed=tensor.fed)]
        chosen = tuple(i for i, axis in enumerate(axes) if is_unit(axis))
    return [keep(tensor, [axis for i, axis in enumerate(axes) if i not in chosen])]


@rule("Expand")
def expand(follower: Follower, node: Node, values: list[Any]) -> list[Any]:
    """Broadcasts to a shape."""
    tensor = follower.tensor(values[0])
    sizes = wanted_shape(follower, values[1], tensor)
    if sizes is None or tensor.axes is None:
        shape_axes = follower.tensor(values[1]).axes
        count = size_of(shape_axes[0]).constant() if shape_axes else None
        if count is None or tensor.axes is None or tensor.dims:
            if tensor.dims:
                raise Undecided("the shape is not known")
            return [Tensor(None, taint=tensor.taint, fed=tensor.fed)]
        rank = max(count, len(tensor.axes))
        return [Tensor(tuple(plain(follower.fresh("expand")) for _ in range(rank)), taint=tensor.taint, fed=tensor.fed)]
    rank = max(len(sizes), len(tensor.axes))
    sizes = [ONE] * (rank - len(sizes)) + sizes
    axes = [plain(1)] * (rank - len(tensor.axes)) + list(tensor.axes)
    scalar = values[0].reshape(()) if isinstance(values[0], np.ndarray) and values[0].size == 1 else None
    out: list[Axis] = []
    for axis, wanted in zip(axes, sizes, strict=True):
        if wanted == ONE or wanted == size_of(axis):
            out.append(axis)
        elif is_unit(axis):
            [new] = made(follower, [wanted])
            out.append(_filled([new], GARBAGE if scalar is None else everywhere(scalar))[0])
        elif labels([axis]) or wanted.symbols() & follower.dims.keys():
            raise Mixing(min(labels([axis]) or wanted.symbols() & follower.dims.keys()), "expands to another size")
        else:
            out.append(plain(wanted if wanted.constant() not in (None, 1) else size_of(axis)))
    if scalar is not None and not scalar.dtype.hasobject:
        tensor = replace(tensor, content=("everywhere", scalar))
    return [keep(tensor, out)]


@rule("Tile")
def tile(follower: Follower, node: Node, values: list[Any]) -> list[Any]:
    """Repeats along plain axes."""
    tensor = follower.tensor(values[0])
    axes = follower.ranked(tensor)
    repeats = follower.sizes(values[1])
    if repeats is None:
        raise Undecided("the repeats are not known")
    out: list[Axis] = []
    for axis, count in zip(axes, repeats, strict=True):
        if count == ONE:
            out.append(axis)
        elif is_unit(axis):
            out.extend(made(follower, [count]))
        elif labels([axis]) or count.symbols() & follower.dims.keys():
            if labels([axis]):
                raise Mixing(min(labels([axis])), "repeats it")
            [whole] = made(follower, [count])
            out.append(merged([*whole, *axis]))  # one whole after the other
        else:
            out.append(plain(size_of(axis) * count))
    return [keep(tensor, out)]


# --- parts ------------------------------------------------------------------------------------------------------------


@rule("Concat")
def concat(follower: Follower, node: Node, values: list[Any]) -> list[Any]:
    """Joins along a plain axis; the others must be the same dimensions."""
    originals = [follower.tensor(v) for v in values]
    groups = [list(follower.ranked(t)) for t in originals]
    at = int(attribute(node, "axis", 0)) % len(groups[0])
    marked = [axes[at] for axes in groups if labels([axes[at]])]
    if marked:
        raise Mixing(min(labels(marked)), "joins pieces along it, so that padding stands between them")
    out: list[Axis] = []
    for index in range(len(groups[0])):
        held = [axes[index] for axes in groups]
        if index == at:
            total = poly(0)
            for axis in held:
                total = total + size_of(axis)
            out.append(plain(total))
        else:
            out.append(_same_axis(held))
    columns = [t.content[1] if t.content is not None and t.content[0] == "iota" else None for t in originals]
    if at == len(out) - 1 and any(columns) and all(is_unit(axes[at]) for axes in groups):
        content = ("columns", tuple(columns))
        return [Tensor(tuple(out), content, taint_of(*originals), any(t.fed for t in originals))]
    tensors = [follower.as_data(t) for t in originals]
    return [Tensor(tuple(out), None, taint_of(*tensors), any(t.fed for t in tensors))]


def _same_axis(held: Sequence[Axis]) -> Axis:
    marked = [axis for axis in held if labels([axis])]
    if not marked:
        return next((a for a in held if size_of(a).constant() is not None), held[0])
    if any(shape_key(axis) != shape_key(marked[0]) for axis in held):
        raise Mixing(min(labels(marked)), "joins it with an axis that is not the same dimension")
    return tuple(
        a if a.dim is None else replace(a, state=joined([axis[i].state for axis in held]))
        for i, a in enumerate(marked[0])
    )


@rule("Split")
def split(follower: Follower, node: Node, values: list[Any]) -> list[Any]:
    """Cuts a plain axis."""
    tensor = follower.as_data(follower.tensor(values[0]))
    axes = follower.ranked(tensor)
    at = int(attribute(node, "axis", 0)) % len(axes)
    if labels([axes[at]]):
        raise Mixing(min(labels([axes[at]])), "cuts it into pieces")
    sizes = attribute(node, "split", None)
    if sizes is None and len(values) > 1 and values[1] is not None:
        sizes = follower.sizes(values[1])
    whole = size_of(axes[at])
    if sizes is None:
        each = whole.divide(poly(len(node.outputs)))
        sizes = [follower.fresh("split") if each is None else each for _ in node.outputs]
    return [replace(tensor, axes=(*axes[:at], plain(s), *axes[at + 1 :])) for s in sizes]


@rule("Slice")
def slice_of(follower: Follower, node: Node, values: list[Any]) -> list[Any]:
    """Part of some axes; of a followed one all of it, or its first element."""
    tensor = follower.tensor(values[0])
    axes = list(follower.ranked(tensor))
    if node.opset < 10:
        starts, ends = ([poly(int(v)) for v in attribute(node, name, ())] for name in ("starts", "ends"))
        chosen = attribute(node, "axes", range(len(starts)))
        steps = [ONE] * len(starts)
    else:
        found = [follower.sizes(v) if v is not None else None for v in (*values[1:], None, None)][:4]
        if found[0] is None or found[1] is None:
            if tensor.dims or any(follower.tensor(v).taint for v in values[1:] if v is not None):
                raise Mixing(min(tensor.dims or {self_axis(follower, values)}), "where it is cut is not known")
            cut = _known_axes(values, len(axes))
            return [keep(tensor, [plain(follower.fresh("slice")) if i in cut else a for i, a in enumerate(axes)])]
        starts, ends = found[0], found[1]
        if found[2] is None and len(values) > 3 and values[3] is not None:
            raise Undecided("its axes are not known")
        chosen = range(len(starts)) if found[2] is None else [int(a.constant() or 0) for a in found[2]]
        steps = [ONE] * len(starts) if found[3] is None else found[3]
    for at, start, end, step in zip(chosen, starts, ends, steps, strict=True):
        axes[at] = _sliced(follower, axes[at], start, end, step)
    return [replace(follower.as_data(tensor), axes=tuple(axes)) if tensor.content is None else keep(tensor, axes)]


def self_axis(follower: Follower, values: Sequence[Any]) -> str:
    """The dimension of the first taint among some values."""
    return next(t.axis for v in values if v is not None and (t := follower.tensor(v).taint) is not None)


def _known_axes(values: Sequence[Any], rank: int) -> set[int]:
    if len(values) > 3 and isinstance(values[3], np.ndarray):
        return {int(a) % rank for a in values[3].reshape(-1)}
    return set(range(rank))


def _sliced(follower: Follower, axis: Axis, start: Poly, end: Poly, step: Poly) -> Axis:
    whole = size_of(axis)
    far = end.constant()
    everything = start == poly(0) and step == ONE and (end == whole or (far is not None and far >= FAR))
    if everything:
        return axis
    followed = labels([axis])
    if followed:
        name = min(followed)
        first = start == poly(0) and step == ONE and end == ONE
        if first and follower.kind(name) == "padded" and len(axis) == 1:
            return plain(1)
        raise Mixing(name, "takes a part of it that depends on where it ends")
    inside = end.symbols() & follower.dims.keys()
    if inside:
        name = min(inside)
        size = whole.constant()
        most = follower.dims[name].largest
        if start == poly(0) and step == ONE and end == Poly.symbol(name) and size is not None:
            if most is None or most > size:
                raise Mixing(
                    name, f"takes that many of {size} elements, so sizes above {size} are not possible: say buckets"
                )
            return (Atom(end, name),)
        raise Mixing(name, "takes a part of an axis that depends on its size")
    if start.symbols() & follower.dims.keys():
        raise Mixing(min(start.symbols() & follower.dims.keys()), "takes a part of an axis that depends on its size")
    n, a, b, s = (each.constant() for each in (whole, start, end, step))
    if a is None or b is None or s is None:
        return plain(follower.fresh("slice"))
    if n is not None:
        return plain(len(range(n)[slice(a, b, s)]))
    if s == 1 and a >= 0 and b >= FAR:
        return plain(whole - poly(a))
    if s == 1 and a >= 0 > b:
        return plain(whole - poly(a) + poly(b))
    return plain(whole if s == -1 and a == -1 and b <= -(FAR) else follower.fresh("slice"))


@rule("Pad")
def pad(follower: Follower, node: Node, values: list[Any]) -> list[Any]:
    """Adds to plain axes."""
    tensor = follower.as_data(follower.tensor(values[0]))
    axes = list(follower.ranked(tensor))
    amounts: Any = attribute(node, "pads", None)
    if amounts is None and len(values) > 1:
        amounts = follower.sizes(values[1])
    if amounts is None:
        raise Undecided("how much it adds is not known")
    amounts = [poly(a) for a in amounts]
    chosen = list(range(len(axes)))
    if len(values) > 3 and values[3] is not None:
        chosen = [int(a.constant() or 0) % len(axes) for a in follower.sizes(values[3]) or ()]
    count = len(amounts) // 2
    for place, at in enumerate(chosen[:count]):
        before, after = amounts[place], amounts[place + count]
        if before == after == poly(0):
            continue
        if labels([axes[at]]) or (before.symbols() | after.symbols()) & follower.dims.keys():
            name = min(labels([axes[at]]) or (before.symbols() | after.symbols()) & follower.dims.keys())
            raise Mixing(name, "adds elements behind or before it")
        axes[at] = plain(size_of(axes[at]) + before + after)
    return [replace(tensor, axes=tuple(unsure(axis) for axis in axes))]


@rule("Trilu")
def triangle(follower: Follower, node: Node, values: list[Any]) -> list[Any]:
    """Zero on one side of the diagonal: an element depends on its own place."""
    tensor = follower.as_data(follower.tensor(values[0]))
    axes = follower.ranked(tensor)
    batch = follower.batch(axes[-2:])
    if batch is not None:
        raise Mixing(batch, "depends on a row's place in the batch")
    if len(values) > 1 and values[1] is not None and not isinstance(values[1], np.ndarray) and tensor.dims:
        raise Mixing(min(tensor.dims), "its diagonal depends on sizes")
    out = [tuple(a if a.dim is None else Atom(a.size, a.dim, loosened(a.state, 0.0)) for a in axis) for axis in axes]
    diagonal = (
        int(values[1].reshape(()))
        if len(values) > 1 and isinstance(values[1], np.ndarray)
        else 0
        if len(values) < 2 or values[1] is None
        else None
    )
    upper = bool(attribute(node, "upper", 1))
    if diagonal is not None and (diagonal > 0 if upper else diagonal >= 0):  # the first column is out of it, or in it
        zero = (point(np.float32(0)),) * ONE_AND_OTHER
        out[-1] = tuple(
            b if b.dim is None else replace(b, state=replace(b.state, live=zero if upper else a.state.live))
            for a, b in zip(axes[-1], out[-1], strict=True)
        )
    return [replace(tensor, axes=tuple(out))]
