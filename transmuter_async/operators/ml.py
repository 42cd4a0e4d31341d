"""ai.onnx.ml: encoders, scalers and maps. Trees are in `ml_trees.py`, linear models and SVMs in `ml_linear.py`.

Half-defined cases follow onnxruntime's kernels. Strings and maps live on the host: an operator that makes strings out
of a traced tensor asks for its value, which ends the segment before the node.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from transmuter_async.operators.context import Context
from transmuter_async.operators.ml_scores import as_rows
from transmuter_async.operators.numeric import device_index
from transmuter_async.operators.registry import operator, xp

ML = "ai.onnx.ml"


@operator("ArrayFeatureExtractor", since_version=1, domain=ML)
def array_feature_extractor_1(X: Any, Y: Any, /, *, context: Context) -> Any:
    """Columns `Y` of the last axis of `X`. Rank 1 gives `(1, len(Y))`, as onnxruntime keeps it for old models."""
    if X.ndim == 0:
        raise ValueError("X is a scalar; it needs an axis to select from")
    np_ = xp(X, Y)
    indices, valid = context.bounded(np_.reshape(Y, (-1,)), X.shape[-1], input="Y", axis=X.ndim - 1)
    rows = np_.reshape(X, (1, -1)) if X.ndim == 1 else X
    return context.fill_invalid(np_.take(rows, device_index(indices, X.shape[-1]), axis=-1, mode="clip"), valid)


@operator("Binarizer", since_version=1, domain=ML)
def binarizer_1(X: Any, /, *, threshold: float = 0.0) -> Any:
    """1 where `X > threshold`, else 0 (NaN gives 0), in the dtype of `X`."""
    limit = np.float32(threshold)
    compared = X if X.dtype.kind != "f" else X.astype(np.result_type(X.dtype, np.float32))
    if X.dtype.kind in "iu":
        compared = X.astype(np.float64)
    return (compared > limit.astype(compared.dtype)).astype(X.dtype)


@operator("CastMap", since_version=1, domain=ML, host=True)
def cast_map_1(
    X: Mapping[int, Any], /, *, cast_to: str = "TO_FLOAT", map_form: str = "DENSE", max_map: int = 1
) -> np.ndarray:
    """A map from int64 as a row `(1, n)`: in key order (DENSE), or at its keys up to `max_map` (SPARSE).

    Missing keys of the sparse form are 0, or "0.f" for strings, as in onnxruntime.
    """
    dtype, missing, convert = _map_cast(cast_to)
    keys = sorted(X)
    if map_form == "DENSE":
        values = [convert(X[key]) for key in keys]
    elif map_form == "SPARSE":
        if keys and keys[0] < 0:
            raise ValueError(f"the sparse form has no place for the negative key {keys[0]}")
        values = [missing] * max_map
        for key in keys:
            if key < max_map:
                values[key] = convert(X[key])
    else:
        raise ValueError(f"map_form {map_form!r} is neither DENSE nor SPARSE")
    return np.asarray(values, dtype=dtype).reshape(1, -1)


def _map_cast(cast_to: str) -> tuple[Any, Any, Any]:
    if cast_to == "TO_FLOAT":
        return np.float32, 0.0, np.float32
    if cast_to == "TO_INT64":
        return np.int64, 0, int
    if cast_to == "TO_STRING":
        return object, "0.f", lambda value: value if isinstance(value, str) else f"{float(value):.6f}"
    raise ValueError(f"cast_to {cast_to!r} is none of TO_FLOAT, TO_INT64, TO_STRING")


@operator("CategoryMapper", since_version=1, domain=ML)
def category_mapper_1(
    X: Any,
    /,
    *,
    cats_int64s: tuple[int, ...] | None = None,
    cats_strings: tuple[str, ...] | None = None,
    default_int64: int = -1,
    default_string: str = "_Unused",
    context: Context,
) -> Any:
    """Strings to integers or integers to strings by two lists of equal length."""
    if cats_int64s is None or cats_strings is None or len(cats_int64s) != len(cats_strings):
        raise ValueError("cats_int64s and cats_strings have to be given with equal lengths")
    if X.dtype == object:
        return _look_up(X, cats_strings, np.asarray(cats_int64s, np.int64), np.int64(default_int64))
    values = context.needs(X, 0, "its integers, because they become strings")
    return _look_up(values, cats_int64s, np.asarray(cats_strings, object), default_string)


def _look_up(values: np.ndarray, keys: Sequence[Any], results: np.ndarray, default: Any) -> np.ndarray:
    """`results[i]` for each value that equals `keys[i]` (the last one of equal keys), else `default`. Host only."""
    places = {key: place for place, key in enumerate(keys)}
    found = np.fromiter((places.get(value, -1) for value in values.reshape(-1).tolist()), np.int64, values.size)
    filled = np.concatenate([results, np.asarray([default], dtype=results.dtype)])
    return np.asarray(filled[found].reshape(values.shape))


@operator("DictVectorizer", since_version=1, domain=ML, host=True)
def dict_vectorizer_1(
    X: Mapping[Any, Any],
    /,
    *,
    int64_vocabulary: tuple[int, ...] | None = None,
    string_vocabulary: tuple[str, ...] | None = None,
) -> np.ndarray:
    """The values of a map in the order of the vocabulary, `(1, n)`; zeros (empty strings) for what is missing."""
    vocabulary: Sequence[Any] | None = int64_vocabulary if string_vocabulary is None else string_vocabulary
    if vocabulary is None:
        raise ValueError("one of int64_vocabulary and string_vocabulary has to be given")
    dtype = _element_type(next(iter(X.values()), None))
    row = np.full((1, len(vocabulary)), "" if dtype.kind == "O" else 0, dtype=dtype)
    for place, key in enumerate(vocabulary):
        if key in X:
            row[0, place] = X[key]
    return row


def _element_type(value: Any) -> np.dtype:
    """dtype of a map's values; Python floats are float, as every export has them; an empty map has no say."""
    if isinstance(value, str):
        return np.dtype(object)
    if isinstance(value, np.generic | np.ndarray):
        return value.dtype
    return np.dtype(np.int64 if isinstance(value, int) else np.float32)


