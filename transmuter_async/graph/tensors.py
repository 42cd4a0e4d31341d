"""TensorProto and SparseTensorProto -> numpy, in every encoding that ONNX has.

Protos come in as plain objects; this module does not import protobuf. Source: onnx.proto, TensorProto.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..errors import InvalidModel
from .budget import Budget
from .dtypes import STRING, dtype_of, onnx_name
from .external import ExternalFiles, parse_entries
from .model import SparseTensor
from .storage import BufferStorage, Storage, freeze, lasting_empty
from .wire import MARKER_BYTES, Stripped

__all__ = ["TensorReader", "element_bits", "name_text"]

_EXTERNAL = 1  # TensorProto.DataLocation
_STEP = 1 << 22
_VARINT_STEP = 1 << 18  # decoding takes some forty times as much for a moment

# Field number -> name, for the fields that hold elements of their own
_TYPED: Mapping[int, str] = {
    4: "float_data",
    5: "int32_data",
    6: "string_data",
    7: "int64_data",
    10: "double_data",
    11: "uint64_data",
}
# ONNX element types that each field may hold
_HOLDS: Mapping[int, frozenset[int]] = {
    4: frozenset({1, 14}),
    5: frozenset({2, 3, 4, 5, 6, 9, 10, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26}),
    6: frozenset({8}),
    7: frozenset({7}),
    10: frozenset({11, 15}),
    11: frozenset({12, 13}),
}
_PACKED_BITS: Mapping[int, int] = {21: 4, 22: 4, 23: 4, 25: 2, 26: 2}


def element_bits(dtype: np.dtype) -> int:
    """Bits of one element as ONNX stores it: 4 and 2 for the packed types, else those of numpy."""
    name = onnx_name(dtype)
    if name in ("uint4", "int4", "float4e2m1"):
        return 4
    return 2 if name in ("uint2", "int2") else dtype.itemsize * 8


def name_text(value: object, source: str | None) -> str:
    """A protobuf string field. protobuf hands bytes out where they are not UTF-8.

    Raises:
        InvalidModel: It is not UTF-8.
    """
    if isinstance(value, str):
        return value
    raise InvalidModel(f"a name is not UTF-8 text: {str(value)[:60]}", source=source)


class TensorReader:
    """Reads tensors of one model.

    Args:
        storage: Where the cut-out data lies, None when nothing was cut.
        stripped: What was cut out, None when nothing was.
        external: Opens files of external data.
        budget: Limits.
        source: The model, as errors call it.
    """

    def __init__(
        self,
        storage: Storage | None,
        stripped: Stripped | None,
        external: ExternalFiles,
        budget: Budget,
        source: str | None,
    ) -> None:
        self._storage = storage
        self._stripped = stripped
        self._external = external
        self._budget = budget
        self._source = source

    def _bad(self, name: str, text: str) -> InvalidModel:
        return InvalidModel(f"tensor {name[:100]!r} {text}", source=self._source)

    def tensor(self, proto: Any, what: str = "") -> np.ndarray:
        """The array of a TensorProto: read-only, 64-byte aligned, C-contiguous.

        Args:
            proto: The TensorProto.
            what: Name for errors where the tensor has none.

        Raises:
            InvalidModel: Data and shape do not fit each other, or the data can't be had.
        """
        name = name_text(proto.name, self._source) or what
        number = proto.data_type
        try:
            dtype = dtype_of(number)
        except KeyError:
            raise self._bad(
                name, f"has element type number {number}, which ONNX does not define. The file may be newer than the "
                "installed onnx package, or damaged."
            ) from None
        shape = self._shape(name, tuple(proto.dims))
        count = math.prod(shape)
        if count > (self._budget.strings if dtype == STRING else self._budget.elements):
            raise self._bad(name, f"of shape {list(shape)} has more elements than the budget allows")
        if proto.HasField("segment"):
            raise self._bad(name, "is stored in segments, which no ONNX tool writes. Export the model again.")
        flat = self._flat(proto, name, number, dtype, shape, count)
        return freeze(flat.reshape(shape))

    def _shape(self, name: str, dims: tuple[int, ...]) -> tuple[int, ...]:
        if len(dims) > self._budget.rank:
            raise self._bad(name, f"has {len(dims)} dimensions, more than the budget of {self._budget.rank}")
        if any(dim < 0 for dim in dims):
            raise self._bad(name, f"has a negative dimension: {list(dims)}")
        if math.prod(dim for dim in dims if dim) > 1 << 60:
            raise self._bad(name, f"of shape {list(dims)} is larger than any memory")
        return dims

    def _flat(
        self, proto: Any, name: str, number: int, dtype: np.dtype, shape: tuple[int, ...], count: int
    ) -> np.ndarray:
        raw = proto.raw_data if proto.HasField("raw_data") else b""
        filled = [field for field, attribute in _TYPED.items() if len(getattr(proto, attribute))]
        if proto.data_location == _EXTERNAL:
            if raw or filled:
                raise self._bad(name, "has external data and data of its own")
            return self._read_external(proto, name, number, dtype, shape, count)
        if len(filled) + bool(raw) > 1:
            fields = [_TYPED[field] for field in filled] + ["raw_data"] * bool(raw)
            raise self._bad(name, f"has its data twice: {', '.join(fields)}")
        if filled:
            field = filled[0]
            self._may_hold(name, field, number)
            return self._typed(name, number, dtype, shape, count, getattr(proto, _TYPED[field]))
        cut = self._stripped
        if raw and cut is not None and len(raw) == MARKER_BYTES + 8 and raw.startswith(cut.nonce):
            place = cut.cuts[int.from_bytes(raw[MARKER_BYTES:], "little")]
            assert self._storage is not None  # a reader with cuts has a storage
            if place.field == 9:
                return self._raw(name, number, dtype, shape, count, self._storage, place.start, place.stop - place.start)
            self._may_hold(name, place.field, number)
            return self._packed(name, number, dtype, shape, count, place.field, place.start, place.stop)
        if not raw and count == 0:
            return np.empty(0, dtype)
        return self._raw(name, number, dtype, shape, count, BufferStorage(raw), 0, len(raw))

    def _may_hold(self, name: str, field: int, number: int) -> None:
        if number not in _HOLDS[field]:
            raise self._bad(name, f"of type {onnx_name(dtype_of(number))} has its data in {_TYPED[field]}")

    def _read_external(
        self, proto: Any, name: str, number: int, dtype: np.dtype, shape: tuple[int, ...], count: int
    ) -> np.ndarray:
        entries = [
            (name_text(entry.key, self._source), name_text(entry.value, self._source)) for entry in proto.external_data
        ]
        location, offset, length = parse_entries(name, entries, self._source)
        if dtype == STRING:
            raise self._bad(name, "is a string tensor with external data, which ONNX does not allow")
        storage = self._external.storage(name, location)
        expected = _stored_bytes(number, dtype, count)
        if length is not None and length != expected:
            raise self._bad(
                name, f"of type {onnx_name(dtype)} and shape {list(shape)} takes {expected} bytes, "
                f"but its external data is {length} bytes long"
            )
        if offset + expected > storage.size:
            raise self._bad(
                name, f"lies at bytes {offset} to {offset + expected} of {location!r}, which has only {storage.size}. "
                "The file is incomplete or belongs to another model; fetch it again."
            )
        return self._raw(name, number, dtype, shape, count, storage, offset, expected)

    def _raw(
        self,
        name: str,
        number: int,
        dtype: np.dtype,
        shape: tuple[int, ...],
        count: int,
        storage: Storage,
        start: int,
        length: int,
    ) -> np.ndarray:
        if dtype == STRING:
            raise self._bad(name, "is a string tensor with raw bytes or without data; its strings belong in string_data")
        expected = _stored_bytes(number, dtype, count)
        if length != expected:
            raise self._bad(
                name, f"of type {onnx_name(dtype)} and shape {list(shape)} takes {expected} bytes, but {length} are there"
            )
        out = lasting_empty(count, dtype)
        bits = _PACKED_BITS.get(number)
        if bits is not None:
            self._unpack(storage, start, length, out, bits)
            return out
        view = out.view(np.uint8)
        if length:
            storage.read_into(start, view.data)
        if number == 9:
            # numpy takes any non-zero byte for true, but its own loops rely on 0 and 1
            np.not_equal(view, 0, out=out)
        return out

    def _unpack(self, storage: Storage, start: int, length: int, out: np.ndarray, bits: int) -> None:
        """Packed elements, the first in the lowest bits, one per byte in `out`; ml_dtypes keeps the upper bits zero."""
        per_byte = 8 // bits
        flat = out.view(np.uint8)
        for done in range(0, length, _STEP):
            packed = np.frombuffer(storage.read(start + done, start + min(done + _STEP, length)), np.uint8)
            wide = np.empty((len(packed), per_byte), np.uint8)
            for place in range(per_byte):
                np.right_shift(packed, place * bits, out=wide[:, place])
            np.bitwise_and(wide, (1 << bits) - 1, out=wide)
            into = flat[done * per_byte : (done + len(packed)) * per_byte]
            into[:] = wide.reshape(-1)[: len(into)]

    def _packed(
        self, name: str, number: int, dtype: np.dtype, shape: tuple[int, ...], count: int, field: int, start: int, stop: int
    ) -> np.ndarray:
        """A large packed typed field that was cut out."""
        assert self._storage is not None
        if field in (4, 10):  # fixed width: the same bytes as raw_data
            return self._raw(name, number, dtype, shape, count, self._storage, start, stop - start)
        numbers = self._varints(name, start, stop, _entries(number, count))
        return self._typed(name, number, dtype, shape, count, numbers)

    def _varints(self, name: str, start: int, stop: int, expected: int) -> np.ndarray:
        """The varints of `start:stop` as uint64, 64-bit two's complement where negative."""
        assert self._storage is not None
        if expected > stop - start:
            raise self._bad(name, f"needs {expected} numbers, more than its data can hold")
        out = np.empty(expected, np.uint64)
        filled, position = 0, start
        while position < stop:
            data = np.frombuffer(self._storage.read(position, min(position + _VARINT_STEP, stop)), np.uint8)
            ends = np.flatnonzero(data < 0x80)
            if len(ends) == 0 or filled + len(ends) > expected:
                raise self._bad(name, f"needs {expected} numbers, and its data holds another count")
            starts = np.concatenate(([0], ends[:-1] + 1))
            sizes = ends - starts + 1
            longest = int(sizes.max())
            if longest > 10:
                raise self._bad(name, "has a number that is longer than 64 bits")
            values = np.zeros(len(ends), np.uint64)
            for place in range(longest):
                there = np.flatnonzero(sizes > place)
                digits = (data[starts[there] + place] & 0x7F).astype(np.uint64)
                values[there] |= digits << np.uint64(7 * place)
            out[filled : filled + len(ends)] = values
            filled += len(ends)
            position += int(ends[-1]) + 1
        if filled != expected:
            raise self._bad(name, f"needs {expected} numbers, and its data holds {filled}")
        return out

    def _typed(
        self, name: str, number: int, dtype: np.dtype, shape: tuple[int, ...], count: int, values: Any
    ) -> np.ndarray:
        """Elements from a repeated field: `values` is a sequence of numbers or bytes, or uint64 as `_varints` gives."""
        if len(values) != _entries(number, count):
            raise self._bad(
                name, f"of type {onnx_name(dtype)} and shape {list(shape)} needs {_entries(number, count)} numbers, "
                f"but {len(values)} are there"
            )
        if dtype == STRING:
            return self._strings(name, values)
        out = lasting_empty(count, dtype)
        if number in (14, 15):  # real and imaginary parts take turns
            out[:] = np.array(values, np.float32 if number == 14 else np.float64).view(dtype)
        elif number in (1, 11):
            out[:] = np.array(values, dtype)
        elif number in (12, 13):
            wide = np.array(values, np.uint64)
            if number == 12 and wide.size and int(wide.max()) > 0xFFFF_FFFF:
                raise self._bad(name, f"of type uint32 holds {int(wide.max())}")
            out[:] = wide
        else:
            if isinstance(values, np.ndarray):
                integers = values.view(np.int64)
            else:
                integers = np.array(values, np.int64)
            self._integers(name, number, dtype, integers, out)
        return out

    def _integers(self, name: str, number: int, dtype: np.dtype, values: np.ndarray, out: np.ndarray) -> None:
        """Bit patterns and small integers from int32_data, or int64_data."""
        packed = _PACKED_BITS.get(number)
        bits = 8 if packed is not None else dtype.itemsize * 8
        if number != 7 and values.size and number != 9:
            low, high = int(values.min()), int(values.max())
            if low < -(1 << bits - 1) or high >= 1 << bits:
                raise self._bad(name, f"of type {onnx_name(dtype)} holds {low if low < 0 else high}, which does not fit")
        if packed is not None:
            octets = values.astype(np.uint8).tobytes()
            self._unpack(BufferStorage(octets), 0, len(octets), out, packed)
        elif number == 9:
            out[:] = values != 0
        else:
            unsigned = np.dtype(f"u{dtype.itemsize}")
            out.view(unsigned)[:] = values.astype(unsigned)

    def _strings(self, name: str, values: Any) -> np.ndarray:
        out = np.empty(len(values), STRING)
        for index, value in enumerate(values):
            try:
                out[index] = bytes(value).decode("utf-8")
            except UnicodeDecodeError as error:
                raise self._bad(name, f"holds a string at index {index} that is not UTF-8") from error
        return out

    def sparse(self, proto: Any, what: str = "") -> tuple[str, SparseTensor]:
        """Name and content of a SparseTensorProto.

        Raises:
            InvalidModel: Values and indices do not fit each other or the shape.
        """
        name = name_text(proto.values.name, self._source) or what
        shape = self._shape(name, tuple(proto.dims))
        size = math.prod(shape)
        if size > self._budget.sparse_elements:
            raise self._bad(
                name, f"is sparse, of shape {list(shape)}: {size} elements written out, more than the budget of "
                f"{self._budget.sparse_elements}"
            )
        values = self.tensor(proto.values, name)
        indices = self.tensor(proto.indices, f"{name} (indices)")
        if values.ndim != 1 or values.dtype == STRING:
            raise self._bad(name, f"is sparse and has values of type {values.dtype} and shape {list(values.shape)}")
        if indices.shape not in ((len(values),), (len(values), len(shape))):
            # a rank-1 tensor may have its single coordinate as (nnz,) or (nnz, 1)
            raise self._bad(name, f"is sparse, has {len(values)} values and indices of shape {list(indices.shape)}")
        if indices.size == 0 and len(values) == 0:
            return name, SparseTensor(values, freeze(np.zeros(0, np.int64)), shape)
        if indices.dtype != np.int64:
            raise self._bad(name, f"is sparse and has indices of type {indices.dtype}; they must be int64")
        limits = np.array([size]) if indices.ndim == 1 else np.array(shape)
        if indices.size and (bool((indices < 0).any()) or bool((indices >= limits).any())):
            raise self._bad(name, f"is sparse, of shape {list(shape)}, and has an index outside of it")
        linear = indices if indices.ndim == 1 else np.ravel_multi_index(tuple(indices.T), shape)
        if len(np.unique(linear)) != len(linear):
            raise self._bad(name, "is sparse and lists an element twice")
        return name, SparseTensor(values, indices, shape)

    def dense(self, proto: Any) -> tuple[str, np.ndarray]:
        """Name and whole array of a sparse initializer."""
        name, sparse = self.sparse(proto)
        out = lasting_empty(math.prod(sparse.shape), sparse.values.dtype)
        out.view(np.uint8)[:] = 0
        if sparse.indices.ndim == 1:
            out[sparse.indices] = sparse.values
        else:
            out.reshape(sparse.shape)[tuple(sparse.indices.T)] = sparse.values
        return name, freeze(out.reshape(sparse.shape))


def _stored_bytes(number: int, dtype: np.dtype, count: int) -> int:
    """Bytes of `count` elements as ONNX stores them raw."""
    bits = _PACKED_BITS.get(number)
    return count * dtype.itemsize if bits is None else (count * bits + 7) // 8


def _entries(number: int, count: int) -> int:
    """Entries of a typed field that `count` elements take: two for a complex one, one byte for several packed ones."""
    bits = _PACKED_BITS.get(number)
    if bits is not None:
        return (count * bits + 7) // 8
    return 2 * count if number in (14, 15) else count
