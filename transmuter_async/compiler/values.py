"""Values between segments: their signatures, their abstract form, and the way to numpy."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from transmuter_async.graph import onnx_name

__all__ = ["abstract", "fingerprint", "is_traceable", "sequence_length", "shapes_of", "signature", "to_numpy"]


def is_traceable(value: Any) -> bool:
    """Whether a value can be an argument of a program: an array that is not of strings, or a list of such."""
    if isinstance(value, list):
        return all(map(is_traceable, value))
    return isinstance(value, jax.Array) or (isinstance(value, np.ndarray) and value.dtype != object)


def signature(value: Any) -> Any:
    """Hashable shape and dtype of a value; a sequence has one for each element."""
    if type(value) is np.ndarray:
        return (value.shape, value.dtype)
    if isinstance(value, list):
        return tuple(map(signature, value))
    if value is None or isinstance(value, dict):
        return type(value).__name__
    return (value.shape, value.dtype)


def fingerprint(value: Any) -> Any:
    """Hashable identity *by value* of a host value that a program bakes in."""
    if isinstance(value, list):
        return tuple(map(fingerprint, value))
    if value is None:
        return None
    if isinstance(value, dict):
        return tuple((key, fingerprint(value[key])) for key in sorted(value))
    array = np.asarray(value)
    if array.dtype == object:  # its bytes are the addresses of the strings
        return (array.shape, tuple(array.reshape(-1).tolist()))
    return (array.shape, array.dtype, array.tobytes())


def abstract(value: Any) -> Any:
    """Shape and dtype as jax wants them for tracing without data."""
    if isinstance(value, list):
        return [abstract(item) for item in value]
    return jax.ShapeDtypeStruct(value.shape, value.dtype)  # type: ignore[no-untyped-call]


def sequence_length(value: Any) -> int | None:
    """Number of elements of a sequence, None for a tensor."""
    return len(value) if isinstance(value, list) else None


def shapes_of(name: str, value: Any) -> tuple[str, Any]:
    """`(name, (shape, dtype name))` as events carry it."""
    if isinstance(value, list):
        return name, tuple(shapes_of("", item)[1] for item in value)
    if value is None or isinstance(value, dict):
        return name, ((), type(value).__name__)
    return name, (tuple(value.shape), onnx_name(value.dtype))


def to_numpy(value: Any) -> Any:
    """The value on the host; arrays of the device are waited for and shared or copied, never changed."""
    if isinstance(value, list):
        return [to_numpy(item) for item in value]
    return np.asarray(value) if isinstance(value, jax.Array) else value
