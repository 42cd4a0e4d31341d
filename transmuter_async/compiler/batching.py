"""Buckets: calls of any length run a bounded number of programs, and give what they would give without padding.

`Batching` says which dimensions may be padded, `plan_batching` proves that they may (see `axes`), `Plan` pads the inputs
of a call and cuts its outputs.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np

from transmuter_async.compiler.axes import Dim, Mixes
from transmuter_async.compiler.axes_live import LEAST
from transmuter_async.compiler.axes_proof import Proof, prove, shape_of
from transmuter_async.compiler.axes_rewrite import Born, find_born, rewrite, size_name, true_name
from transmuter_async.compiler.sizes import Poly
from transmuter_async.errors import BatchingRefused, InputError
from transmuter_async.graph import Graph, aligned_empty

__all__ = ["Batching", "Cut", "Plan", "Proof", "padding_value", "plan_batching", "prove"]

BATCH = "batch"
"""Name of the batch dimension where it is given by input and axis."""


KEPT = 256
"""Proofs kept for different sizes of the axes that are not followed."""


@dataclass(frozen=True, slots=True, init=False)
class Batching:
    """Which dimension is the batch, which may be padded to which sizes, with what, and which input masks the padding.

    Dimensions are named as the graph's inputs name them; one without a name is called "INPUT:AXIS". One that arises inside
    of the graph has the name of the integer that is its size (a count, the limit of a Range), or of the Range's output.

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


