"""Requests into one batch, and its outputs back into answers: arrays in, arrays out, along the axis that was proved.

Rows are independent because the graph says so (`compiler` follows the batch through every operator), not because it is
hoped. A request joins others only where everything that is not a row is equal: dtypes, other dimensions, the bucket, and
the values of inputs without rows. A batch is built in memory of its own; an answer keeps nothing of its batch alive.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from operator import index
from typing import Any

import numpy as np

from transmuter_async.compiler import Batching, Cut, Plan, Prepared, Proof, describe_type, padding_value, plan_batching
from transmuter_async.errors import BatchingRefused, InputError
from transmuter_async.graph import Graph, TensorType, aligned_empty
from transmuter_async.serving.decisions import Limits

__all__ = ["Item", "Piece", "Rows", "allowed_sizes", "plan_rows"]

SHARED_BYTES = 1 << 16
"""An input without rows joins others by its value up to this size; a larger one is not compared, and runs alone."""

INLINE_BYTES = 1 << 18
"""What is copied for a batch on the loop, about 50 µs; more is copied in a thread."""

DEFAULT_BATCH = 32

_alone = itertools.count()


@dataclass(frozen=True, slots=True, eq=False)
class Item:
    """A request's inputs, checked, with all that decides whom it may join.

    Attributes:
        inputs: As the graph takes them.
        rows: How many; at least 1, so that an empty one counts.
        sizes: True sizes of the followed dimensions.
        targets: Sizes of all of them but the batch, as the batch is built. What they are padded to; the true ones where the
            program has to know them, and pads by itself.
        elements: Of one row after padding.
        key: Of the queue.
        bucket: The padded sizes in words, for events.
        proof: At this item's sizes.
        alone: Runs by itself, as it is.
    """

    inputs: Mapping[str, Any]
    rows: int
    sizes: Mapping[str, int]
    targets: Mapping[str, int]
    elements: int
    key: Hashable
    bucket: str
    proof: Proof
    alone: bool


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Rows `start` to `start + rows` of an item."""

    item: Item
    start: int
    rows: int


