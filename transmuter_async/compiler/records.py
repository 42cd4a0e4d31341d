"""Segments as plain records, for the disk cache, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from transmuter_async.compiler.alarms import Alarm
from transmuter_async.errors import NeedsValue

__all__ = ["decode_value", "encode_value", "needs_from", "needs_record", "read_alarms"]


def encode_value(value: Any, arrays: list[np.ndarray]) -> Any:
    """A known value as plain data; arrays go to `arrays` and are referred to by number."""
    if isinstance(value, list):
        return {"list": [encode_value(item, arrays) for item in value]}
    if value is None:
        return {"none": True}
    if isinstance(value, dict):
        raise TypeError("a map has no record")
    array = np.asarray(value)
    if array.dtype == object:
        return {"strings": array.reshape(-1).tolist(), "shape": list(array.shape)}
    arrays.append(array)
    return {"array": len(arrays) - 1}


def decode_value(record: Mapping[str, Any], arrays: Sequence[np.ndarray]) -> Any:
    """The value of `encode_value`'s record."""
    if "list" in record:
        return [decode_value(item, arrays) for item in record["list"]]
    if "none" in record:
        return None
    if "strings" in record:
        out = np.empty(len(record["strings"]), object)
        out[:] = record["strings"]
        return out.reshape(record["shape"])
    return arrays[record["array"]]


def needs_record(needs: NeedsValue | None) -> dict[str, Any] | None:
    """A break's facts as plain data."""
    if needs is None:
        return None
    return {
        name: getattr(needs, name)
        for name in ("node", "operator", "position", "value", "producer", "reason", "hint")
    }


def needs_from(record: Mapping[str, Any] | None) -> NeedsValue | None:
    """The break of `needs_record`'s record."""
    return None if record is None else NeedsValue(**record)


def read_alarms(records: Sequence[Sequence[Any]]) -> tuple[Alarm, ...]:
    """Alarms from lists of their fields."""
    return tuple(Alarm(*fields) for fields in records)
