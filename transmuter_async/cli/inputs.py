"""What `--input`, `--dim` and `--fill` mean: arrays for a graph's inputs, from files, words or chance."""

from __future__ import annotations

import argparse
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from transmuter_async.errors import InputError
from transmuter_async.graph import Model, TensorType, Value

__all__ = ["add_dim_argument", "add_input_arguments", "declared", "dims", "gather", "replacing", "specs"]

WORDS = ("random", "zeros", "ones")


def add_dim_argument(parser: argparse.ArgumentParser) -> None:
    """`--dim NAME=SIZE`."""
    parser.add_argument(
        "--dim",
        action="append",
        default=[],
        metavar="NAME=SIZE",
        help="size of an open dimension, by its name in the graph; may be given several times",
    )


def add_input_arguments(parser: argparse.ArgumentParser) -> None:
    """`--input`, `--fill`, `--dim` and `--seed`."""
    parser.add_argument(
        "-i",
        "--input",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="FILE.npy, FILE.npz, a number, random, zeros or ones; a shape may follow a word: random:1x128. "
        "random draws floats from the normal distribution, integers from 0 and 1",
    )
    parser.add_argument("--fill", choices=WORDS, help="what inputs without an --input get")
    parser.add_argument("--seed", type=int, default=0, help="of random inputs (default 0)")
    add_dim_argument(parser)


def declared(value: Value) -> str:
    """An input or output in words: `int64 (batch, 128)`."""
    kind = value.type
    if not isinstance(kind, TensorType):
        return "not declared" if kind is None else str(kind)
    shape = "any rank" if kind.shape is None else "(" + ", ".join("?" if d is None else str(d) for d in kind.shape) + ")"
    return f"{'any dtype' if kind.dtype is None else kind.dtype.name} {shape}"


def shapes(model: Model) -> list[tuple[Any, ...]]:
    """The declared shapes of the inputs, without scalars and undeclared ones."""
    return [value.type.shape for value in model.inputs if isinstance(value.type, TensorType) and value.type.shape]


def dims(model: Model, pairs: Sequence[str]) -> dict[str, int]:
    """`--dim` options as sizes by name.

    Raises:
        InputError: One can't be understood, or no input has a dimension of that name.
    """
    sizes: dict[str, int] = {}
    names = {dim for shape in shapes(model) for dim in shape if isinstance(dim, str)}
    for pair in pairs:
        name, separator, text = pair.rpartition("=")
        if not separator or not text.isdecimal():
            raise InputError(f"--dim {pair}: write NAME=SIZE, as in --dim batch=4")
        if name not in names:
            raise InputError(f"--dim {pair}: no input has it; the inputs name {sorted(names) or 'no dimensions'}")
        sizes[name] = int(text)
    return sizes


def _shape(value: Value, given: str, sizes: Mapping[str, int]) -> tuple[int, ...]:
    if given:
        parts = [] if given == "scalar" else given.split("x")
        if not all(part.isdecimal() for part in parts):
            raise InputError(f"--input {value.name}=…:{given}: write a shape as 1x128, or scalar")
        return tuple(int(part) for part in parts)
    kind = value.type
    if not isinstance(kind, TensorType) or kind.shape is None:
        raise InputError(f"the graph gives no shape for {value.name!r}: write it, as in --input {value.name}=random:1x128")
    shape = []
    for dim in kind.shape:
        size = sizes.get(dim) if isinstance(dim, str) else dim
        if size is None:
            raise InputError(
                f"{value.name!r} is {declared(value)}: say how large {'an unnamed dimension' if dim is None else dim!r} "
                f"is, with --dim {dim or 'NAME'}=SIZE or --input {value.name}=random:1x128"
            )
        shape.append(size)
    return tuple(shape)


def _made(value: Value, word: str, given: str, sizes: Mapping[str, int], random: np.random.Generator) -> np.ndarray:
    shape = _shape(value, given, sizes)
    dtype = value.type.dtype if isinstance(value.type, TensorType) else None
    if dtype is None or dtype.kind in "OUST":
        raise InputError(f"{value.name!r} is {declared(value)}: give it as --input {value.name}=FILE.npy")
    if word == "zeros":
        return np.zeros(shape, dtype)
    if word == "ones":
        return np.ones(shape, dtype)
    if dtype.kind in "iub":
        return random.integers(0, 2, shape).astype(dtype)
    return random.standard_normal(shape).astype(dtype)