class Rows:
    """How requests of one model are joined and cut. Plain functions, safe in any thread."""

    def __init__(self, plan: Plan) -> None:
        assert plan.batch is not None
        self.plan = plan
        self.batch: str = plan.batch
        self._axes = {
            name: at for name, places in plan.places.items() for at, dim in places.items() if dim == self.batch
        }

    @property
    def slow(self) -> bool:
        """Whether admitting takes time: the proof is made for each new set of sizes."""
        return self.plan.proof.undecided

    def carries(self, name: str) -> bool:
        """Whether an input has rows."""
        return name in self._axes

    def admit(self, inputs: Mapping[str, Any]) -> Item:
        """What a request is, from inputs that fit the graph.

        Raises:
            InputError: Inputs disagree on a dimension, one is longer than the largest bucket, or a mask hides a whole row.
            BatchingRefused: At these sizes the graph mixes rows.
        """
        plan, batch = self.plan, self.batch
        sizes = plan.sizes(inputs, split=True)
        targets = plan.targets({dim: n for dim, n in sizes.items() if dim != batch})
        rows = sizes.get(batch, 1)
        bucket = ", ".join(f"{dim}={n}" for dim, n in sorted(targets.items()))
        fits = batch in sizes and 0 not in sizes.values() and plan._lengths_fit(plan.proof, inputs, sizes)
        key = self._key(inputs) if fits else None
        if key is None:
            key, alone, proof = ("alone", next(_alone)), True, plan.proof
        else:
            key, alone, proof = (bucket, key), False, plan.settled(inputs)
            if plan.proof.undecided:
                check_outputs(plan, proof)
        elements = math.prod(targets.values())
        return Item(inputs, max(1, rows), sizes, targets, elements, key, bucket, proof, alone)

    def _key(self, inputs: Mapping[str, Any]) -> Hashable:
        """What must be equal to share a batch; None for an input that can't be compared."""
        found: list[Hashable] = []
        for name, value in inputs.items():
            if value is None:
                found.append((name, None))
                continue
            if not hasattr(value, "shape"):
                return None  # a sequence or a map
            places = self.plan.places.get(name, {})
            if name in self._axes:
                shape = tuple(None if at in places else int(n) for at, n in enumerate(value.shape))
                found.append((name, value.dtype.char, shape))
            elif value.nbytes > SHARED_BYTES:
                return None
            else:
                array = np.asarray(value)
                held = tuple(array.reshape(-1).tolist()) if array.dtype.hasobject else array.tobytes()
                found.append((name, array.dtype.char, array.shape, held))
        return tuple(found)

    # Joining.

    def bytes(self, pieces: Sequence[Piece], program: int) -> int:
        """About how much is copied for a batch."""
        if self._whole(pieces, program):
            return 0
        item = pieces[0].item
        ratio = (
            program * item.elements / max(1, item.rows * math.prod(n for d, n in item.sizes.items() if d != self.batch))
        )
        return int(sum(item.inputs[name].nbytes for name in self._axes if name in item.inputs) * ratio)

    def _whole(self, pieces: Sequence[Piece], program: int) -> bool:
        """Whether the batch is one request as it came."""
        item = pieces[0].item
        return item.alone or (
            len(pieces) == 1
            and pieces[0].rows == item.rows == program
            and all(item.sizes[dim] == n for dim, n in item.targets.items())
        )

    def build(self, pieces: Sequence[Piece], program: int) -> Mapping[str, Any]:
        """The inputs of a batch of `program` rows: the pieces one after the other, each padded; the last row fills up."""
        first = pieces[0].item
        if self._whole(pieces, program):
            return first.inputs
        return {name: self._joined(name, value, pieces, program) for name, value in first.inputs.items()}

    def _joined(self, name: str, value: Any, pieces: Sequence[Piece], program: int) -> Any:
        at = self._axes.get(name)
        places = self.plan.places.get(name, {})
        targets = pieces[0].item.targets
        if value is None or not places:
            return value
        shape = [
            program if axis == at else targets.get(places.get(axis, ""), int(n)) for axis, n in enumerate(value.shape)
        ]
        out = _empty(shape, value.dtype)
        padded = any(
            piece.item.sizes[dim] != targets[dim] for piece in pieces for dim in places.values() if dim != self.batch
        )
        if padded:
            out[...] = padding_value(self.plan.fill(name), value.dtype)
        place = 0
        for piece in pieces if at is not None else pieces[:1]:
            rows = np.asarray(piece.item.inputs[name])
            if at is None:
                out[tuple(slice(n) for n in rows.shape)] = rows
                break
            source = [slice(None)] * rows.ndim
            source[at] = slice(piece.start, piece.start + piece.rows)
            rows = rows[tuple(source)]
            target = [slice(n) for n in rows.shape]
            target[at] = slice(place, place + piece.rows)
            out[tuple(target)] = rows
            place += piece.rows
        if at is not None and place < program:
            spare: list[Any] = [slice(None)] * out.ndim
            last: list[Any] = list(spare)
            spare[at] = slice(place, None)
            last[at] = slice(place - 1, place)
            out[tuple(spare)] = out[tuple(last)]
        return out

    def padding(self, pieces: Sequence[Piece], program: int) -> float:
        """Share of a batch's elements that is padding, spare rows included."""
        item = pieces[0].item
        if item.alone:
            return 0.0
        data = sum(
            piece.rows * math.prod(n for dim, n in piece.item.sizes.items() if dim != self.batch) for piece in pieces
        )
        return 1 - data / (program * item.elements)

    # Cutting.

    def cut(self, outputs: Mapping[str, Any], pieces: Sequence[Piece], program: int) -> list[dict[str, Any]]:
        """The outputs of each piece, read-only, in memory of their own."""
        if self._whole(pieces, program):
            return [dict(outputs)]
        answers = []
        place = 0
        for piece in pieces:
            cut = Cut(
                piece.item.proof,
                {**piece.item.sizes, self.batch: piece.rows},
                {**piece.item.targets, self.batch: program},
                {self.batch: place},
            )
            answers.append({name: _own(cut.output(name, value), value) for name, value in outputs.items()})
            place += piece.rows
        return answers

    def rejoin(self, item: Item, parts: Sequence[tuple[int, int, Mapping[str, Any]]]) -> dict[str, Any]:
        """One answer from those of an item's parts: `(start, rows, outputs)`, in any order."""
        ordered = sorted(parts, key=lambda part: part[0])
        if len(ordered) == 1:
            return dict(ordered[0][2])
        cut = Cut(item.proof, item.sizes, item.sizes)
        counts = [rows for _, rows, _ in ordered]
        joined = {
            name: cut.joined(name, [outputs[name] for _, _, outputs in ordered], self.batch, counts)
            for name in ordered[0][2]
        }
        for value in joined.values():
            _freeze(value)
        return joined


