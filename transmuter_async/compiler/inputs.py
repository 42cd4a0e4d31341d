"""What a caller gives, checked against the graph and taken over: one error lists everything that does not fit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from transmuter_async.errors import InputError
from transmuter_async.graph import (
    MapType,
    OptionalType,
    SequenceType,
    TensorType,
    Type,
    Value,
    onnx_name,
)

__all__ = ["COPY_BYTES", "Misfit", "PlainInputs", "check_shape", "describe_type", "take_inputs", "take_value"]

COPY_BYTES = 64 << 10
"""Arrays up to this size are copied when a call takes them over."""


def take_inputs(
    declared: Iterable[Value], given: Mapping[str, Any], *, copy: bool | None = None, outputs: Iterable[str] = (), replaceable: Iterable[str] = ()
) -> dict[str, Any]:
    """Check and convert a call's inputs.

    Args:
        declared: The graph's inputs.
        given: By name: numpy, JAX, DLPack or ml_dtypes arrays, scalars, nested lists; lists of arrays for a sequence.
        copy: True copies everything, False nothing; None copies arrays of up to 64 KiB.
        outputs: Names of the graph's outputs, only for the hint when one is given as an input.
        replaceable: Names of initializers that `compile` could have made inputs, for the same.

    Returns:
        numpy or JAX arrays (lists of them for sequences) of the declared dtypes, in the declared order.

    Raises:
        InputError: Names, dtypes, ranks or fixed dimensions do not fit. The text lists each, with what came and what
            was expected.
    """
    if not isinstance(given, Mapping):
        raise InputError(f"inputs are a mapping from names to arrays, not {type(given).__name__}")
    declared = tuple(declared)
    names = {value.name for value in declared}
    problems = [
        f"{value.name!r} is missing, expected {describe_type(value.type)}"
        for value in declared
        if value.name not in given and not isinstance(value.type, OptionalType)
    ]
    known_outputs, possible = set(outputs), set(replaceable)
    for name in given:
        if name not in names:
            extra = " (it is an output)" if name in known_outputs else ""
            if name in possible:
                extra = " of this compiled model (it has a value in the file; name it in the specs of `compile` to give another)"
            problems.append(f"{name!r} is not an input{extra}")
    taken: dict[str, Any] = {}
    for value in declared:
        if value.name in given:
            try:
                taken[value.name] = take_value(given[value.name], value.type, copy)
            except Misfit as problem:
                problems.append(f"{value.name!r}: {problem}")
        elif isinstance(value.type, OptionalType):
            taken[value.name] = None
    if problems:
        expected = ", ".join(f"{value.name}: {describe_type(value.type)}" for value in declared) or "no inputs"
        raise InputError(
            f"the inputs do not fit the graph: {'; '.join(problems)}. The graph expects {expected}; "
            "cast with .astype(...) where a dtype differs"
        )
    return taken


class PlainInputs:
    """The way of most calls: a dict with exactly the declared tensors, as numpy arrays that fit without any change.

    Args:
        declared: The graph's inputs.
    """

    def __init__(self, declared: Iterable[Value]) -> None:
        self._tensors: list[tuple[str, np.dtype, int, tuple[tuple[int, int], ...]]] | None = []
        for value in declared:
            type = value.type
            if not isinstance(type, TensorType) or type.dtype is None or type.shape is None or type.dtype.kind in "OUS":
                self._tensors = None
                return
            fixed = tuple((axis, dim) for axis, dim in enumerate(type.shape) if isinstance(dim, int) and dim >= 0)
            self._tensors.append((value.name, type.dtype, len(type.shape), fixed))

    def take(self, given: Mapping[str, Any], copy: bool | None) -> dict[str, Any] | None:
        """What `take_inputs` returns for these inputs, or None where it has to look closer."""
        if self._tensors is None or type(given) is not dict or len(given) != len(self._tensors):
            return None
        taken = {}
        for name, dtype, rank, fixed in self._tensors:
            array = given.get(name)
            if type(array) is not np.ndarray or array.dtype != dtype or array.ndim != rank:
                return None
            for axis, dim in fixed:
                if array.shape[axis] != dim:
                    return None
            taken[name] = array.copy() if copy or (copy is None and array.nbytes <= COPY_BYTES) else array
        return taken


def describe_type(type: Type | None) -> str:
    """A declared type in words: `int64[batch, 128]`."""
    if type is None:
        return "anything"
    if isinstance(type, TensorType):
        dtype = "any dtype" if type.dtype is None else onnx_name(type.dtype)
        if type.shape is None:
            return f"{dtype}[...]"
        return f"{dtype}[{', '.join('?' if d is None else str(d) for d in type.shape)}]"
    if isinstance(type, SequenceType):
        return f"sequence of {describe_type(type.element)}"
    if isinstance(type, OptionalType):
        return f"optional {describe_type(type.element)}"
    assert isinstance(type, MapType)
    return f"map from {onnx_name(type.key)} to {describe_type(type.value)}"


class Misfit(Exception):
    """One thing that does not fit; collected into the one InputError."""


def take_value(given: Any, type: Type | None, copy: bool | None = None) -> Any:
    """One input, checked and converted as `take_inputs` does it.

    Raises:
        Misfit: It does not fit `type`; the text says what came and what was expected.
    """
    if isinstance(type, OptionalType):
        return None if given is None else take_value(given, type.element, copy)
    if given is None:
        raise Misfit(f"None was given, expected {describe_type(type)}")
    if isinstance(type, SequenceType):
        if not isinstance(given, (list, tuple)):
            raise Misfit(f"a {_kind(given)} was given, expected a list for a {describe_type(type)}")
        items = []
        for index, item in enumerate(given):
            try:
                items.append(take_value(item, type.element, copy))
            except Misfit as problem:
                raise Misfit(f"element {index}: {problem}") from None
        return items
    if isinstance(type, MapType):
        if not isinstance(given, Mapping):
            raise Misfit(f"a {_kind(given)} was given, expected a {describe_type(type)}")
        return dict(given)
    if type is None:
        type = TensorType(None, None)
    array, weak, owned = _as_array(given)
    if type.shape == () and array.shape == (1,):
        array = array.reshape(())  # onnxruntime takes one element for a scalar, so callers give it
    check_shape(array, type)
    array, converted = _convert(array, type, weak)
    owned = owned or converted
    if isinstance(array, np.ndarray) and not owned and (copy or (copy is None and array.nbytes <= COPY_BYTES)):
        array = array.copy()
    return array


def _kind(value: Any) -> str:
    return type(value).__name__


def _as_array(given: Any) -> tuple[Any, bool, bool]:
    """`(array, weak, owned)`: weak came from Python numbers; owned is memory that nobody else has."""
    if isinstance(given, (np.ndarray, jax.Array)):
        if isinstance(given, np.ndarray) and (type(given) is not np.ndarray or given.dtype.kind in "USO"):
            if np.ma.is_masked(given):
                raise Misfit("a masked array was given, and a graph knows no masked elements; fill them with .filled(…)")
            return _strings(np.asarray(given)), False, given.dtype.kind in "USO"
        return given, False, False
    if isinstance(given, np.generic):
        return np.asarray(given), False, True
    if isinstance(given, (bool, int, float, complex, str, list, tuple)):
        try:
            array = np.asarray(given)
        except (ValueError, OverflowError) as error:
            raise Misfit(f"the nested lists do not make an array ({error})") from None
        if array.dtype.kind in "USO":
            return _strings(array), False, True
        return array, not _holds_arrays(given), True
    if hasattr(given, "__dlpack__"):
        return np.from_dlpack(given), False, False
    if hasattr(given, "__array__"):
        return np.asarray(given), False, False
    raise Misfit(f"a {_kind(given)} is no array")


def _holds_arrays(given: Any) -> bool:
    if isinstance(given, (list, tuple)):
        return any(map(_holds_arrays, given))
    return isinstance(given, (np.ndarray, np.generic, jax.Array))


def _strings(array: np.ndarray) -> np.ndarray:
    if array.dtype.kind == "U":
        return array.astype(object)
    if array.dtype.kind == "S":
        return np.array([item.decode() for item in array.reshape(-1)], object).reshape(array.shape)
    if array.dtype.kind != "O":
        return array
    out = np.empty(array.shape, object)
    for index, item in enumerate(array.reshape(-1)):
        if isinstance(item, bytes):
            item = item.decode()
        if not isinstance(item, str):
            raise Misfit(f"an object array holds a {_kind(item)}, only strings are possible")
        out.reshape(-1)[index] = item
    return out


def check_shape(array: Any, type: TensorType) -> None:
    """Raise `Misfit` where rank or fixed dimensions are not those declared."""
    if type.shape is None:
        return
    fits = len(array.shape) == len(type.shape) and all(
        not isinstance(want, int) or want < 0 or got == want for got, want in zip(array.shape, type.shape, strict=True)
    )
    if not fits:
        raise Misfit(f"shape {tuple(array.shape)} was given, expected {describe_type(type)}")


def _convert(array: Any, type: TensorType, weak: bool) -> tuple[Any, bool]:
    want = type.dtype
    if want is None or array.dtype == want:
        return array, False
    if weak and _fits_weakly(array, want):
        return array.astype(want), True
    if _same_kind(array.dtype, want) and np.can_cast(array.dtype, want, "safe"):
        return (np.asarray(array).astype(want) if isinstance(array, jax.Array) else array.astype(want)), True
    raise Misfit(
        f"dtype {onnx_name(array.dtype)} was given, expected {onnx_name(want)}; "
        f"it does not widen safely, cast it yourself with .astype({want.name!r})"
    )


def _same_kind(given: np.dtype, want: np.dtype) -> bool:
    def kind(dtype: np.dtype) -> str:
        if dtype.kind in "iu":
            return "integer"
        return "float" if jnp.issubdtype(dtype, np.floating) else dtype.kind

    return kind(given) == kind(want)


def _fits_weakly(array: np.ndarray, want: np.dtype) -> bool:
    """Whether Python numbers may become `want`: integers in range, floats to floats, integers to floats."""
    floating = jnp.issubdtype(want, np.floating) or want.kind == "c"
    if array.size == 0:
        return True  # an empty list is of any dtype, strings too
    if array.dtype.kind == "b":
        return want.kind == "b"
    if array.dtype.kind in "iu":
        if floating:
            return True
        if want.kind not in "iu":
            return False
        info = np.iinfo(want)
        return bool(array.min() >= info.min and array.max() <= info.max)
    if array.dtype.kind == "f":
        return bool(floating)
    return bool(array.dtype.kind == "c" and want.kind == "c")
