"""What a caller may ask of a compile: `Spec` and `Options`."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from transmuter_async.compiler.batching import Batching
from transmuter_async.errors import InputError, MisuseError
from transmuter_async.graph import parse_dtype

__all__ = ["Options", "Spec", "check_count", "check_together"]


@dataclass(frozen=True, slots=True, init=False)
class Spec:
    """Shape and dtype of an input: `Spec((1, 128), "int64")`. Dtypes by ONNX's or numpy's name.

    Raises:
        TypeError: A dtype that ONNX does not have, or a shape that is not made of integers.
        ValueError: A negative dimension.
    """

    shape: tuple[int, ...]
    dtype: np.dtype

    def __init__(self, shape: Iterable[int], dtype: object) -> None:
        dims = []
        for dim in shape:
            if isinstance(dim, bool) or not isinstance(dim, (int, np.integer)):
                raise TypeError(
                    f"a Spec's dimensions are integers, not {dim!r} in {tuple(shape)}; give sizes to compile for"
                )
            if dim < 0:
                raise ValueError(f"a Spec's dimensions are not negative: {tuple(shape)}")
            dims.append(int(dim))
        object.__setattr__(self, "shape", tuple(dims))
        object.__setattr__(self, "dtype", parse_dtype(dtype))


@dataclass(frozen=True, slots=True)
class Options:
    """Everything that decides what is compiled and how a call behaves; see `Runtime.compile` for the words.

    Attributes:
        float16: What programs compute float16 in: "float32", rounded where it leaves the program, or "float16", rounded by each
            operator; None: float32 on CPUs, unless `optimize` is off.
        outputs: Only these outputs, in this order; None for all.
        static_inputs: Inputs whose value is part of the key from the start.
        overrides: Initializers that the file lets a caller replace, and that every call gives as inputs.
        cache_size: Compiled segments kept for each position.
        min_segment_nodes: A segment after a break with fewer traced nodes runs eagerly.
        cold: Where a program is missing, "compile" it first, or "interpret" on the host and tell what is wanted.
        fold_bytes: Constant folding may grow the weights by this many bytes, on top of twice their size; 0: not at all, so
            that quantized weights stay as small as they are in the file.
        cache_dir: Folder of the disk cache, None for none.
        cache_dir_bytes: Size that its files may have in all.
        batching: Dimensions that are padded to buckets, None for none.
        sharding: "batch" splits the rows of a batch over all devices of a mesh; None for one device.
        donate: Inputs whose memory may become that of an output.
        dense: Rewrite masked select and scatter to work on all rows, where that is proved to be the same.
        autotune: Try a few other ways to compile each segment behind it, and keep the fastest of those with the same results.
        scales: Put what scales and shifts the channels of a convolution into its weights, where these may grow.
        lowerings: Names of the forms that operators take, see `operators.LOWERINGS`; None: those for the platform.
        force_breaks: Indices of prepared nodes, in the graph and in each body that runs on the host, that run as breaks
            whatever they need: `range(2, 10_000, 3)` is every third one. Nothing but the speed may change by it.
    """

    outputs: tuple[str, ...] | None = None
    static_inputs: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()
    compiler: str = "xla"
    cache_size: int = 16
    min_segment_nodes: int = 20
    breaks: str = "allow"
    cold: str = "compile"
    bounds: str = "check"
    nonfinite: str = "ignore"
    precision: str = "highest"
    float16: str | None = None
    optimize: bool = True
    fold_bytes: int = 64 << 20
    cache_dir: str | None = None
    cache_dir_bytes: int = 4 << 30
    batching: Batching | None = None
    sharding: str | None = None
    donate: tuple[str, ...] = ()
    dense: bool = True
    scales: bool = True
    lowerings: tuple[str, ...] | None = None
    force_breaks: Container[int] = ()
    autotune: bool = field(default=False, repr=False)  # the others' text is in the names of files, see `digest`

    def __post_init__(self) -> None:
        allowed = {
            "compiler": ("xla", "eager"),
            "breaks": ("allow", "error"),
            "cold": ("compile", "interpret"),
            "bounds": ("check", "clamp"),
            "nonfinite": ("ignore", "warn", "error"),
            "precision": ("highest", "platform"),
            "float16": (None, "float16", "float32"),
            "sharding": (None, "batch"),
            "autotune": (False, True),
        }
        for name, values in allowed.items():
            if getattr(self, name) not in values:
                raise ValueError(f"{name}={getattr(self, name)!r} is not one of {', '.join(map(repr, values))}")
        for name in ("cache_size", "min_segment_nodes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)!r} must be at least 1")
        both = sorted(set(self.donate) & set(self.static_inputs))
        if both:
            raise InputError(
                f"donate={both} are static_inputs, too, whose values are read on the host; name them in one of the two"
            )
        if self.sharding is not None:
            self._check_sharding()
        if self.autotune:
            self._check_autotune()

    def _check_autotune(self) -> None:
        if self.compiler == "eager":
            raise MisuseError(
                'autotune=True measures programs, and compiler="eager" has none; leave one of the two out'
            )
        if self.sharding is not None:
            raise MisuseError(
                f"autotune=True with sharding={self.sharding!r}: programs over several devices are not measured; leave one of the "
                "two out"
            )

    def _check_sharding(self) -> None:
        if self.batching is None or self.batching.batch is None:
            raise MisuseError(
                f"sharding={self.sharding!r} splits rows, and has to know which dimension counts them: add "
                'batching=Batching(batch="N"), with the name that the graph gives it'
            )
        if self.compiler == "eager":
            raise MisuseError(
                f'sharding={self.sharding!r} needs programs, and compiler="eager" has none; leave one of the two out'
            )
        if self.cache_dir is not None:
            raise MisuseError(
                f"sharding={self.sharding!r} with cache_dir={self.cache_dir!r}: programs over several devices are not kept on disk; "
                "leave one of the two out"
            )

    @property
    def refuses_breaks(self) -> str | None:
        """The option that refuses a graph that breaks, as the caller wrote it; None where breaks are allowed."""
        if self.breaks == "error":
            return "breaks='error'"
        return None if self.sharding is None else f"sharding={self.sharding!r}"


def check_count(option: str, count: object) -> None:
    """Refuse a count that is no whole number of at least one.

    Raises:
        TypeError: It is no whole number.
        ValueError: It is below one.
    """
    if isinstance(count, bool) or not isinstance(count, int | np.integer):
        raise TypeError(f"{option}={count!r} is no whole number; give one of at least 1")
    if count < 1:
        raise ValueError(f"{option}={count} must be at least 1")


def check_together(counts: Mapping[str, int], names: Mapping[str, object], *, cold: str, sharding: str | None) -> None:
    """Refuse what can be refused before a model is read.

    Args:
        counts: `max_concurrency`, `compile_after`, `replicas`.
        names: Options that take lists of names.
        cold: As of `Options`.
        sharding: As of `Options`.

    Raises:
        TypeError: A count that is no whole number.
        ValueError: A count below one.
        InputError: Something else where a list of names is meant.
        MisuseError: Options that exclude each other.
    """
    for option, count in counts.items():
        check_count(option, count)
    for option, given in names.items():
        if isinstance(given, str):
            raise InputError(f"{option}={given!r} is one text; give a list of names, [{given!r}]")
        if not isinstance(given, Collection) or not all(isinstance(name, str) for name in given):
            raise InputError(f"{option}={given!r} is no list of names; leave it out, or give one")
    if counts["compile_after"] > 1 and cold == "compile":
        raise MisuseError(
            f'compile_after={counts["compile_after"]} has calls answered without a program: add cold="interpret"'
        )
    if counts["replicas"] > 1 and sharding is not None:
        raise MisuseError(
            f"replicas={counts['replicas']} with sharding={sharding!r}: one spreads calls over the devices, the other each call; "
            "choose one"
        )