@dataclass(slots=True)
class Plan:
    """How calls of one graph are padded and cut. Shared by threads; only its proofs change.

    Attributes:
        batching: As asked for.
        dims: The followed dimensions.
        places: For each input, the followed dimension by axis.
        born: Those of which the size is an integer of the graph.
        mixes: Operators that mix although `allow_mixing` insists.
        padded_graph: The graph that runs: beside its own nodes it has those that bring sizes to buckets and put padding
            back before windows. None: it needs none.
        watched: Whether an alarm rings for NaN and infinity.
    """

    graph: Graph
    batching: Batching
    dims: tuple[Dim, ...]
    places: Mapping[str, Mapping[int, str]]
    proof: Proof
    mixes: tuple[Mixes, ...] = ()
    born: tuple[Born, ...] = ()
    padded_graph: Graph | None = None
    watched: bool = False
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
        masked = sorted({mask.node for mask in self.proof.masks})
        if masked:
            rows += f" Padding is put back to zero before {len(masked)} nodes whose windows reach into it."
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
        for each in self.born:
            if each.given and each.tensor in inputs:
                found[each.dim] = (int(np.asarray(inputs[each.tensor]).reshape(-1)[0]), each.tensor)
        buckets = dict(self.batching.buckets)
        for dim, (size, name) in found.items():
            if dim in buckets and size > buckets[dim][-1] and not (split and dim == self.batch):
                raise InputError(
                    f"{name!r} {'is' if self._is_given(dim) else 'has'} {size} along {dim!r}, more than the largest bucket {buckets[dim][-1]}; "
                    f"send less at once, or add a bucket: Batching(buckets={{{dim!r}: [..., {size}]}})"
                )
        return {dim: size for dim, (size, _) in found.items()}

    def targets(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """The size that rows of several calls may be brought to, for each dimension.

        An empty dimension makes all stay as they are. So does one whose true size the program has to know: only `pad` brings
        it to a bucket, and rows that share a call must have the same.
        """
        buckets = dict(self.batching.buckets)
        if any(size <= 0 for size in sizes.values()):
            return dict(sizes)
        return {
            dim: size if dim in self._own else next((b for b in buckets.get(dim, ()) if b >= size), size)
            for dim, size in sizes.items()
        }

    @property
    def _own(self) -> frozenset[str]:
        """Dimensions whose true size the program reads."""
        return frozenset(mask.dim for mask in self.proof.masks) | {each.dim for each in self.born}

    def _programs(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """The size that each followed dimension has in the program that runs."""
        buckets, targets = dict(self.batching.buckets), self.targets(sizes)
        if any(size <= 0 for size in sizes.values()):
            return targets
        for dim in self._own & targets.keys():
            targets[dim] = next((b for b in buckets.get(dim, ()) if b >= sizes[dim]), sizes[dim])
        return targets

    @property
    def kept(self) -> frozenset[str]:
        """Values of the padded graph that are needed when its outputs are cut: the true sizes that it made."""
        return frozenset(true_name(each.tensor) for each in self.born if not each.given)

    def pad(self, inputs: Mapping[str, Any]) -> tuple[dict[str, Any], Cut | None]:
        """A call's inputs padded to their buckets, and how to cut its outputs (None: nothing was padded).

        Raises:
            InputError: Too long, sizes disagree, or a row is masked everywhere where the proof needs one that is not.
            BatchingRefused: At these sizes the graph mixes; which it does only now became clear.
        """
        sizes = self.sizes(inputs)
        targets = self._programs(sizes)
        made = tuple((each.dim, each.tensor) for each in self.born if not each.given)
        if not self._lengths_fit(self.proof, inputs, sizes):
            targets = dict(sizes)  # they speak of more than there is: nothing is padded
        if sizes == targets and not made:
            return self._with_sizes(dict(inputs), sizes, targets), None
        proof = self._settled(inputs) if sizes == targets else self.settled(inputs)
        padded = self._with_sizes(dict(inputs), sizes, targets)
        for name, places in self.places.items():
            value = inputs.get(name)
            if value is not None:
                grown = {at: targets[dim] for at, dim in places.items()}
                rows = next((at for at, dim in places.items() if dim == self.batch), None)
                padded[name] = _padded(value, grown, self.fill(name), rows)
        buckets = dict(self.batching.buckets)
        return padded, Cut(proof, sizes, targets, made=tuple((*each, buckets[each[0]]) for each in made))

    def _with_sizes(
        self, values: dict[str, Any], sizes: Mapping[str, int], targets: Mapping[str, int]
    ) -> dict[str, Any]:
        """What the padded graph reads beside its inputs: true sizes of dimensions. Sizes that the caller gives are padded."""
        given = {each.dim: each.tensor for each in self.born if each.given}
        for dim in {mask.dim for mask in self.proof.masks} & sizes.keys():
            values[true_name(given[dim]) if dim in given else size_name(dim)] = np.asarray(sizes[dim], np.int64)
        for dim in given.keys() & sizes.keys():
            held = np.asarray(values[given[dim]])
            values[given[dim]] = np.full(held.shape, targets[dim], held.dtype)
        return values

    def _is_given(self, name: str) -> bool:
        """Whether a dimension's size is an input; `name` is that of the dimension or of the input."""
        return any(each.given and name in (each.dim, each.tensor) for each in self.born)

    def _lengths_fit(self, proof: Proof, inputs: Mapping[str, Any], sizes: Mapping[str, int]) -> bool:
        """Whether lengths that the caller gives stay within the dimensions that they speak of."""
        return all(
            dim in sizes and bool((np.asarray(inputs[name]) <= sizes[dim]).all())
            for name, dim in proof.lengths.items()
            if inputs.get(name) is not None
        )

    def pad_samples(self, samples: Mapping[str, Any]) -> dict[str, Any]:
        """Arrays that stand for inputs, at their padded shapes."""
        sizes = self.sizes(samples)
        targets = self._programs(sizes)
        padded = self._with_sizes(dict(samples), sizes, targets)
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
        self._check_masks(proof, inputs)
        sizes = self.sizes(inputs, split=True)
        if not self._lengths_fit(proof, inputs, sizes):
            told = ", ".join(f"{name!r}: at most {sizes.get(dim)}" for name, dim in sorted(proof.lengths.items()))
            raise InputError(
                f"lengths speak of more than there is, and a mask is made of them; they fit up to ({told})"
            )
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
        late = tuple(
            Mixes(
                mask.node,
                mask.op_type,
                mask.dim,
                "its windows reach into the padding, which shows at this call's sizes only",
            )
            for mask in proof.masks
            if mask not in self.proof.masks
        )
        if (proof.mixes or late) and not self.batching.allow_mixing:
            raise _refused(proof.mixes + late)
        return proof

    def _decides(self, name: str, value: Any) -> bool:
        """Whether an input is one number that a condition may be about."""
        if name in self.places or self._is_given(name):
            return False
        return getattr(value, "size", 0) == 1 and value.dtype.kind in "iub"

    def _prove(self, key: Any, shapes: Mapping[str, Any], values: Mapping[str, np.ndarray]) -> Proof:
        with self._lock:
            proof = self._proofs.get(key)
        if proof is None:
            proof = prove(
                self.graph,
                self.dims,
                self.places,
                self.batching,
                self.born,
                watched=self.watched,
                shapes=shapes,
                values=values,
            )
            with self._lock:
                if len(self._proofs) >= KEPT:
                    self._proofs.clear()
                self._proofs[key] = proof
                self.mixes = self.mixes or proof.mixes
        return proof

    def _check_masks(self, proof: Proof, inputs: Mapping[str, Any]) -> None:
        for name, at_front in proof.unmasked.items():
            value = inputs.get(name)
            if name in proof.lengths and value is not None and bool((np.asarray(value) < 1).any()):
                raise InputError(
                    f"{name!r} holds a length below 1: nothing of that row is data, and its result would depend on how much "
                    "is padded. Leave out rows without data."
                )
            along = tuple(at for at, dim in self.places.get(name, {}).items() if dim != self.batch)
            if value is None or not along:
                continue
            fill = self.fill(name)
            data = np.asarray(value) != fill
            if name in proof.ones:
                truths = name in self.batching.mask or value.dtype.kind in "iub"
                data = np.asarray(value) == 1 if truths else np.asarray(value) > LEAST
            if at_front:
                data = data[tuple(slice(0, 1) if at in along else slice(None) for at in range(data.ndim))]
            if not data.any(axis=along).all():
                where = "starts with" if at_front else "holds nothing but"
                held = f"{fill}, or no 1," if name in proof.ones and not at_front else fill
                raise InputError(
                    f"a row of {name!r} {where} {held}, which stands for padding: its result would depend on how much is "
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
        made: Dimensions born inside, the integers that are their sizes, and their buckets.
    """

    proof: Proof
    sizes: Mapping[str, int]
    targets: Mapping[str, int]
    starts: Mapping[str, int] = field(default_factory=dict)
    made: tuple[tuple[str, str, tuple[int, ...]], ...] = ()

    def settled(self, read: Callable[[str], Any]) -> Cut:
        """The same with the sizes that the graph made.

        Args:
            read: Gives a value of the call by name.

        Raises:
            InputError: One is larger than its largest bucket.
        """
        if not self.made:
            return self
        sizes, targets = dict(self.sizes), dict(self.targets)
        for dim, tensor, buckets in self.made:
            size = int(np.asarray(read(true_name(tensor))).reshape(-1)[0])
            if size > buckets[-1]:
                raise InputError(
                    f"{tensor!r} is {size} in this call, more than the largest bucket {buckets[-1]} of {dim!r}; send less at "
                    f"once, or add a bucket: Batching(buckets={{{dim!r}: [..., {size}]}})"
                )
            sizes[dim], targets[dim] = size, next((b for b in buckets if b >= size), size) if size > 0 else size
        return replace(self, sizes=sizes, targets=targets, made=())

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
    outer = [targets.get(dim) if dim is not None else factor.constant() for dim, factor in axis]
    known = math.prod(n for n in outer if n is not None)
    filled = [size // known if n is None else n for n in outer]
    return filled, [n if dim is None else sizes[dim] for n, (dim, _) in zip(filled, axis, strict=True)]


def padding_value(fill: Any, dtype: Any) -> np.ndarray:
    """What stands on the padding, as one element of an array; in text where nothing was said, the empty one."""
    if np.dtype(dtype).hasobject and not isinstance(fill, str):
        return np.asarray("", object)
    return np.asarray(fill).astype(dtype)


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
    out[...] = padding_value(fill, array.dtype)
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


def plan_batching(graph: Graph, batching: Batching, *, watched: bool = False) -> Plan:
    """Find the named dimensions and prove that padding them, and stacking rows, changes nothing.

    Args:
        graph: After all passes.
        batching: As asked for.
        watched: Whether an alarm rings for NaN and infinity anywhere, padding included.

    Raises:
        InputError: Names that the graph's inputs do not have.
        BatchingRefused: An operator mixes rows or reads padding, and `allow_mixing` does not insist; all are named.
    """
    dims, places, born = _dimensions(graph, batching)
    proof = prove(graph, dims, places, batching, born, watched=watched)
    if proof.unborn:
        raise InputError(
            f"the batching does not fit the graph: {'; '.join(proof.unborn.values())}, so it is not the size of an axis that "
            f"can be padded. {_candidates(graph)}"
        )
    if proof.mixes and not proof.undecided and not batching.allow_mixing:
        raise _refused(proof.mixes)
    padded = rewrite(graph, born, dict(batching.buckets), proof.masks)
    mixes = () if proof.undecided else proof.mixes
    return Plan(graph, batching, dims, places, proof, mixes, born, None if padded is graph else padded, watched)


def _candidates(graph: Graph) -> str:
    """Integers inside of the graph that may bear a dimension."""
    limits = [node.inputs[1] for node in graph.nodes if node.op_type == "Range" and not node.domain]
    made = [name for name in dict.fromkeys(limits) if name not in graph.initializers]
    return (
        f"Limits of its Range nodes are {made[:8]}" if made else "No Range counts up to a size made inside of the graph"
    )


def _refused(mixes: Sequence[Mixes]) -> BatchingRefused:
    shown = "; ".join(map(str, mixes[:8]))
    more = f"; and {len(mixes) - 8} more" if len(mixes) > 8 else ""
    return BatchingRefused(
        f"results would depend on the padding or on the other rows of a batch: {shown}{more}. "
        "Name the input that masks the padding (mask=), leave the dimension out, or insist with allow_mixing=True.",
        mixes=tuple(mixes),
    )


def _dimensions(
    graph: Graph, batching: Batching
) -> tuple[tuple[Dim, ...], dict[str, dict[int, str]], tuple[Born, ...]]:
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
        shape = shape_of(value)
        for at, dim in enumerate(shape or ()):
            label = BATCH if given.get(name) == at else next((w for w in (dim, f"{name}:{at}") if w in wanted), None)
            if isinstance(label, str) and not (given and label == BATCH and given.get(name) != at):
                if isinstance(dim, int):
                    problems.append(f"axis {at} of {name!r} has the fixed size {dim}, so it is no {label!r}")
                places.setdefault(name, {})[at] = label
                seen.add(label)
        if name in given and (shape is None or not -1 < given[name] < len(shape)):
            problems.append(f"{name!r} has no axis {given[name]}")
    found = {name: find_born(graph, name) for name in sorted(wanted - seen) if name != batch}
    born = tuple(each for each in found.values() if each is not None)
    seen |= {each.dim for each in born}
    twice = {each.tensor for each in born if sum(each.tensor == other.tensor for other in born) > 1}
    problems += [f"two names stand for the size {tensor!r}" for tensor in sorted(twice)]
    problems += [f"no input has a dimension {name!r}" for name in sorted(wanted - seen)]
    if problems:
        have = sorted({str(d) for v in inputs.values() for d in shape_of(v) or () if isinstance(d, str)})
        raise InputError(
            f"the batching does not fit the graph: {'; '.join(problems)}. Its inputs name the dimensions {have}; "
            'one without a name is called "INPUT:AXIS". One that arises inside has the name of the integer that is its size. '
            f"{_candidates(graph)}"
        )
    dims = [Dim(name, "batch" if name == batch else "padded", largest.get(name)) for name in sorted(wanted)]
    return tuple(dims), places, born