def _empty(shape: Sequence[int], dtype: Any) -> np.ndarray:
    if np.dtype(dtype).hasobject:
        return np.empty(shape, object)
    return aligned_empty(math.prod(shape), dtype).reshape(shape)


def _own(cut: Any, whole: Any) -> Any:
    """A part of an output that does not keep the whole batch alive."""
    if cut is whole or not isinstance(cut, np.ndarray):
        return cut
    own = np.array(cut)
    _freeze(own)
    return own


def _freeze(value: Any) -> None:
    if isinstance(value, np.ndarray):
        value.flags.writeable = False


# --- which axis, which sizes ------------------------------------------------------------------------------------------


def plan_rows(prepared: Prepared) -> Plan:
    """The proof that a model's rows are independent: that of `compile(batching=…)`, or one over the batch that names tell.

    Takes time: for a thread.

    Raises:
        InputError: No dimension of the inputs can be the batch; it must be told.
        BatchingRefused: The graph mixes rows, or an output can't be cut into them; operators and outputs are named.
    """
    plan = prepared.padding
    if plan is None or plan.batch is None:
        told = None if plan is None else plan.batching
        batch = _batch(prepared.graph)
        batching = Batching(
            batch,
            None if told is None else dict(told.buckets),
            None if told is None else dict(told.pad),
            None if told is None else told.mask,
            allow_mixing=told is not None and told.allow_mixing,
        )
        try:
            plan = plan_batching(prepared.graph, batching)
        except BatchingRefused as error:
            raise BatchingRefused(
                f"{error} The batch was taken to be {batch!r}, as the inputs name it; tell another one with "
                "compile(batching=Batching(batch=…))",
                mixes=error.mixes,
            ) from None
    born = sorted(each.dim for each in plan.born)
    if born:
        raise BatchingRefused(
            f"the sizes of {', '.join(map(repr, born))} arise inside of the graph, so the rows of a batch would share one and could "
            "not be cut apart. Call this model without serve"
        )
    if not plan.proof.undecided:
        check_outputs(plan, plan.proof)
    return plan


def _batch(graph: Graph) -> str | dict[str, int]:
    """The dimension that is the batch, as far as names and places tell."""
    shapes = {
        value.name: value.type.shape
        for value in graph.inputs
        if isinstance(value.type, TensorType) and value.type.shape
    }
    leading = [shape[0] for shape in shapes.values() if isinstance(shape[0], str)]
    if leading:
        carried = {name: sum(name in shape for shape in shapes.values()) for name in leading}
        return max(leading, key=lambda name: (carried[name], "batch" in name.lower()))
    unnamed = {name: 0 for name, shape in shapes.items() if shape[0] is None}
    if unnamed:
        return unnamed
    declared = ", ".join(f"{value.name}: {describe_type(value.type)}" for value in graph.inputs) or "no inputs"
    raise InputError(
        f"no input has an open first dimension, so nothing can be batched ({declared}). Name the batch, as in "
        'compile(batching=Batching(batch={"INPUT": AXIS})), or export the model with a dynamic batch'
    )


