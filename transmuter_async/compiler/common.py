"""Weights that several models have in common: one array in memory, and one on each device.

A process that serves two tasks of one network, or the same file under two names, has most weights twice. Models that are alive
are looked through by shape, dtype and a sample of the bytes; what agrees is compared whole, so that a chance costs time and
never a wrong number. Nothing here keeps an array alive.
"""

from __future__ import annotations

import hashlib
import threading
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, cast

import jax
import numpy as np

from transmuter_async.graph import Graph

__all__ = ["LEAST", "device_copy", "let_go", "one_of_equal", "share_weights"]

LEAST = 64 << 10
"""Bytes from which on an array is worth a look."""
_SAMPLE = 4096
_CHUNK = 1 << 20

_LOCK = threading.Lock()
_HOST: weakref.WeakValueDictionary[tuple[Any, ...], np.ndarray] = weakref.WeakValueDictionary()
_DEVICE: dict[int, tuple[weakref.ref[np.ndarray], weakref.WeakValueDictionary[Any, jax.Array]]] = {}


def share_weights(graph: Graph) -> Graph:
    """The graph with each large initializer that another living graph has, too, replaced by that one's.

    Args:
        graph: Its arrays are read-only, as the reader and folding make them; one that is not stays as it is.
    """
    shared = {name: one_of_equal(array) for name, array in graph.initializers.items()}
    if all(array is graph.initializers[name] for name, array in shared.items()):
        return graph
    return replace(graph, initializers=shared)


def device_copy(array: np.ndarray, home: Any) -> jax.Array:
    """The array on a device, or over a mesh; the copy that is there already where there is one.

    Args:
        array: A weight that nobody writes to.
        home: What `jax.device_put` takes.
    """
    with _LOCK:
        held = _DEVICE.get(id(array))
        if held is None or held[0]() is not array:
            number = id(array)
            held = (weakref.ref(array, lambda gone: _forget(number, gone)), weakref.WeakValueDictionary())
            _DEVICE[number] = held
        found = held[1].get(home)
        if found is None:
            found = held[1][home] = jax.device_put(array, home)
        return found


def _forget(number: int, gone: weakref.ref[np.ndarray]) -> None:
    # Without the lock: an array may die on any thread, also on one that holds it. A new array of the same id is another entry.
    held = _DEVICE.get(number)
    if held is not None and held[0] is gone:
        _DEVICE.pop(number, None)


def one_of_equal(array: np.ndarray) -> np.ndarray:
    """The array of the same shape, dtype and bytes that some living graph has, or this one, which later ones then get.

    One that is small, writable, with gaps in its memory or holds strings is returned as it is.
    """
    if array.nbytes < LEAST or array.dtype.hasobject or array.flags.writeable:
        return array
    data = _memory(array)
    if data is None:
        return array
    sample = data[:: max(1, data.size // _SAMPLE)].tobytes()
    key = (array.shape, array.strides, array.dtype, hashlib.sha256(sample).digest())
    with _LOCK:
        found = _HOST.setdefault(key, array)
    if found is array:
        return array
    other = _memory(found)
    return found if other is not None and _equal(other, data) else array


def let_go(name: str, array: np.ndarray, holders: Iterable[Mapping[str, np.ndarray]]) -> None:
    """Take an initializer out of what holds it under that name. Only for graphs that nobody else has: they are changed."""
    for holder in holders:
        if holder.get(name) is array:
            del cast("dict[str, np.ndarray]", holder)[name]


def _memory(array: np.ndarray) -> np.ndarray | None:
    """The bytes of an array as they lie, in whatever order its axes are; None where there are gaps between them."""
    lying = array.transpose(sorted(range(array.ndim), key=lambda axis: (-array.strides[axis], axis)))
    return lying.reshape(-1).view(np.uint8) if lying.flags.c_contiguous else None


def _equal(one: np.ndarray, other: np.ndarray) -> bool:
    """Whether bytes agree; in parts, without a large mask and without holding the interpreter for long."""
    starts = range(0, one.size, _CHUNK)
    return all(np.array_equal(one[start : start + _CHUNK], other[start : start + _CHUNK]) for start in starts)