@operator("FeatureVectorizer", since_version=1, domain=ML)
def feature_vectorizer_1(*X: Any, inputdimensions: tuple[int, ...] | None = None) -> Any:
    """The inputs side by side as float32, each cut or padded with zeros to its `inputdimensions`."""
    np_ = xp(*X)
    sizes = tuple(int(as_rows(x).shape[1]) for x in X) if inputdimensions is None else inputdimensions
    if len(sizes) != len(X):
        raise ValueError(f"{len(X)} inputs, but {len(sizes)} inputdimensions")
    parts = []
    for x, size in zip(X, sizes, strict=True):
        rows = as_rows(x)[:, :size]
        parts.append(np_.pad(rows, ((0, 0), (0, size - rows.shape[1]))))
    return np_.concatenate(parts, axis=1)


@operator("Imputer", since_version=1, domain=ML)
def imputer_1(
    X: Any,
    /,
    *,
    imputed_value_floats: tuple[float, ...] | None = None,
    imputed_value_int64s: tuple[int, ...] | None = None,
    replaced_value_float: float = 0.0,
    replaced_value_int64: int = 0,
) -> Any:
    """Replace one value (which may be NaN) by one value, or by one for each column."""
    floating = X.dtype.kind == "f"
    values = imputed_value_floats if floating else imputed_value_int64s
    if not values:
        raise ValueError(f"no imputed values are given for {X.dtype}")
    if X.ndim == 0:
        raise ValueError("X is a scalar; it has to be (rows, features)")
    np_ = xp(X)
    replaced = X.dtype.type(np.float32(replaced_value_float) if floating else replaced_value_int64)
    missing = np_.isnan(X) if floating and np.isnan(replaced) else np_.equal(X, replaced)
    columns = X.shape[0] if X.ndim == 1 else X.shape[1]
    fill = np.asarray(values, dtype=np.float32 if floating else np.int64).astype(X.dtype)
    if len(values) == columns and X.ndim > 1:
        fill = fill.reshape((columns,) + (1,) * (X.ndim - 2))
    elif len(values) != columns:
        fill = fill[0]
    return np_.where(missing, fill, X)


@operator("LabelEncoder", since_version=1, domain=ML)
def label_encoder_1(
    X: Any,
    /,
    *,
    classes_strings: tuple[str, ...] | None = None,
    default_int64: int = -1,
    default_string: str = "_Unused",
    context: Context,
) -> Any:
    """Strings to their places in `classes_strings`, or places to strings."""
    classes = () if classes_strings is None else classes_strings
    places = tuple(range(len(classes)))
    if X.dtype == object:
        return _look_up(X, classes, np.asarray(places, np.int64), np.int64(default_int64))
    values = context.needs(X, 0, "its integers, because they become strings")
    return _look_up(values, places, np.asarray(classes, object), default_string)


