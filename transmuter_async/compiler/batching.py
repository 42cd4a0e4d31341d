"""Buckets: calls of any length run a bounded number of programs, and give what they would give without padding.

`Batching` says which dimensions may be padded, `plan_batching` proves that they may (see `axes`), `Plan` pads the inputs
of a call and cuts its outputs.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np

from transmuter_async.compiler.axes import Atom, Axis, Dim, Follower, Mixes, Tensor, constant, declared, labels
from transmuter_async.compiler.sizes import Poly, Sizes
from transmuter_async.errors import BatchingRefused, InputError
from transmuter_async.graph import Graph, TensorType, Value, aligned_empty

__all__ = ["Batching", "Cut", "Plan", "Proof", "plan_batching", "prove"]

BATCH = "batch"
"""Name of the batch dimension where it is given by input and axis."""


KEPT = 256
"""Proofs kept for different sizes of the axes that are not followed."""


@dataclass(frozen=True, slots=True, init=False)
class Batching:
    """Which dimension is the batch, which may be padded to which sizes, with what, and which input masks the padding.

    Dimensions are named as the graph's inputs name them; one without a name is called "INPUT:AXIS".

    Attributes:
        batch: The batch dimension's name, or its axis by input: `{"input": 0, "state": 1}` (then called "batch").
        buckets: Sizes by dimension, ascending. A call is padded to the smallest that holds it.
        pad: What stands on the padding, by input; 0 where nothing is said. Spare rows of a batch repeat the last row.
        mask: Inputs that are 0 on padding and 1 on data.
        allow_mixing: Pad although the graph mixes rows or reads padding; results then depend on it.

    Raises:
        ValueError: Buckets that are no positive sizes, or nothing to do.
    """

    batch: str | tuple[tuple[str, int], ...] | None
    buckets: tuple[tuple[str, tuple[int, ...]], ...]
    pad: tuple[tuple[str, Any], ...]
    mask: tuple[str, ...]
    allow_mixing: bool

    def __init__(
        self,
        batch: str | Mapping[str, int] | None = None,
        buckets: Mapping[str, Iterable[int]] | None = None,
        pad: Mapping[str, Any] | None = None,
        mask: str | Iterable[str] | None = None,
        allow_mixing: bool = False,
    ) -> None:
        held = []
        for name, sizes in sorted((buckets or {}).items()):
            chosen = tuple(sorted({int(size) for size in sizes}))
            if not chosen or chosen[0] < 1:
                raise ValueError(f"buckets of {name!r} are positive sizes, not {chosen}")
            held.append((name, chosen))
        if batch is None and not held:
            raise ValueError("Batching() says neither a batch nor buckets; leave it out, or name a dimension")
        place = tuple(sorted(batch.items())) if isinstance(batch, Mapping) else batch
        object.__setattr__(self, "batch", place)
        object.__setattr__(self, "buckets", tuple(held))
        object.__setattr__(self, "pad", tuple(sorted((pad or {}).items())))
        object.__setattr__(self, "mask", (mask,) if isinstance(mask, str) else tuple(mask or ()))
        object.__setattr__(self, "allow_mixing", bool(allow_mixing))


@dataclass(frozen=True, slots=True)
class Proof:
    """What following the axes found.

    Attributes:
        mixes: Operators that mix rows or read padding; empty: outputs cut to their true length are right.
        undecided: Whether it depends on sizes that only a call knows.
        unmasked: Inputs of which each row must hold something else than padding somewhere; True: at its front.
        outputs: For each output its axes as `(dimension, size)` factors; None where nothing is followed.
    """

    mixes: tuple[Mixes, ...]
    undecided: bool
    unmasked: Mapping[str, bool]
    outputs: Mapping[str, tuple[tuple[tuple[str | None, Poly], ...], ...] | None]


@dataclass(slots=True)
class Plan:
    """How calls of one graph are padded and cut. Shared by threads; only its proofs change.

    Attributes:
        batching: As asked for.
        dims: The followed dimensions.
        places: For each input, the followed dimension by axis.
        mixes: Operators that mix although `allow_mixing` insists.
    """

    graph: Graph
    batching: Batching
    dims: tuple[Dim, ...]
    places: Mapping[str, Mapping[int, str]]
    proof: Proof
    mixes: tuple[Mixes, ...] = ()
    _proofs: dict[Any, Proof] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def batch(self) -> str | None:
        """Name of the batch dimension."""
        return next((dim.name for dim in self.dims if dim.kind == "batch"), None)

    def describe(self) -> str:
        """In words, for `explain`."""
        buckets = dict(self.batching.buckets)
        parts = [f"{d.name} to {', '.join(map(str, buckets[d.name]))}" for d in self.dims if d.name in buckets]
        rows = "" if self.batch is None else f" Rows along {self.batch}"
        if self.batch is not None:
            rows += " are independent." if not self.mixes else " are mixed."
        sure = "proved at each call's sizes" if self.proof.undecided else "not safe" if self.mixes else "proved safe"
        return (f"Padded: {'; '.join(parts)} ({sure})." if parts else f"Nothing is padded ({sure}).") + rows

    def sizes(self, inputs: Mapping[str, Any], *, split: bool = False) -> dict[str, int]:
        """The true size of each followed dimension.

        Args:
            inputs: Of a call.
            split: Whoever asks splits a batch that is too large, so it may be.

        Raises:
            InputError: Inputs disagree on one, or one is longer than its largest bucket.
        """
        found: dict[str, tuple[int, str]] = {}
        for name, places in self.places.items():
            value = inputs.get(name)
            if value is None:
                continue
            for at, dim in places.items():
                size = int(value.shape[at])
                known = found.setdefault(dim, (size, name))
                if known[0] != size:
                    raise InputError(
                        f"inputs disagree on {dim!r}: {known[1]!r} has {known[0]}, {name!r} has {size} on axis {at}"
                    )
        buckets = dict(self.batching.buckets)
        for dim, (size, name) in found.items():
            if dim in buckets and size > buckets[dim][-1] and not (split and dim == self.batch):
                raise InputError(
                    f"{name!r} has {size} along {dim!r}, more than the largest bucket {buckets[dim][-1]}; "
                    f"send less at once, or add a bucket: Batching(buckets={{{dim!r}: [..., {size}]}})"
                )
        return {dim: size for dim, (size, _) in found.items()}

    def targets(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """The size that each followed dimension is padded to. An empty dimension makes all stay as they are."""
        if any(size == 0 for size in sizes.values()):
            return dict(sizes)
        buckets = dict(self.batching.buckets)
        return {
            dim: next((b for b in buckets.get(dim, ()) if b >= size), size) for dim, size in sizes.items()
        }

    def pad(self, inputs: Mapping[str, Any]) -> tuple[dict[str, Any], Cut | None]:
        """A call's inputs padded to their buckets, and how to cut its outputs (None: nothing was padded).

        Raises:
            InputError: Too long, sizes disagree, or a row is masked everywhere where the proof needs one that is not.
            BatchingRefused: At these sizes the graph mixes; which it does only now became clear.
        """
        sizes = self.sizes(inputs)
        targets = self.targets(sizes)
        if sizes == targets:
            return dict(inputs), None
        proof = self.settled(inputs)
        padded = dict(inputs)
        for name, places in self.places.items():
            value = inputs.get(name)
            if value is not None:
                grown = {at: targets[dim] for at, dim in places.items()}
                rows = next((at for at, dim in places.items() if dim == self.batch), None)
                padded[name] = _padded(value, grown, self.fill(name), rows)
        return padded, Cut(proof, sizes, targets)

    def pad_samples(self, samples: Mapping[str, Any]) -> dict[str, Any]:
        """Arrays that stand for inputs, at their padded shapes."""
        targets = self.targets(self.sizes(samples))
        padded = dict(samples)
        for name, places in self.places.items():
            value = samples.get(name)
            if value is not None:
                shape = tuple(targets[places[at]] if at in places else n for at, n in enumerate(value.shape))
                padded[name] = value if shape == value.shape else np.broadcast_to(np.zeros((), value.dtype), shape)
        return padded

    def settled(self, inputs: Mapping[str, Any]) -> Proof:
        """The proof at the sizes of a call that is going to be padded, or to share a batch.

        Raises:
            InputError: A row is masked everywhere where the proof needs one that is not.
            BatchingRefused: At these sizes the graph mixes.
        """
        proof = self._settled(inputs)
        self._check_masks(proof.unmasked, inputs)
        return proof

    def fill(self, name: str) -> Any:
        """What stands on the padding of an input."""
        return 0 if name in self.batching.mask else dict(self.batching.pad).get(name, 0)

    def _settled(self, inputs: Mapping[str, Any]) -> Proof:
        if not self.proof.undecided:
            return self.proof
        free = {
            name: tuple(None if at in self.places.get(name, {}) else int(n) for at, n in enumerate(value.shape))
            for name, value in inputs.items()
            if hasattr(value, "shape")
        }
        proof = self._prove(tuple(sorted(free.items())), free, {})
        if proof.mixes:  # perhaps only in a branch that this call's values do not take (a sample rate)
            known = {name: np.asarray(value) for name, value in inputs.items() if self._decides(name, value)}
            if known:
                key = (tuple(sorted(free.items())), tuple((n, v.item()) for n, v in sorted(known.items())))
                proof = self._prove(key, free, known)
        if proof.mixes and not self.batching.allow_mixing:
            raise _refused(proof.mixes)
        return proof

    def _decides(self, name: str, value: Any) -> bool:
        """Whether an input is one number that a condition may be about."""
        return name not in self.places and getattr(value, "size", 0) == 1 and value.dtype.kind in "iub"

    def _prove(self, key: Any, shapes: Mapping[str, Any], values: Mapping[str, np.ndarray]) -> Proof:
        with self._lock:
            proof = self._proofs.get(key)
        if proof is None:
            proof = prove(self.graph, self.dims, self.places, self.batching, shapes=shapes, values=values)
            with self._lock:
                if len(self._proofs) >= KEPT:
                    self._proofs.clear()
                self._proofs[key] = proof
                self.mixes = self.mixes or proof.mixes
        return proof

    def _check_masks(self, unmasked: Mapping[str, bool], inputs: Mapping[str, Any]) -> None:
        for name, at_front in unmasked.items():
            value = inputs.get(name)
            along = tuple(at for at, dim in self.places.get(name, {}).items() if dim != self.batch)
            if value is None or not along:
                continue
            fill = self.fill(name)
            data = np.asarray(value) != fill
            if at_front:
                data = data[tuple(slice(0, 1) if at in along else slice(None) for at in range(data.ndim))]
            if not data.any(axis=along).all():
                where = "starts with" if at_front else "holds nothing but"
                raise InputError(
                    f"a row of {name!r} {where} {fill}, which stands for padding: its result would depend on how much is "
                    "padded. Put the data first in each row, and leave out rows without any."
                )


@dataclass(frozen=True, slots=True)
class Cut:
    """How a padded call's outputs become what it would give without padding.

    Attributes:
        proof: Says where the outputs carry the followed dimensions.
        sizes: The true ones.
        targets: The padded ones.
        starts: Where the data begins, by dimension; at the front where nothing is said. Of one row among several.
    """

    proof: Proof
    sizes: Mapping[str, int]
    targets: Mapping[str, int]
    starts: Mapping[str, int] = field(default_factory=dict)

    def output(self, name: str, value: Any) -> Any:
        """The part of an output that belongs to the data; a view where one axis is cut."""
        axes = self.proof.outputs.get(name)
        if axes is None or not hasattr(value, "shape") or len(axes) != len(value.shape):
            return value
        factors: list[int] = []
        kept: list[int] = []
        for axis, size in zip(axes, value.shape, strict=True):
            outer, inner = _factors(axis, int(size), self.sizes, self.targets)
            factors.extend(outer)
            kept.extend(inner)
        if factors == kept:
            return value
        shape: list[int] = []
        place = 0
        for axis in axes:
            shape.append(math.prod(kept[place : place + len(axis)]))
            place += len(axis)
        begins = [0 if dim is None else self.starts.get(dim, 0) for axis in axes for dim, _ in axis]
        cut = value.reshape(factors)[tuple(slice(at, at + n) for at, n in zip(begins, kept, strict=True))]
        return cut.reshape(shape)

    def joined(self, name: str, values: Sequence[Any], dim: str, counts: Sequence[int]) -> Any:
        """One output from those of parts that were cut along `dim`, whose sizes are `counts`; the first where none has it."""
        axes = self.proof.outputs.get(name)
        names = [] if axes is None else [each for axis in axes for each, _ in axis]
        if axes is None or dim not in names or len(axes) != len(values[0].shape):
            return values[0]
        split = []
        for value, count in zip(values, counts, strict=True):
            sizes = {**self.sizes, dim: count}
            flat: list[int] = []
            for axis, size in zip(axes, value.shape, strict=True):
                flat.extend(_factors(axis, int(size), sizes, sizes)[0])
            split.append(value.reshape(flat))
        whole = np.concatenate(split, axis=names.index(dim))
        shape: list[int] = []
        place = 0
        for axis in axes:
            shape.append(math.prod(whole.shape[place : place + len(axis)]))
            place += len(axis)
        return whole.reshape(shape)


def _factors(
    axis: Sequence[tuple[str | None, Poly]], size: int, sizes: Mapping[str, int], targets: Mapping[str, int]
) -> tuple[list[int], list[int]]:
    """The factors of an axis of this size, padded and true. One plain factor may be of unknown size."""
    if not any(dim in targets for dim, _ in axis):
        return [size, *[1] * (len(axis) - 1)], [size, *[1] * (len(axis) - 1)]
    outer = [targets[dim] if dim is not None else factor.constant() for dim, factor in axis]
    known = math.prod(n for n in outer if n is not None)
    filled = [size // known if n is None else n for n in outer]
    return filled, [n if dim is None else sizes[dim] for n, (dim, _) in zip(filled, axis, strict=True)]


def _padded(value: Any, grown: Mapping[int, int], fill: Any, rows: int | None) -> Any:
    """An array grown along some axes, in aligned memory of its own. Spare rows along `rows` repeat the last one."""
    shape = tuple(grown.get(at, int(n)) for at, n in enumerate(value.shape))
    if shape == tuple(value.shape):
        return value
    array = np.asarray(value) if isinstance(value, jax.Array) else value
    if array.dtype == object:
        out = np.empty(shape, object)
    else:
        out = aligned_empty(math.prod(shape), array.dtype).reshape(shape)
    out[...] = np.asarray(fill).astype(array.dtype)
    out[tuple(slice(n) for n in array.shape)] = array
    if rows is not None and array.shape[rows] < shape[rows]:
        last = array.shape[rows] - 1
        behind = [slice(None)] * len(shape)
        behind[rows] = slice(last + 1, None)
        source = [slice(None)] * len(shape)
        source[rows] = slice(last, last + 1)
        out[tuple(behind)] = out[tuple(source)]
    return out


# --- the proof --------------------------------------------------------------------------------------------------------


def plan_batching(graph: Graph, batching: Batching) -> Plan:
    """Find the named dimensions and prove that padding them, and stacking rows, changes nothing.

    Raises:
        InputError: Names that the graph's inputs do not have.
        BatchingRefused: An operator mixes rows or reads padding, and `allow_mixing` does not insist; all are named.
    """
    dims, places = _dimensions(graph, batching)
    proof = prove(graph, dims, places, batching)
    if proof.mixes and not proof.undecided and not batching.allow_mixing:
        raise _refused(proof.mixes)
    return Plan(graph, batching, dims, places, proof, () if proof.undecided else proof.mixes)


def _refused(mixes: Sequence[Mixes]) -> BatchingRefused:
    shown = "; ".join(map(str, mixes[:8]))
    more = f"; and {len(mixes) - 8} more" if len(mixes) > 8 else ""
    return BatchingRefused(
        f"results would depend on the padding or on the other rows of a batch: {shown}{more}. "
        "Name the input that masks the padding (mask=), leave the dimension out, or insist with allow_mixing=True.",
        mixes=tuple(mixes),
    )


def _dimensions(graph: Graph, batching: Batching) -> tuple[tuple[Dim, ...], dict[str, dict[int, str]]]:
    inputs = {value.name: value for value in graph.inputs}
    buckets = dict(batching.buckets)
    largest = {name: sizes[-1] for name, sizes in buckets.items()}
    batch = BATCH if isinstance(batching.batch, tuple) else batching.batch
    wanted = {name for name in (batch, *buckets) if name is not None}
    places: dict[str, dict[int, str]] = {}
    seen: set[str] = set()
    given = dict(batching.batch) if isinstance(batching.batch, tuple) else {}
    problems = [f"batch names {name!r}, which is no input" for name in given if name not in inputs]
    problems += [f"mask {name!r} is no input" for name in batching.mask if name not in inputs]
    problems += [f"pad names {name!r}, which is no input" for name, _ in batching.pad if name not in inputs]
    for name, value in inputs.items():
        shape = _shape(value)
        for at, dim in enumerate(shape or ()):
            label = BATCH if given.get(name) == at else next((w for w in (dim, f"{name}:{at}") if w in wanted), None)
            if isinstance(label, str) and not (given and label == BATCH and given.get(name) != at):
                if isinstance(dim, int):
                    problems.append(f"axis {at} of {name!r} has the fixed size {dim}, so it is no {label!r}")
                places.setdefault(name, {})[at] = label
                seen.add(label)
        if name in given and (shape is None or not -1 < given[name] < len(shape)):
            problems.append(f"{name!r} has no axis {given[name]}")
    problems += [f"no input has a dimension {name!r}" for name in sorted(wanted - seen)]
    if problems:
        have = sorted({str(d) for v in inputs.values() for d in _shape(v) or () if isinstance(d, str)})
        raise InputError(
            f"the batching does not fit the graph: {'; '.join(problems)}. Its inputs name the dimensions {have}; "
            'one without a name is called "INPUT:AXIS"'
        )
    dims = [Dim(name, "batch" if name == batch else "padded", largest.get(name)) for name in sorted(wanted)]
    return tuple(dims), places


def _shape(value: Value) -> tuple[Any, ...] | None:
    return value.type.shape if isinstance(value.type, TensorType) else None


def prove(
    graph: Graph,
    dims: Sequence[Dim],
    places: Mapping[str, Mapping[int, str]],
    batching: Batching,
    *,
    shapes: Mapping[str, Sequence[int | None]] | None = None,
    values: Mapping[str, np.ndarray] | None = None,
) -> Proof:
    """Follow dimensions through a graph.

    Args:
        dims: Those to follow.
        places: Where the inputs carry them.
        batching: Says what stands on the padding.
        shapes: Sizes of the axes that are not followed, of one call; None follows them as symbols.
        values: Inputs whose value is known, of one call.
    """
    follower = Follower(dims)
    fills = dict(batching.pad)
    kinds = {dim.name: dim.kind for dim in dims}
    inputs: dict[str, Any] = {}
    for value in graph.inputs:
        shape = _shape(value)
        if shape is None:
            inputs[value.name] = Tensor(None)
            continue
        assert isinstance(value.type, TensorType)
        fill = 0 if value.name in batching.mask else fills.get(value.name, 0)
        dtype = value.type.dtype
        state = constant(np.asarray(fill) if dtype is None or dtype.hasobject else np.asarray(fill).astype(dtype))
        state = replace(state, source=frozenset({value.name}))
        given: list[Any] = []
        for at, _ in enumerate(shape):
            dim = places.get(value.name, {}).get(at)
            if dim is not None:
                atom = Atom(Poly.symbol(dim), dim)
                given.append(atom if kinds[dim] == "batch" or state.value.dtype.hasobject else Atom(atom.size, dim, state))
            else:
                size = None if shapes is None or value.name not in shapes else shapes[value.name][at]
                given.append(None if size is None else Poly({(): size}))
        inputs[value.name] = declared(value.type, given, follower.fresh)
    follower.follow(graph, {**inputs, **(values or {})})
    outputs = {value.name: _judge(follower, graph, value.name) for value in graph.outputs}
    return Proof(
        tuple(follower.mixes), shapes is None and follower.undecided, {name: front or follower.crossed for name, front in follower.unmasked.items()}, outputs
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
    if tensor.axes is None or not labels(tensor.axes):
        return None
    return tuple(_plain_axis(axis) for axis in tensor.axes)


def _plain_axis(axis: Axis) -> tuple[tuple[str | None, Poly], ...]:
    return tuple((atom.dim, atom.size) for atom in axis)
