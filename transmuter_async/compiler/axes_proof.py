"""The proof that padding a graph's dimensions, and stacking rows, changes no result: one walk of a `Follower`, judged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from transmuter_async.compiler.axes import Atom, Axis, Dim, Follower, Mask, Mixes, Tensor, constant, declared, labels
from transmuter_async.compiler.axes_live import SCORE, UNKNOWN, point
from transmuter_async.compiler.axes_rewrite import Born, lengths_below
from transmuter_async.compiler.sizes import Poly, Sizes, object_array
from transmuter_async.graph import Graph, TensorType, Value

if TYPE_CHECKING:
    from transmuter_async.compiler.batching import Batching

__all__ = ["Proof", "prove", "shape_of"]


@dataclass(frozen=True, slots=True)
class Proof:
    """What following the axes found.

    Attributes:
        mixes: Operators that mix rows or read padding; empty: outputs cut to their true length are right.
        undecided: Whether it depends on sizes that only a call knows.
        unmasked: Inputs of which each row must hold something else than padding somewhere; True: at its front.
        outputs: For each output its axes as `(dimension, size)` factors; empty where no followed dimension is in it, None
            where it could not be followed.
        lengths: Inputs of which no element may be above the size of a dimension.
        ones: Inputs of which each row must hold a 1, or where it is no mask of truth values, a score that counts.
        masks: Padding that has to be put back to a value before a node reads it.
        unborn: Dimensions that are none, and why.
    """

    mixes: tuple[Mixes, ...]
    undecided: bool
    unmasked: Mapping[str, bool]
    outputs: Mapping[str, tuple[tuple[tuple[str | None, Poly], ...], ...] | None]
    lengths: Mapping[str, str] = field(default_factory=dict)
    ones: frozenset[str] = frozenset()
    masks: tuple[Mask, ...] = ()
    unborn: Mapping[str, str] = field(default_factory=dict)


def shape_of(value: Value) -> tuple[Any, ...] | None:
    """The declared shape of a tensor, None where there is none."""
    return value.type.shape if isinstance(value.type, TensorType) else None


def prove(
    graph: Graph,
    dims: Sequence[Dim],
    places: Mapping[str, Mapping[int, str]],
    batching: Batching,
    born: Sequence[Born] = (),
    *,
    watched: bool = False,
    shapes: Mapping[str, Sequence[int | None]] | None = None,
    values: Mapping[str, np.ndarray] | None = None,
) -> Proof:
    """Follow dimensions through a graph.

    Args:
        graph: As it was prepared, without nodes for padding.
        dims: Those to follow.
        places: Where the inputs carry them.
        batching: Says what stands on the padding.
        born: Those of which the size is an integer of the graph.
        watched: Whether an alarm rings for NaN and infinity.
        shapes: Sizes of the axes that are not followed, of one call; None follows them as symbols.
        values: Inputs whose value is known, of one call.

    Returns:
        What was found, also where it speaks against padding: the caller judges `Proof.mixes`.
    """
    made = {each.tensor: each.dim for each in born if not each.given}
    given_sizes = {each.tensor: each.dim for each in born if each.given}
    follower = Follower(dims, born=made, atmost=lengths_below(graph, born), watched=watched)
    fills = dict(batching.pad)
    kinds = {dim.name: dim.kind for dim in dims}
    inputs: dict[str, Any] = {}
    for value in graph.inputs:
        shape = shape_of(value)
        if shape is None:
            inputs[value.name] = Tensor(None)
            continue
        assert isinstance(value.type, TensorType)
        fill = 0 if value.name in batching.mask else fills.get(value.name, 0)
        dtype = value.type.dtype
        state = constant(np.asarray(fill) if dtype is None or dtype.hasobject else np.asarray(fill).astype(dtype))
        truths = value.name in batching.mask or state.value.dtype.kind in "iub"
        live = (
            (point(np.ones((), state.value.dtype)), ("other", state.value.reshape(()))) if truths else (SCORE, UNKNOWN)
        )
        state = replace(state, source=frozenset({value.name}), live=live)
        given: list[Any] = []
        for at, _ in enumerate(shape):
            dim = places.get(value.name, {}).get(at)
            if dim is not None:
                atom = Atom(Poly.symbol(dim), dim)
                given.append(
                    atom if kinds[dim] == "batch" or state.value.dtype.hasobject else Atom(atom.size, dim, state)
                )
            else:
                size = None if shapes is None or value.name not in shapes else shapes[value.name][at]
                given.append(None if size is None else Poly({(): size}))
        made_input = declared(value.type, given, follower.fresh)
        if made_input.kind == "i" and not follower.padded(made_input.axes or ()):
            made_input = replace(made_input, content=("number", value.name))
        inputs[value.name] = made_input
        if value.name in given_sizes:
            symbol = Poly.symbol(given_sizes[value.name])
            inputs[value.name] = Sizes(object_array([symbol], tuple(int(n) for n in shape if isinstance(n, int))))
    follower.follow(graph, {**inputs, **(values or {})})
    outputs = {value.name: _judge(follower, graph, value.name) for value in graph.outputs}
    return Proof(
        tuple(follower.mixes),
        shapes is None and follower.undecided,
        {name: front or follower.crossed for name, front in follower.unmasked.items()},
        outputs,
        dict(follower.lengths),
        follower.ones,
        tuple(follower.put_back.values()),
        dict(follower.unborn),
    )


def _judge(follower: Follower, graph: Graph, name: str) -> Any:
    """An output's axes; a taint that reaches it counts as mixing."""
    value = follower.read(name)
    if isinstance(value, Sizes):
        follower.node = next((node for node in graph.nodes if name in node.outputs), None)
        value = follower.tensor(value)
    if not isinstance(value, Tensor):
        return None
    tensor = follower.as_data(value)
    if tensor.taint is not None and tensor.taint not in follower.mixes:
        follower.mixes.append(tensor.taint)
    if tensor.axes is None:
        return None
    if not labels(tensor.axes):
        return ()
    return tuple(_plain_axis(axis) for axis in tensor.axes)


def _plain_axis(axis: Axis) -> tuple[tuple[str | None, Poly], ...]:
    return tuple((atom.dim, atom.size) for atom in axis)