def needs_true_size(proof: Proof) -> bool:
    """Whether the program puts padding back to zero by the size of the call: then rows of one size only run together."""
    return bool(proof.masks)


def check_outputs(plan: Plan, proof: Proof) -> None:
    """Refuse outputs that rows can't be cut from.

    Raises:
        BatchingRefused: Naming them.
    """
    lost = [
        value.name
        for value in plan.graph.outputs
        if proof.outputs.get(value.name) is None or (value.type is not None and not isinstance(value.type, TensorType))
    ]
    if lost:
        raise BatchingRefused(
            f"the rows of {', '.join(map(repr, lost))} can't be told apart, so a batch could not be cut into answers. "
            "Leave the output out with compile(outputs=[…]), or call the model without serve"
        )


def allowed_sizes(
    asked: int | Sequence[int] | None, plan: Plan, *, max_padded: int | None, programs: int | None
) -> tuple[int, ...]:
    """The rows that programs are compiled for, ascending.

    A number gives the powers of two below it and itself; as many of them as there is room for programs, for each
    combination of buckets. A sequence is taken as it is.

    Args:
        asked: Rows of the largest batch, or the sizes; None: the largest bucket of the batch, else 32.
        plan: Its buckets of the batch dimension, if any, are the sizes that may be chosen.
        max_padded: As for `Limits`.
        programs: That the cache can hold; None for no limit.

    Raises:
        TypeError: No whole numbers.
        ValueError: No positive ones.
        InputError: They do not fit the buckets or the cache.
    """
    buckets = dict(plan.batching.buckets)
    told = buckets.get(plan.batch or "")
    if asked is None:
        asked = told[-1] if told else DEFAULT_BATCH
    exact = not hasattr(asked, "__index__")
    given: Any = asked if exact else (asked,)
    try:
        sizes = sorted({index(size) for size in given})
    except TypeError:
        raise TypeError(f"batch_size={asked!r} must be a whole number of rows, or a list of such") from None
    if not sizes or sizes[0] < 1:
        raise ValueError(f"batch_size={asked!r} must be at least 1")
    if told is not None:
        wrong = [size for size in sizes if size not in told]
        if wrong:
            raise InputError(
                f"batch_size={asked!r} is not among the buckets {list(told)} that compile(batching=…) gave {plan.batch!r}; "
                "calls are padded to those, so take one of them"
            )
        sizes = sizes if exact else [size for size in told if size <= sizes[-1]]
    elif not exact:
        sizes = [*(1 << n for n in range((sizes[-1] - 1).bit_length())), sizes[-1]]
    combinations = [math.prod(sizes) for sizes in bucket_sizes(plan)]
    chosen: tuple[int, ...] = tuple(sizes)
    needed = 0
    if programs is None:
        return chosen
    for count in range(len(sizes), 0, -1):
        chosen = _thinned(sizes, count)
        limits = Limits(chosen, 0, max_padded, 1, 1)
        needed = sum(chosen.index(limits.rows(each)) + 1 for each in combinations)
        if needed <= programs:
            return chosen
        if exact:
            break
    raise InputError(
        f"{len(combinations)} buckets with the batch sizes {list(chosen)} need {needed} programs, and cache_size={programs} "
        f"holds fewer: each batch would compile again. Write compile(cache_size={needed}), or fewer buckets"
    )


def bucket_sizes(plan: Plan) -> list[tuple[int, ...]]:
    """Every combination of the buckets of the dimensions that are padded; one empty one where none is."""
    buckets = dict(plan.batching.buckets)
    return list(itertools.product(*(buckets[dim.name] for dim in plan.dims if dim.name != plan.batch)))


def _thinned(sizes: Sequence[int], count: int) -> tuple[int, ...]:
    """`count` of the sizes, evenly, the largest always."""
    if count == 1:
        return (sizes[-1],)
    step = (len(sizes) - 1) / (count - 1)
    return tuple(sizes[round(index * step)] for index in range(count))