@operator("LabelEncoder", since_version=2, domain=ML)
def label_encoder_2(
    X: Any,
    /,
    *,
    default_float: float = -0.0,
    default_int64: int = -1,
    default_string: str = "_Unused",
    keys_floats: tuple[float, ...] | None = None,
    keys_int64s: tuple[int, ...] | None = None,
    keys_strings: tuple[str, ...] | None = None,
    values_floats: tuple[float, ...] | None = None,
    values_int64s: tuple[int, ...] | None = None,
    values_strings: tuple[str, ...] | None = None,
    context: Context,
) -> Any:
    """Keys to values, both of any of three types. NaN is equal to nothing until version 4, as in onnxruntime."""
    keys = _one_list("keys", None, keys_floats, keys_int64s, keys_strings)
    values = _one_list("values", None, values_floats, values_int64s, values_strings)
    default = {"O": default_string, "f": np.float32(default_float), "i": np.int64(default_int64)}[values.dtype.kind]
    return _encode(X, keys, values, default, False, context)


@operator("LabelEncoder", since_version=4, domain=ML)
def label_encoder_4(
    X: Any,
    /,
    *,
    default_float: float = -0.0,
    default_int64: int = -1,
    default_string: str = "_Unused",
    default_tensor: np.ndarray | None = None,
    keys_floats: tuple[float, ...] | None = None,
    keys_int64s: tuple[int, ...] | None = None,
    keys_strings: tuple[str, ...] | None = None,
    keys_tensor: np.ndarray | None = None,
    values_floats: tuple[float, ...] | None = None,
    values_int64s: tuple[int, ...] | None = None,
    values_strings: tuple[str, ...] | None = None,
    values_tensor: np.ndarray | None = None,
    context: Context,
) -> Any:
    """Keys to values. NaN is equal to NaN here; of equal keys the first one counts, as in onnxruntime."""
    keys = _one_list("keys", keys_tensor, keys_floats, keys_int64s, keys_strings)
    values = _one_list("values", values_tensor, values_floats, values_int64s, values_strings)
    if default_tensor is not None:
        default: Any = default_tensor.reshape(-1)[0]
    elif values.dtype == object:
        default = default_string
    else:
        default = values.dtype.type(default_float if values.dtype.kind == "f" else default_int64)
    return _encode(X, keys, values, default, True, context)


def _encode(X: Any, keys: np.ndarray, values: np.ndarray, default: Any, match_nan: bool, context: Context) -> Any:
    if len(keys) != len(values):
        raise ValueError(f"{len(keys)} keys, but {len(values)} values")
    if keys.dtype == object:
        return _look_up(X, keys.tolist()[::-1], values[::-1], default)
    if values.dtype == object:
        X = context.needs(X, 0, "its values, because they become strings")
    return _look_up_numbers(X, keys.astype(X.dtype), values, default, match_nan)


def _one_list(
    what: str,
    tensor: np.ndarray | None,
    floats: tuple[float, ...] | None,
    integers: tuple[int, ...] | None,
    strings: tuple[str, ...] | None,
) -> np.ndarray:
    if tensor is not None:
        return tensor.reshape(-1)
    for values, dtype in ((strings, object), (integers, np.int64), (floats, np.float32)):
        if values is not None:
            return np.asarray(values, dtype=dtype)
    raise ValueError(f"no {what} are given")


def _look_up_numbers(X: Any, keys: np.ndarray, values: np.ndarray, default: Any, match_nan: bool = False) -> Any:
    """As `_look_up` for numbers, in both forms: a binary search in the sorted keys. The first of equal keys counts."""
    np_ = xp(X)
    not_a_number = np.isnan(keys) if keys.dtype.kind == "f" else np.zeros(len(keys), bool)
    for_nan = values[not_a_number][0] if match_nan and not_a_number.any() else default
    sorted_keys, first = np.unique(keys[~not_a_number], return_index=True)
    table = np.concatenate([values[~not_a_number][first], np.asarray([default, for_nan], dtype=values.dtype)])
    missing = len(sorted_keys)
    place = np_.searchsorted(sorted_keys, X) if missing else np_.zeros(X.shape, np.int64)
    hit = np_.take(np.append(sorted_keys, sorted_keys[-1:] if missing else X.dtype.type(0)), place, mode="clip") == X
    place = np_.where(hit & (place < missing), place, missing)
    if keys.dtype.kind == "f":
        place = np_.where(np_.isnan(X), missing + 1, place)
    return np_.take(table, place, mode="clip") if np_ is not np else np.asarray(table[place])


