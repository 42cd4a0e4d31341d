"""ONNX element types and the numpy dtypes that hold them.

ONNX numbers its element types (`TensorProto.DataType`). Everything above the reader uses numpy dtypes; the narrow floats
and integers come from ml_dtypes. A string tensor is an object array of `str`.
"""

from __future__ import annotations

from types import MappingProxyType

import ml_dtypes
import numpy as np

__all__ = ["STRING", "dtype_of", "element_type_of", "onnx_name", "parse_dtype"]

STRING = np.dtype(object)

# number, ONNX name, numpy dtype; TensorProto.DataType of onnx.proto
_TABLE: tuple[tuple[int, str, np.dtype], ...] = (
    (1, "float", np.dtype(np.float32)),
    (2, "uint8", np.dtype(np.uint8)),
    (3, "int8", np.dtype(np.int8)),
    (4, "uint16", np.dtype(np.uint16)),
    (5, "int16", np.dtype(np.int16)),
    (6, "int32", np.dtype(np.int32)),
    (7, "int64", np.dtype(np.int64)),
    (8, "string", STRING),
    (9, "bool", np.dtype(np.bool_)),
    (10, "float16", np.dtype(np.float16)),
    (11, "double", np.dtype(np.float64)),
    (12, "uint32", np.dtype(np.uint32)),
    (13, "uint64", np.dtype(np.uint64)),
    (14, "complex64", np.dtype(np.complex64)),
    (15, "complex128", np.dtype(np.complex128)),
    (16, "bfloat16", np.dtype(ml_dtypes.bfloat16)),
    (17, "float8e4m3fn", np.dtype(ml_dtypes.float8_e4m3fn)),
    (18, "float8e4m3fnuz", np.dtype(ml_dtypes.float8_e4m3fnuz)),
    (19, "float8e5m2", np.dtype(ml_dtypes.float8_e5m2)),
    (20, "float8e5m2fnuz", np.dtype(ml_dtypes.float8_e5m2fnuz)),
    (21, "uint4", np.dtype(ml_dtypes.uint4)),
    (22, "int4", np.dtype(ml_dtypes.int4)),
    (23, "float4e2m1", np.dtype(ml_dtypes.float4_e2m1fn)),
    (24, "float8e8m0", np.dtype(ml_dtypes.float8_e8m0fnu)),
    (25, "uint2", np.dtype(ml_dtypes.uint2)),
    (26, "int2", np.dtype(ml_dtypes.int2)),
    (27, "float6e2m3", np.dtype(ml_dtypes.float6_e2m3fn)),
    (28, "float6e3m2", np.dtype(ml_dtypes.float6_e3m2fn)),
)

_BY_NUMBER = MappingProxyType({number: dtype for number, _, dtype in _TABLE})
_BY_DTYPE = MappingProxyType({dtype: (number, name) for number, name, dtype in _TABLE})
_BY_NAME = MappingProxyType(
    {name: dtype for _, name, dtype in _TABLE}
    | {dtype.name: dtype for _, _, dtype in _TABLE if dtype is not STRING}
)


def dtype_of(element_type: int) -> np.dtype:
    """The numpy dtype of an ONNX element type number. Raises KeyError for one that is unknown (0 is "undefined")."""
    return _BY_NUMBER[element_type]


def element_type_of(dtype: np.dtype) -> int:
    """The ONNX element type number of a numpy dtype. Raises KeyError where ONNX has none."""
    return _BY_DTYPE[np.dtype(dtype)][0]


def onnx_name(dtype: np.dtype) -> str:
    """The ONNX name of a numpy dtype, "float" for float32, "string" for object; numpy's name where ONNX has none."""
    entry = _BY_DTYPE.get(np.dtype(dtype))
    return np.dtype(dtype).name if entry is None else entry[1]


def parse_dtype(dtype: object) -> np.dtype:
    """A numpy dtype from a dtype, a scalar type, or a name in ONNX's or numpy's spelling.

    Raises:
        TypeError: The dtype is not one that ONNX has.
    """
    if isinstance(dtype, str) and dtype in _BY_NAME:
        return _BY_NAME[dtype]
    try:
        found: np.dtype = np.dtype(dtype)  # type: ignore[call-overload]
    except TypeError as error:
        raise TypeError(f"{dtype!r} is no dtype; known are {', '.join(sorted(_BY_NAME))}") from error
    if found.kind in "US":
        return STRING
    if found not in _BY_DTYPE:
        raise TypeError(f"ONNX has no element type for dtype {found}; known are {', '.join(sorted(_BY_NAME))}")
    return found
