"""Walks the protobuf wire format of a model and cuts its large tensors out, so that protobuf parses only the rest.

Parsing a big model in one go holds the GIL for as long as it takes and keeps all weights a second time. The walk touches
the headers alone. Where a tensor has its data in exactly one length-delimited field of more than 4 KiB, the field is
replaced by a short `raw_data` that starts with a random marker, and where the bytes lie is noted. The marker stays with
its tensor through everything protobuf does (repeated singular fields that are merged, fields in any order).

What the walk does not understand (groups, overlong varints) it reports as odd, and the caller parses the plain bytes.
Field numbers: onnx.proto.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .storage import Storage

__all__ = ["MARKER_BYTES", "Cut", "Odd", "Stripped", "Truncated", "strip"]

SMALLEST_CUT = 4096
MARKER_BYTES = 16
_WINDOW = 1 << 15

# For each message on the way to a tensor: field number -> the message in it
_FIELDS: Mapping[str, Mapping[int, str]] = {
    "Model": {7: "Graph", 25: "Function"},
    "Graph": {1: "Node", 5: "Tensor", 15: "SparseTensor"},
    "Node": {5: "Attribute"},
    "Attribute": {5: "Tensor", 10: "Tensor", 6: "Graph", 11: "Graph", 22: "SparseTensor", 23: "SparseTensor"},
    "SparseTensor": {1: "Tensor", 2: "Tensor"},
    "Function": {7: "Node", 11: "Attribute"},
}
_RAW_DATA = 9
# TensorProto: float_data, int32_data, int64_data, raw_data, double_data, uint64_data. string_data stays where it is.
_DATA_FIELDS = frozenset({4, 5, 7, _RAW_DATA, 10, 11})
_DEEPEST = 100  # protobuf's own limit of nested messages


class Odd(Exception):
    """An encoding that the walk leaves to protobuf."""


class Truncated(Exception):
    """A length that reaches beyond the end of what is around it."""


@dataclass(frozen=True, slots=True)
class Cut:
    """Data of a tensor that stayed in the storage: TensorProto field number, first byte, byte after the last."""

    field: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Stripped:
    """The model without its large tensors, and where these are. A marker is `nonce` + 8 bytes of index into `cuts`."""

    rest: bytes
    cuts: tuple[Cut, ...]
    nonce: bytes


Part = tuple[int, int] | bytes
"""A range of the storage, or new bytes."""


def strip(storage: Storage, nonce: bytes, *, most: int) -> Stripped:
    """Cuts the large tensors out of a serialised ModelProto.

    Args:
        storage: The model.
        nonce: `MARKER_BYTES` random bytes.
        most: Largest rest in bytes.

    Raises:
        Odd: The encoding is unusual or the rest too large; parse the plain bytes if they fit.
        Truncated: The bytes can't be a whole protobuf message.
    """
    walk = _Walk(storage, nonce)
    parts = walk.message(0, storage.size, "Model", 0)
    if parts is None:
        parts = [(0, storage.size)]
    if _length(parts) > most:
        raise Odd(f"{_length(parts)} bytes are left without the large tensors")
    rest = b"".join(part if isinstance(part, bytes) else storage.read(*part) for part in parts)
    return Stripped(rest, tuple(walk.cuts), nonce)


class _Walk:
    def __init__(self, storage: Storage, nonce: bytes) -> None:
        self._storage = storage
        self._nonce = nonce
        self._window = b""
        self._base = 0
        self.cuts: list[Cut] = []

    def _varint(self, position: int, stop: int) -> tuple[int, int]:
        """The varint at `position` and the position after it."""
        at = position - self._base
        if at < 0 or at + 10 > len(self._window):
            self._window = self._storage.read(position, min(position + _WINDOW, self._storage.size))
            self._base, at = position, 0
        window, value, shift = self._window, 0, 0
        for count in range(10):
            if at + count >= len(window) or position + count >= stop:
                raise Truncated(f"a number is cut off at byte {position + count}")
            byte = window[at + count]
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                if byte == 0 and count:
                    raise Odd(f"an overlong number at byte {position}")
                return value, position + count + 1
            shift += 7
        raise Odd(f"an overlong number at byte {position}")

    def _field(self, position: int, stop: int) -> tuple[int, int, int, int]:
        """One field at `position`: its number, wire type, where its content starts and stops."""
        tag, start = self._varint(position, stop)
        number, wire_type = tag >> 3, tag & 7
        if wire_type == 0:
            _, end = self._varint(start, stop)
        elif wire_type == 1:
            end = start + 8
        elif wire_type == 5:
            end = start + 4
        elif wire_type == 2:
            length, start = self._varint(start, stop)
            end = start + length
        else:
            raise Odd(f"wire type {wire_type} at byte {position}")
        if number == 0 or number >= 1 << 29:
            raise Odd(f"field number {number} at byte {position}")
        if end > stop:
            raise Truncated(f"field {number} at byte {position} needs {end - stop} bytes more than there are")
        return number, wire_type, start, end

    def message(self, start: int, stop: int, kind: str, depth: int) -> list[Part] | None:
        """The parts that replace the message in `start:stop`, None where nothing in it was cut."""
        if kind == "Tensor":
            return self._tensor(start, stop)
        if depth > _DEEPEST:
            raise Odd("messages are nested too deeply")
        inner = _FIELDS[kind]
        parts: list[Part] = []
        kept = position = start
        while position < stop:
            number, wire_type, content, end = self._field(position, stop)
            # A message of up to 4 KiB can't hold anything that is cut
            if wire_type == 2 and end - content > SMALLEST_CUT and number in inner:
                replaced = self.message(content, end, inner[number], depth + 1)
                if replaced is not None:
                    if kept < position:
                        parts.append((kept, position))
                    parts.append(_encode(number << 3 | 2) + _encode(_length(replaced)))
                    parts.extend(replaced)
                    kept = end
            position = end
        if not parts:
            return None
        if kept < stop:
            parts.append((kept, stop))
        return parts

    def _tensor(self, start: int, stop: int) -> list[Part] | None:
        data: list[tuple[int, int, int, int, int]] = []
        position = start
        while position < stop:
            number, wire_type, content, end = self._field(position, stop)
            if number in _DATA_FIELDS:
                data.append((number, wire_type, position, content, end))
                if len(data) > 1:  # unpacked, in pieces, or of two kinds: protobuf puts it together
                    return None
            position = end
        if not data:
            return None
        number, wire_type, position, content, end = data[0]
        if wire_type != 2 or end - content <= SMALLEST_CUT:
            return None
        marker = self._nonce + len(self.cuts).to_bytes(8, "little")
        self.cuts.append(Cut(number, content, end))
        field = _encode(_RAW_DATA << 3 | 2) + _encode(len(marker)) + marker
        return [part for part in ((start, position), field, (end, stop)) if isinstance(part, bytes) or part[0] < part[1]]


def _length(parts: list[Part]) -> int:
    return sum(len(part) if isinstance(part, bytes) else part[1] - part[0] for part in parts)


def _encode(value: int) -> bytes:
    """A varint."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
