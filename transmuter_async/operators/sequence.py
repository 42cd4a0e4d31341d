"""Sequences (Python lists) and optionals (the value, or None).

A sequence of traced tensors is a list of tracers: these operators rearrange the list, and nothing runs on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from transmuter_async.operators.context import Context, Subgraph
from transmuter_async.operators.layout import concatenate, normal_axis, slice_axes
from transmuter_async.operators.registry import operator, xp

__all__: list[str] = []


# --- sequences --------------------------------------------------------------------------------------------------------


def _place(position: Any, count: int, context: Context, *, inclusive: bool = False) -> int:
    """A position in a list of `count`, counted from the front; out of range it is an index error."""
    index, _ = context.bounded(
        np.asarray(position).reshape(-1)[:1], count, input="position", axis=None, inclusive=inclusive
    )
    return int(index[0])


@operator("SequenceConstruct", since_version=11)
def sequence_construct_11(*inputs: Any) -> list[Any]:
    """A sequence of the inputs."""
    return list(inputs)


@operator("SequenceEmpty", since_version=11)
def sequence_empty_11(*, dtype: int | None = None) -> list[Any]:  # a list without elements has no dtype
    """A sequence of nothing."""
    return []


@operator("SequenceAt", since_version=11, static=("position",))
def sequence_at_11(input_sequence: list[Any], position: Any, /, *, context: Context) -> Any:
    """One element; a negative position counts from the end."""
    if not input_sequence:
        _place(position, 0, context)
        raise context.error("SequenceAt of an empty sequence")
    return input_sequence[_place(position, len(input_sequence), context)]


@operator("SequenceInsert", since_version=11, static=("position",))
def sequence_insert_11(
    input_sequence: list[Any], tensor: Any, position: Any = None, /, *, context: Context
) -> list[Any]:
    """A sequence with `tensor` before `position`, at the end where it is left out."""
    count = len(input_sequence)
    at = count if position is None else _place(position, count, context, inclusive=True)
    return [*input_sequence[:at], tensor, *input_sequence[at:]]


@operator("SequenceErase", since_version=11, static=("position",))
def sequence_erase_11(input_sequence: list[Any], position: Any = None, /, *, context: Context) -> list[Any]:
    """A sequence without the element at `position`, without the last one where it is left out."""
    if not input_sequence:
        _place(0, 0, context)
        raise context.error("SequenceErase of an empty sequence")
    at = len(input_sequence) - 1 if position is None else _place(position, len(input_sequence), context)
    return [*input_sequence[:at], *input_sequence[at + 1 :]]


@operator("SequenceLength", since_version=11)
def sequence_length_11(input_sequence: list[Any], /) -> np.ndarray:
    """The number of elements, scalar int64, always a host value."""
    return np.array(len(input_sequence), np.int64)


@operator("ConcatFromSequence", since_version=11)
def concat_from_sequence_11(input_sequence: list[Any], /, *, axis: int, new_axis: int = 0) -> Any:
    """The elements joined along `axis`, or stacked on a new one."""
    if not input_sequence:
        raise ValueError("ConcatFromSequence of an empty sequence has no shape")
    rank = input_sequence[0].ndim
    if not new_axis:
        return concatenate(input_sequence, normal_axis(axis, rank))
    at = normal_axis(axis, rank + 1)
    return concatenate([xp(part).expand_dims(part, at) for part in input_sequence], at)


@operator("SplitToSequence", since_version=11, static=("split",))
def split_to_sequence_11(input: Any, split: Any = None, /, *, axis: int = 0, keepdims: int = 1) -> list[Any]:
    """Parts along `axis`: of `split` each where it is a scalar (the last one smaller), of the sizes it lists, or of 1.

    Without `split`, `keepdims=0` drops the axis; with it `keepdims` means nothing.
    """
    at = normal_axis(axis, input.ndim)
    size = input.shape[at]
    if split is None:
        sizes = [1] * size
    elif np.ndim(split) == 0:
        each = int(split)
        if each < 1:
            raise ValueError(f"cannot split into parts of {each}")
        sizes = [min(each, size - start) for start in range(0, size, each)]
    else:
        sizes = np.asarray(split).tolist()
        if sum(sizes) != size or any(part < 0 for part in sizes):
            raise ValueError(f"parts {sizes} do not make up axis {at} of size {size}")
    parts, start = [], 0
    for part in sizes:
        piece = slice_axes(input, [(at, start, start + part, 1)])
        parts.append(xp(piece).squeeze(piece, at) if split is None and not keepdims else piece)
        start += part
    return parts


@operator("SequenceMap", since_version=17)
def sequence_map_17(input_sequence: list[Any], /, *additional_inputs: Any, body: Subgraph) -> tuple[list[Any], ...]:
    """`body` on each element, with the same element of other sequences and with whole tensors; one sequence per output."""
    for other in additional_inputs:
        if isinstance(other, list) and len(other) != len(input_sequence):
            raise ValueError(f"sequences of {len(input_sequence)} and {len(other)} elements cannot be mapped together")
    rows: Sequence[tuple[Any, ...]] = [
        body(
            element,
            *[other[number] if isinstance(other, list) else other for other in additional_inputs],
            iteration=number,
        )
        for number, element in enumerate(input_sequence)
    ]
    return tuple([row[index] for row in rows] for index in range(len(body.outputs)))


# --- optionals --------------------------------------------------------------------------------------------------------


@operator("Optional", since_version=15)
def optional_15(input: Any = None, /, *, type: Any = None) -> Any:
    """The input as an optional; without an input an empty one, of `type`."""
    if input is None and type is None:
        raise ValueError("an empty Optional needs its `type`")
    return input


@operator("OptionalGetElement", since_version=15)
def optional_get_element_15(input: Any, /) -> Any:
    """What an optional holds; from version 18 also a plain tensor or sequence, as it is."""
    if input is None:
        raise ValueError("the optional is empty")
    return input


@operator("OptionalHasElement", since_version=15)
def optional_has_element_15(input: Any, /) -> np.ndarray:
    """Whether an optional holds something, scalar bool, always a host value."""
    return np.array(input is not None)


@operator("OptionalHasElement", since_version=18)
def optional_has_element_18(input: Any = None, /) -> np.ndarray:
    """As before; a tensor or sequence counts as something, an input that is left out as nothing."""
    return optional_has_element_15(input)