def _read(value: Value, text: str) -> np.ndarray:
    path = Path(text)
    if not path.exists():
        raise InputError(f"--input {value.name}={text}: no such file, and not a number or one of {', '.join(WORDS)}")
    try:
        # Opened here: numpy leaves a file that it opened itself open where that is no ZIP archive after all.
        with path.open("rb") as file:
            loaded = np.load(file, allow_pickle=False)
            if isinstance(loaded, np.ndarray):
                return loaded
            with loaded:
                if value.name in loaded or len(loaded.files) == 1:
                    return np.asarray(loaded[value.name if value.name in loaded else loaded.files[0]])
                held = ", ".join(loaded.files)
    except (ValueError, EOFError, zipfile.BadZipFile) as error:
        raise InputError(
            f"--input {value.name}={text}: not a file of plain numpy arrays ({str(error).partition('.')[0]}); "
            "write one with numpy.save(path, array, allow_pickle=False)"
        ) from None
    raise InputError(f"{text} holds {held}, but not {value.name!r}")


def gather(model: Model, options: argparse.Namespace) -> dict[str, np.ndarray]:
    """The arrays that the options describe, by input name. Blocking: it reads files.

    Raises:
        InputError: An option that can't be understood, a name that the graph does not have, an input left out.
    """
    values = {value.name: value for value in model.inputs}
    optional = {name: Value(name) for name in model.graph.overridable}
    sizes = dims(model, options.dim)
    random = np.random.default_rng(options.seed)
    arrays: dict[str, np.ndarray] = {}
    for pair in options.input:
        name, separator, text = pair.partition("=")
        value = values.get(name) or optional.get(name)
        if not separator or value is None:
            expected = ", ".join(f"{each.name}: {declared(each)}" for each in model.inputs)
            raise InputError(f"--input {pair}: write NAME=VALUE with a name of the graph, which takes {expected}")
        word, _, given = text.partition(":")
        if word in WORDS:
            arrays[name] = _made(value, word, given, sizes, random)
        elif (number := _number(text)) is not None:
            arrays[name] = _scalar(pair, value, number)
        else:
            arrays[name] = _read(value, text)
    left = [value for value in model.inputs if value.name not in arrays]
    if left and options.fill is None:
        lines = "".join(f"\n  --input {value.name}=…   {declared(value)}" for value in left)
        raise InputError(f"inputs are missing; --fill random makes them up, or give{lines}")
    for value in left:
        arrays[value.name] = _made(value, options.fill, "", sizes, random)
    return arrays


def _scalar(pair: str, value: Value, number: float) -> np.ndarray:
    """A number as the graph wants it; never one that another dtype would change."""
    dtype = value.type.dtype if isinstance(value.type, TensorType) else None
    if dtype is not None and dtype.kind in "iub":
        low, high = (0, 1) if dtype.kind == "b" else (int(np.iinfo(dtype).min), int(np.iinfo(dtype).max))
        if number % 1 != 0 or not low <= number <= high:  # NaN and infinities have the remainder NaN
            raise InputError(f"--input {pair}: {value.name!r} is {declared(value)}, whole numbers from {low} to {high}")
        number = int(number)
    return np.asarray(number, dtype)


def replacing(model: Model, arrays: Mapping[str, np.ndarray]) -> dict[str, Any] | None:
    """What `compile` has to be told where values of the file itself are replaced: all inputs, as samples; else None."""
    return dict(arrays) if model.graph.overridable.intersection(arrays) else None


def _number(text: str) -> int | float | None:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return None


def specs(model: Model, sizes: Mapping[str, int], spec: Any) -> dict[str, Any] | None:
    """`spec(shape, dtype)` for every input where all sizes are known, None where one is open."""
    found = {}
    for value in model.inputs:
        try:
            shape = _shape(value, "", sizes)
        except InputError:
            return None
        assert isinstance(value.type, TensorType)
        if value.type.dtype is None:
            return None
        found[value.name] = spec(shape, value.type.dtype)
    return found
