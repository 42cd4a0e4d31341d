"""The geometry of sliding windows: padding, output sizes, and window views, shared by convolution and pooling."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import product
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from transmuter_async.operators.numeric import spatial
from transmuter_async.operators.registry import is_host

__all__ = ["Windows", "isolate", "pad_spatial", "separable", "taps", "view", "windows"]


@dataclass(frozen=True, slots=True)
class Windows:
    """Where the windows over the spatial axes lie.

    Attributes:
        sizes: Input size of each spatial axis.
        kernel: Elements of the window.
        strides: Steps between windows.
        dilations: Steps within a window.
        low: Padding before.
        high: Padding after, as the attributes say.
        outputs: Number of windows.
    """

    sizes: tuple[int, ...]
    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    low: tuple[int, ...]
    high: tuple[int, ...]
    outputs: tuple[int, ...]

    @property
    def reach(self) -> tuple[int, ...]:
        """Padding after that the last window really needs: `ceil_mode` may need more than `high`, strides less."""
        return tuple(
            max(0, (out - 1) * stride + (k - 1) * dilation + 1 - size - low)
            for size, k, stride, dilation, low, out in zip(
                self.sizes, self.kernel, self.strides, self.dilations, self.low, self.outputs, strict=True
            )
        )

    def counts(self, include_pad: bool) -> np.ndarray:
        """Elements of each window, float64 of shape `outputs`; with `include_pad` those of the stated padding too."""
        total = np.ones((), np.float64)
        for axis, (size, k, low, high) in enumerate(zip(self.sizes, self.kernel, self.low, self.high, strict=True)):
            first = np.arange(self.outputs[axis])[:, None] * self.strides[axis]
            places = first + np.arange(k)[None, :] * self.dilations[axis]
            inside = places < size + low + high if include_pad else (places >= low) & (places < low + size)
            total = np.multiply.outer(total, inside.sum(axis=1).astype(np.float64))
        return total


def windows(
    shape: Sequence[int],
    kernel: Sequence[int],
    *,
    strides: Sequence[int] | None,
    dilations: Sequence[int] | None,
    pads: Sequence[int] | None,
    auto_pad: str,
    ceil_mode: int = 0,
    partial: bool = False,
) -> Windows:
    """The windows over `shape` (batch, channels, then the spatial axes).

    `auto_pad` SAME_UPPER and SAME_LOWER give ceil(size / stride) windows, the odd element of padding at the end or the
    beginning. With `ceil_mode` a window that would start in the padding after the data is dropped, in every version:
    it would hold no data (onnxruntime does so too; the standard says it since version 19). With VALID the standard's
    formula gives no more windows for `ceil_mode` (onnxruntime adds one that reaches beyond the data).

    A kernel larger than the padded input is refused; with `partial` (pooling) it is not: an input that lacks less than
    one stride has one window that reaches beyond, one that lacks more has none. The standard's formula leaves this open,
    onnxruntime does so.

    Raises:
        ValueError: Attributes have a wrong length or value, or the kernel is larger than the padded input.
    """
    sizes = tuple(int(size) for size in shape[2:])
    rank = len(sizes)
    kernel = spatial(kernel, rank, 1, "kernel_shape")
    strides = spatial(strides, rank, 1, "strides")
    dilations = spatial(dilations, rank, 1, "dilations")
    if min(kernel + strides + dilations, default=1) < 1:
        raise ValueError(f"kernel {kernel}, strides {strides} and dilations {dilations} must be positive")
    extents = tuple((k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True))
    low, high = [0] * rank, [0] * rank
    outputs = []
    if auto_pad in ("", "NOTSET"):
        flat = spatial(pads, 2 * rank, 0, "pads")
        if min(flat, default=0) < 0:
            raise ValueError(f"pads {flat} must not be negative")
        low, high = list(flat[:rank]), list(flat[rank:])
    elif auto_pad not in ("SAME_UPPER", "SAME_LOWER", "VALID"):
        raise ValueError(f"auto_pad {auto_pad!r} is none of NOTSET, SAME_UPPER, SAME_LOWER, VALID")
    for axis, (size, extent, stride) in enumerate(zip(sizes, extents, strides, strict=True)):
        if auto_pad.startswith("SAME"):
            out = -(-size // stride)
            total = max(0, (out - 1) * stride + extent - size) if out else 0
            low[axis] = total // 2 if auto_pad == "SAME_UPPER" else total - total // 2
            high[axis] = total - low[axis]
        else:
            room = size + low[axis] + high[axis] - extent
            ceil = ceil_mode and auto_pad != "VALID"
            out = (-(-room // stride) if ceil else room // stride) + 1
            if partial and room < 0 and not ceil:
                # onnxruntime's division rounds towards zero: an input that lacks less than a step has one window.
                out = 1 - -room // stride
            if ceil and (out - 1) * stride >= size + low[axis]:
                out -= 1
            if out < 0 or (out == 0 and size + low[axis] + high[axis] > 0 and not partial):
                raise ValueError(
                    f"the window of {extent} along spatial axis {axis} is larger than the padded input "
                    f"({size} + {low[axis]} + {high[axis]})"
                )
        outputs.append(out)
    return Windows(sizes, kernel, strides, dilations, tuple(low), tuple(high), tuple(outputs))


def pad_spatial(x: Any, low: Sequence[int], high: Sequence[int], value: Any = 0, *, first: int = 2) -> Any:
    """`x` with `value` around its spatial axes, which start at `first`; negative amounts crop."""
    if not any(low) and not any(high):
        return x
    value = np.asarray(value, x.dtype)
    if not is_host(x):
        around = [(before, after, 0) for before, after in zip(low, high, strict=True)]
        config = [(0, 0, 0)] * first + around + [(0, 0, 0)] * (x.ndim - first - len(around))
        return lax.pad(x, jnp.asarray(value), config)
    sizes, stop = x.shape[first : first + len(low)], first + len(low)
    crop = tuple(slice(max(0, -a), n - max(0, -b)) for a, b, n in zip(low, high, sizes, strict=True))
    x = x[(slice(None),) * first + crop]
    grown = (n + max(0, a) + max(0, b) for a, b, n in zip(low, high, x.shape[first:stop], strict=True))
    out = np.full((*x.shape[:first], *grown, *x.shape[stop:]), value, x.dtype)
    inner = tuple(slice(max(0, a), max(0, a) + n) for a, n in zip(low, x.shape[first:stop], strict=True))
    out[(slice(None),) * first + inner] = x
    return out


def isolate(x: Any) -> Any:
    """`x`, kept from being fused into what follows: XLA would compute its producer once for each tap."""
    return x if is_host(x) else lax.optimization_barrier(x)


def taps(padded: Any, w: Windows, *, first: int = 2) -> Iterator[tuple[tuple[int, ...], Any]]:
    """Each place of the kernel with the elements that it meets in all windows: (place, (N, C, *outputs)).

    With `first=1` the channels are the last axis.
    """
    for place in product(*(range(k) for k in w.kernel)):
        cut = tuple(
            slice(p * d, p * d + (out - 1) * s + 1 if out else p * d, s)
            for p, d, s, out in zip(place, w.dilations, w.strides, w.outputs, strict=True)
        )
        yield place, padded[(slice(None),) * first + cut]


def separable(x: Any, w: Windows, combine: Callable[[Any, Any], Any], fill: Any = 0, *, first: int = 2) -> Any:
    """Reduce each window with an associative `combine`, axis after axis: sum(kernel) steps instead of prod(kernel).

    Args:
        x: Not padded yet: each axis is padded just before it is reduced, which leaves less to pad, and which XLA does twice
            as fast as all axes at once.
        w: The windows.
        combine: numpy's or jax.numpy's maximum, add, ...
        fill: What is around `x`, neutral for `combine`.
        first: The first spatial axis.
    """
    result = x
    for axis, (k, s, out) in enumerate(zip(w.kernel, w.strides, w.outputs, strict=True)):
        if k == 1 and s == 1 and w.low[axis] == 0 and x.shape[first + axis] == out:
            continue
        # In the outermost axis whole rows are missing: XLA joins such padding with the steps, and nothing is copied for it.
        # In another one it would ask at each element.
        outermost = axis == 0 and first + 1 < x.ndim
        result = (_steps_at_edges if outermost else _steps_of_padded)(result, w, axis, combine, fill, first)
    return result


def _steps_of_padded(x: Any, w: Windows, axis: int, combine: Callable[[Any, Any], Any], fill: Any, first: int) -> Any:
    """One axis reduced: every tap is a part of the padded input."""
    low, high = ([n if i == axis else 0 for i, n in enumerate(ends)] for ends in (w.low, w.reach))
    source = isolate(pad_spatial(x, low, high, fill, first=first))
    before = (slice(None),) * (first + axis)
    out, s = w.outputs[axis], w.strides[axis]
    starts = (tap * w.dilations[axis] for tap in range(w.kernel[axis]))
    return reduce(combine, (source[(*before, slice(at, at + (out - 1) * s + 1 if out else at, s))] for at in starts))


def _steps_at_edges(x: Any, w: Windows, axis: int, combine: Callable[[Any, Any], Any], fill: Any, first: int) -> Any:
    """One axis reduced: every tap is a part of the input, with `fill` for the windows in which it meets nothing."""
    source = isolate(x)
    before = (slice(None),) * (first + axis)
    out, s, size = w.outputs[axis], w.strides[axis], w.sizes[axis]
    parts = []
    for tap in range(w.kernel[axis]):
        at = tap * w.dilations[axis] - w.low[axis]
        begin = min(out, max(0, -(at // s)))  # the first window whose tap is not before the input
        end = max(begin, min(out, (size - 1 - at) // s + 1))  # and the first after it whose tap is behind
        part = source[(*before, slice(at + begin * s, at + (end - 1) * s + 1, s) if end > begin else slice(0, 0))]
        low, high = ([0] * axis + [n] for n in (begin, out - end))
        parts.append(pad_spatial(part, low, high, fill, first=first))
    return reduce(combine, parts)


def view(padded: np.ndarray, w: Windows) -> np.ndarray:
    """A numpy view (N, C, *outputs, *kernel) of all windows, without a copy."""
    steps = padded.strides[2:]
    return np.lib.stride_tricks.as_strided(
        padded,
        (*padded.shape[:2], *w.outputs, *w.kernel),
        (
            *padded.strides[:2],
            *(step * s for step, s in zip(steps, w.strides, strict=True)),
            *(step * d for step, d in zip(steps, w.dilations, strict=True)),
        ),
        writeable=False,
    )