@operator("Normalizer", since_version=1, domain=ML)
def normalizer_1(X: Any, /, *, norm: str = "MAX") -> Any:
    """Rows divided by their maximum, sum of magnitudes, or length, in float32; a row whose norm is 0 stays.

    MAX divides by the largest value, not the largest magnitude: so the standard writes it and onnxruntime does.
    """
    np_ = xp(X)
    if X.ndim not in (1, 2):
        raise ValueError(f"X has rank {X.ndim}, but has to be (features,) or (rows, features)")
    x = X.astype(np.float32)
    if x.size == 0:
        return x
    if norm == "MAX":
        size = x.max(-1, keepdims=True)
    elif norm == "L1":
        size = np_.abs(x).sum(-1, keepdims=True)
    elif norm == "L2":
        size = np_.sqrt((x * x).sum(-1, keepdims=True))
    else:
        raise ValueError(f"norm {norm!r} is none of MAX, L1, L2")
    return x / np_.where(size == 0, np_.ones_like(size), size)


@operator("OneHotEncoder", since_version=1, domain=ML)
def one_hot_encoder_1(
    X: Any,
    /,
    *,
    cats_int64s: tuple[int, ...] | None = None,
    cats_strings: tuple[str, ...] | None = None,
    zeros: int = 1,
    context: Context,
) -> Any:
    """One more axis, 1.0 at the place of each value's category. An unknown one gives zeros, with `zeros=0` an error."""
    strings = X.dtype == object
    categories: Sequence[Any] = (cats_strings if strings else cats_int64s) or ()
    if not categories:
        raise ValueError(f"no categories are given for {'strings' if strings else 'numbers'}")
    if strings:
        places: Any = _look_up(X, categories, np.arange(len(categories)), len(categories))
    else:
        keys = np.asarray(categories[::-1], np.int64)
        values = np.arange(len(categories), dtype=np.int64)[::-1]
        places = _look_up_numbers(X.astype(np.int64), keys, values, len(categories))
    valid = None
    if not zeros:
        places, valid = context.bounded(places, len(categories), input="X", axis=None)
    np_ = xp(places)
    hot = (places[..., None] == np.arange(len(categories), dtype=places.dtype)).astype(np.float32)
    return hot if valid is None else context.fill_invalid(hot, np_.expand_dims(valid, -1))


@operator("Scaler", since_version=1, domain=ML)
def scaler_1(X: Any, /, *, offset: tuple[float, ...] | None = None, scale: tuple[float, ...] | None = None) -> Any:
    """`(X - offset) * scale` by column, as float32; float64 input is computed in float64."""
    if X.ndim == 0:
        raise ValueError("X is a scalar; it has to be (rows, features)")
    columns = X.shape[0] if X.ndim == 1 else X.shape[1]
    wide = np.float64 if X.dtype == np.float64 else np.float32
    shape = (-1,) if X.ndim == 1 else (-1,) + (1,) * (X.ndim - 2)

    def constant(values: tuple[float, ...] | None, default: float, name: str) -> np.ndarray:
        table = np.asarray([default] if values is None else values, np.float32).astype(wide)
        if len(table) not in (1, columns):
            raise ValueError(f"{name} has {len(table)} entries; it needs 1 or one for each of the {columns} features")
        return table.reshape(shape) if len(table) == columns else table.reshape(())

    return ((X.astype(wide) - constant(offset, 0, "offset")) * constant(scale, 1, "scale")).astype(np.float32)


@operator("ZipMap", since_version=1, domain=ML, host=True)
def zip_map_1(
    X: np.ndarray,
    /,
    *,
    classlabels_int64s: tuple[int, ...] | None = None,
    classlabels_strings: tuple[str, ...] | None = None,
) -> list[dict[Any, np.float32]]:
    """A list with one map from label to score for each row; rank 1 is one row."""
    labels: Sequence[Any] | None = classlabels_strings or classlabels_int64s
    if not labels:
        raise ValueError("one of classlabels_int64s and classlabels_strings has to be given")
    rows = X.reshape(1, -1) if X.ndim == 1 else X
    if rows.ndim != 2 or rows.shape[1] != len(labels):
        raise ValueError(f"X has shape {X.shape}, but there are {len(labels)} class labels")
    return [dict(zip(labels, row, strict=True)) for row in rows.astype(np.float32)]
