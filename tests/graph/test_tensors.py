"""Every encoding of tensors. The oracle is onnx.numpy_helper, or bytes written out by hand."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from tests.graph.build import everything, model, read, same, with_initializer
from transmuter_async.errors import InvalidModel
from transmuter_async.graph import SparseTensor, dtype_of, read_model

KINDS = [number for number in range(1, 27) if number != 8]


def only(proto: onnx.ModelProto) -> np.ndarray:
    [array] = read(proto).graph.initializers.values()
    return array


def values(kind: int, shape: tuple[int, ...]) -> np.ndarray:
    """Values of all bit patterns that a dtype has, as far as they fit into the shape."""
    generator = np.random.default_rng(kind)
    dtype = dtype_of(kind)
    if kind == TensorProto.BOOL:
        return generator.integers(0, 2, shape).astype(bool)
    if kind in (21, 22, 23, 25, 26):
        return generator.integers(0, 4 if kind > 24 else 16, shape).astype(np.uint8).view(dtype)
    return np.frombuffer(generator.bytes(math.prod(shape) * dtype.itemsize), dtype).reshape(shape)


@pytest.mark.parametrize("shape", [(), (0, 3), (1,), (3, 5), (33, 97, 5)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_raw_data(kind: int, shape: tuple[int, ...]) -> None:
    expected = values(kind, shape)
    tensor = numpy_helper.from_array(expected, "w")
    assert tensor.data_type == kind
    assert tensor.HasField("raw_data")
    array = only(with_initializer(tensor))
    assert same(array, expected)
    assert not array.flags.writeable
    assert array.ctypes.data % 64 == 0 or array.nbytes == 0


@pytest.mark.parametrize("count", [0, 1, 7, 6000])
@pytest.mark.parametrize("kind", KINDS)
def test_typed_fields(kind: int, count: int) -> None:
    expected = values(kind, (count,))
    if kind in (1, 10, 11, 14, 15, 16) or 17 <= kind <= 24:  # make_tensor goes by way of float32, so only plain numbers
        expected = np.arange(count).__mod__(7).astype(dtype_of(kind))
    listed = expected.astype(np.complex128 if kind in (14, 15) else np.float64 if kind != 13 else np.uint64)
    if kind in (7, 12, 13):
        listed = expected
    tensor = helper.make_tensor("w", kind, [count], listed.tolist())
    assert not tensor.HasField("raw_data")
    array = only(with_initializer(tensor))
    assert same(array, expected)
    assert same(array, numpy_helper.to_array(tensor).astype(expected.dtype, copy=False))


def test_integers_of_all_sizes_in_varints() -> None:
    edges = [0, 1, -1, 127, 128, -128, 2**31, -(2**31), 2**62, 2**63 - 1, -(2**63)]
    numbers = np.array(edges * 400, np.int64)
    assert same(only(with_initializer(helper.make_tensor("w", TensorProto.INT64, numbers.shape, numbers.tolist()))), numbers)


def test_strings() -> None:
    texts = ["", "a", "Grüße", "日本", "x" * 5000, "nul\0inside"]
    array = only(with_initializer(helper.make_tensor("w", TensorProto.STRING, [2, 3], [item.encode() for item in texts])))
    assert array.dtype == object
    assert array.reshape(-1).tolist() == texts
    assert all(type(item) is str for item in array.reshape(-1))


def test_a_bool_is_zero_or_one() -> None:
    tensor = TensorProto(name="w", data_type=TensorProto.BOOL, dims=[4], raw_data=b"\0\1\2\xff")
    assert only(with_initializer(tensor)).view(np.uint8).tolist() == [0, 1, 1, 1]


def test_four_and_two_bits_start_at_the_lowest() -> None:
    four = TensorProto(name="w", data_type=TensorProto.UINT4, dims=[3], raw_data=bytes([0x21, 0xF3]))
    assert only(with_initializer(four)).tolist() == [1, 2, 3]
    two = TensorProto(name="w", data_type=TensorProto.INT2, dims=[5], raw_data=bytes([0b11_10_01_00, 0b01]))
    assert only(with_initializer(two)).astype(int).tolist() == [0, 1, -2, -1, 1]
    signed = TensorProto(name="w", data_type=TensorProto.INT4, dims=[2], int32_data=[0x8F])
    assert only(with_initializer(signed)).astype(int).tolist() == [-1, -8]


def test_float16_bits_in_int32_data() -> None:
    tensor = TensorProto(name="w", data_type=TensorProto.FLOAT16, dims=[3], int32_data=[0x3C00, 0xC000, -0x8000])
    assert only(with_initializer(tensor)).tolist() == [1.0, -2.0, -0.0]
    brain = TensorProto(name="w", data_type=TensorProto.BFLOAT16, dims=[1], int32_data=[0x3F80])
    assert only(with_initializer(brain)).dtype == ml_dtypes.bfloat16


def sparse(shape: list[int], found: list[float], indices: np.ndarray) -> onnx.SparseTensorProto:
    return helper.make_sparse_tensor(
        helper.make_tensor("w", TensorProto.FLOAT, [len(found)], found), numpy_helper.from_array(indices, "i"), shape
    )


@pytest.mark.parametrize("indices", [[1, 5], [[0, 1], [1, 2]]])
def test_sparse_initializers_are_written_out(indices: object) -> None:
    node = helper.make_node("Identity", ["w"], ["y"])
    proto = model([node], sparse_initializer=[sparse([2, 3], [1.5, -2.0], np.array(indices))])
    assert read(proto).graph.initializers["w"].tolist() == [[0, 1.5, 0], [0, 0, -2.0]]


def test_a_sparse_attribute_stays_sparse() -> None:
    node = helper.make_node("Constant", [], ["y"], sparse_value=sparse([4], [3.0], np.array([2])))
    held = read(model([node], inputs=[])).graph.nodes[0].attributes["sparse_value"]
    assert isinstance(held, SparseTensor)
    assert held.dense().tolist() == [0, 0, 3, 0]


@pytest.mark.parametrize(
    ("shape", "found", "indices", "text"),
    [
        ([2, 3], [1.0], [6], "outside"),
        ([2, 3], [1.0], [-1], "outside"),
        ([2, 3], [1.0], [[0, 3]], "outside"),
        ([2, 3], [1.0, 2.0], [1], "indices of shape"),
        ([2, 3], [1.0, 2.0], [1, 1], "twice"),
        ([1 << 20, 1 << 20], [1.0], [1], "budget"),
    ],
)
def test_bad_sparse_tensors(shape: list[int], found: list[float], indices: object, text: str) -> None:
    node = helper.make_node("Identity", ["w"], ["y"])
    with pytest.raises(InvalidModel, match=text):
        read(model([node], sparse_initializer=[sparse(shape, found, np.array(indices))]))


@pytest.mark.parametrize(
    ("tensor", "text"),
    [
        (TensorProto(data_type=1, dims=[3], raw_data=b"12345678"), "takes 12 bytes, but 8"),
        (TensorProto(data_type=1, dims=[3]), "takes 12 bytes, but 0"),
        (TensorProto(data_type=1, dims=[-3], raw_data=b"12345678"), "negative"),
        (TensorProto(data_type=1, dims=[2**40, 2**40]), "larger than any memory"),
        (TensorProto(data_type=1, dims=[2**40, 2**40, 0]), "larger than any memory"),
        (TensorProto(data_type=1, dims=[1] * 33, float_data=[1]), "33 dimensions"),
        (TensorProto(data_type=0, dims=[1], raw_data=b"1"), "number 0"),
        (TensorProto(data_type=99, dims=[1], raw_data=b"1"), "number 99"),
        (TensorProto(data_type=1, dims=[1], raw_data=b"1234", float_data=[1]), "twice"),
        (TensorProto(data_type=1, dims=[1], int32_data=[1]), "in int32_data"),
        (TensorProto(data_type=3, dims=[1], int32_data=[256]), "256, which does not fit"),
        (TensorProto(data_type=12, dims=[1], uint64_data=[2**32]), "4294967296"),
        (TensorProto(data_type=8, dims=[1], raw_data=b"a"), "string"),
        (TensorProto(data_type=8, dims=[1], string_data=[b"\xff"]), "not UTF-8"),
        (TensorProto(data_type=1, dims=[2], float_data=[1]), "needs 2 numbers, but 1"),
        (TensorProto(data_type=22, dims=[3], raw_data=b"1"), "takes 2 bytes, but 1"),
        (TensorProto(data_type=7, dims=[9000], int64_data=[1 << 20] * 8999), "holds 8999"),
        (TensorProto(data_type=7, dims=[8998], int64_data=[1] * 8999), "another count"),
        (TensorProto(data_type=1, dims=[9000], float_data=[1] * 8999), "takes 36000 bytes"),
        (TensorProto(data_type=1, dims=[1], segment=TensorProto.Segment(begin=0, end=1), raw_data=b"1234"), "segments"),
    ],
)
def test_bad_tensors(tensor: TensorProto, text: str) -> None:
    tensor.name = "w"
    with pytest.raises(InvalidModel, match=text) as caught:
        read(with_initializer(tensor))
    assert "'w'" in str(caught.value)


def test_weights_do_not_alias_the_source() -> None:
    tensor = numpy_helper.from_array(np.ones(5000, np.float32), "w")
    data = bytearray(with_initializer(tensor).SerializeToString())
    array = read(bytes(data)).graph.initializers["w"]
    from_buffer = read_model(memoryview(data), known=everything).graph.initializers["w"]
    data[:] = bytes(len(data))
    assert same(array, np.ones(5000, np.float32))
    assert same(from_buffer, np.ones(5000, np.float32))
