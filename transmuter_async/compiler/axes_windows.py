"""How windows, quantisation, recurrences and random draws treat followed axes; see `axes`. Sources: ai.onnx 1 to 24."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from transmuter_async.compiler.axes import (
    GARBAGE,
    WILD,
    Atom,
    Axis,
    Follower,
    Mixing,
    Rule,
    Tensor,
    Undecided,
    is_unit,
    labels,
    merged,
    plain,
    size_of,
)
from transmuter_async.compiler.axes_rules import attribute, blurred, shape_key, taint_of
from transmuter_async.compiler.sizes import Poly, poly
from transmuter_async.graph import Node

__all__ = ["WINDOWS"]

WINDOWS: dict[tuple[str, str], Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register a rule for some operators."""

    def register(function: Rule) -> Rule:
        for name in names:
            WINDOWS["", name] = function
        return function

    return register


# --- windows ----------------------------------------------------------------------------------------------------------


@rule("Conv", "ConvTranspose", "ConvInteger", "QLinearConv", "MaxPool", "AveragePool", "LpPool")
def windows(follower: Follower, node: Node, values: list[Any]) -> list[Any]:
    """Windows over the axes from the third on. Padding that they read is put back to what stands beyond the edge."""
    tensor = follower.as_data(follower.tensor(values[0]))
    others = [follower.as_data(follower.tensor(v)) for v in values[1:] if v is not None]
    axes = follower.ranked(tensor)
    for other in others:
        if other.dims:
            raise Mixing(min(other.dims), "its filter or scale depends on it")
    batch = follower.batch(axes[1:])
    if batch is not None:
        raise Mixing(batch, "its windows read rows of the batch")
    if labels([axes[1]]):
        raise Mixing(min(labels([axes[1]])), "sums over it: it is the axis of the channels")
    at = 3 if node.op_type == "QLinearConv" else 1
    convolution = "Pool" not in node.op_type
    filters = follower.ranked(values[at]) if convolution else ()
    channels = axes[1]
    if node.op_type == "ConvTranspose":
        channels = plain(size_of(filters[1]) * poly(int(attribute(node, "group", 1))))
    elif convolution:
        channels = filters[0]
    kernel = attribute(node, "kernel_shape", None)
    if kernel is None:
        kernel = [size_of(axis).constant() for axis in filters[2:]]
    spatial, masks = [], []
    for index, axis in enumerate(axes[2:]):
        if not labels([axis]):
            spatial.append(_window(follower, node, size_of(axis), index, kernel))
            continue
        new, reads = _along(node, axis, index, kernel)
        state = blurred(axis)[0].state
        if reads:
            masks.append((axis[0], index + 2, size_of(axis[1:]) if len(axis) > 1 else poly(1)))
            state = WILD if node.op_type == "MaxPool" else GARBAGE  # a window that sees nothing gives -inf
        spatial.append((Atom(new[0].size, new[0].dim, state), *new[1:]))
    for atom, place, factor in masks:
        fill = _fill(follower, node, values, str(atom.dim), tensor.kind)
        if fill or not atom.state.is_constant(0):
            follower.mask(node, str(atom.dim), place, len(axes), factor, fill)
    out = Tensor((blurred(axes[0]), channels, *spatial), None, taint_of(tensor, *others), tensor.fed)
    return [out] * max(1, len(node.outputs))


def _fill(follower: Follower, node: Node, values: list[Any], dim: str, kind: str) -> str:
    """What stands beyond the edge: "" for zero, "-inf", or the name of a zero point."""
    if node.op_type == "MaxPool":
        if kind != "f":
            raise Mixing(dim, "its windows reach into the padding, and what integers count least is not known")
        return "-inf"
    if node.op_type in ("QLinearConv", "ConvInteger") and len(values) > 2 and values[2] is not None:
        if any(size_of(axis) != poly(1) for axis in follower.ranked(values[2])):
            raise Mixing(dim, "its windows reach into the padding, and its zero point is not one number")
        return node.inputs[2]
    return ""


def _along(node: Node, axis: Axis, at: int, kernel: Sequence[int | None]) -> tuple[Axis, bool]:
    """The axis after windows along a followed one, and whether those of the data read beyond its end.

    The padding stands behind the data where the followed dimension is the outermost factor. The windows of the data are
    the first ones where the number of windows is a fixed multiple of the length, whatever the length.
    """
    dim = min(labels([axis]))
    factor = size_of(axis[1:]).constant() if len(axis) > 1 else 1
    if axis[0].dim is None or len(labels([axis])) > 1 or labels([axis[1:]]) or factor is None:
        raise Mixing(dim, "its windows run over an axis in which the padding does not stand at the end")
    count, width = len(kernel), kernel[at]
    if width is None:
        raise Mixing(dim, "how wide its windows are is not known")
    stride = int(attribute(node, "strides", (1,) * count)[at])
    reach = int(attribute(node, "dilations", (1,) * count)[at]) * (width - 1)
    pads = attribute(node, "pads", (0,) * (2 * count))
    auto = attribute(node, "auto_pad", "NOTSET")
    before, after = (int(pads[at]), int(pads[at + count])) if auto == "NOTSET" else (0, 0)
    if node.op_type == "ConvTranspose":
        extra = int(attribute(node, "output_padding", (0,) * count)[at])
        if attribute(node, "output_shape", None) is not None:
            raise Mixing(dim, "its output has a fixed length")
        if auto.startswith("SAME"):
            before = max(0, reach + 1 + extra - stride)  # at most
        elif reach + 1 + extra - before - after != stride:
            raise Mixing(
                dim, f"makes of n elements not n times {stride} (pads {before} and {after}, width {reach + 1})"
            )
        return _resized(axis, factor * stride), before > 0
    missing = reach + 1 - before - after  # how far the windows stay behind the elements
    if auto.startswith("SAME"):
        total = max(0, reach + 1 - stride)
        before = total // 2 if auto == "SAME_UPPER" else total - total // 2
        missing = reach + 1 - total
    if factor % stride or not 0 < missing <= stride or attribute(node, "ceil_mode", 0):
        raise Mixing(
            dim,
            f"its windows change the length to something else than a multiple of it (stride {stride}, pads {before} and "
            f"{after}, width {reach + 1})",
        )
    reads = reach - before > stride - 1
    if reads and node.op_type == "AveragePool" and not attribute(node, "count_include_pad", 0):
        raise Mixing(dim, "divides by how many elements a window holds, and padding would count")
    if node.op_type == "MaxPool" and len(node.outputs) > 1 and node.outputs[1]:
        raise Mixing(dim, "its indices count along the padded axis")
    return _resized(axis, factor // stride), reads


def _resized(axis: Axis, factor: int) -> Axis:
    return merged([axis[0], *plain(factor)])


def _window(follower: Follower, node: Node, size: Poly, at: int, kernel: Sequence[int | None]) -> Axis:
    count = len(kernel)
    stride = attribute(node, "strides", (1,) * count)[at]
    dilation = attribute(node, "dilations", (1,) * count)[at]
    pads = attribute(node, "pads", (0,) * (2 * count))
    auto = attribute(node, "auto_pad", "NOTSET")
    known, width = size.constant(), kernel[at]
    if width is None:
        return plain(follower.fresh("window"))
    padding = 0 if auto == "VALID" else pads[at] + pads[at + count]
    reach = dilation * (width - 1)
    if node.op_type == "ConvTranspose":
        shape = attribute(node, "output_shape", None)
        extra = attribute(node, "output_padding", (0,) * count)[at]
        if shape is not None or auto.startswith("SAME"):
            return plain(size * poly(stride) if shape is None else shape[at])
        return plain(size * poly(stride) + poly(extra + reach + 1 - stride - padding))
    if stride == 1:
        return plain(size if auto.startswith("SAME") else size + poly(padding - reach))
    if known is None:
        return plain(follower.fresh("window"))
    if auto.startswith("SAME"):
        return plain(-(-known // stride))
    room = known + padding - reach - 1
    if not attribute(node, "ceil_mode", 0):
        return plain(room // stride + 1)
    windows = -(-room // stride) + 1
    return plain(windows - ((windows - 1) * stride >= known + (0 if auto == "VALID" else pads[at])))


@rule("GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool")
def global_pool(follower: Follower, node: Node, values: list[Any]) -> list[Any]:
    """All axes from the third on become one element."""
    tensor = follower.as_data(follower.tensor(values[0]))
    axes = follower.ranked(tensor)
    if labels(axes[2:]):
        raise Mixing(min(labels(axes[2:])), "pools over it")
    out = (*map(blurred, axes[:2]), *[plain(1)] * (len(axes) - 2))
    return [Tensor(out, None, tensor.taint, tensor.fed)]


@rule("Resize", "Upsample")
def resize(follower: Follower, node: Node, values: list[Any]) -> list[Any]:
    """Axes whose scale is 1 are left alone."""
    tensor = follower.as_data(follower.tensor(values[0]))
    axes = follower.ranked(tensor)
    scales = values[-1] if node.op_type == "Upsample" or node.opset < 11 else (values[2] if len(values) > 2 else None)
    sizes = values[3] if len(values) > 3 else None
    chosen = attribute(node, "axes", range(len(axes)))
    out = list(axes)
    if attribute(node, "antialias", 0) and tensor.dims and attribute(node, "axes", None) is None:
        raise Undecided("antialiasing over all axes is not followed")
    wanted = follower.sizes(sizes) if sizes is not None else None
    for place, at in enumerate(chosen):
        if wanted is not None and wanted[place] == size_of(axes[at]):
            continue
        if wanted is None and isinstance(scales, np.ndarray) and scales.size > place and scales.reshape(-1)[place] == 1:
            continue
        if labels([axes[at]]):
            raise Mixing(min(labels([axes[at]])), "resamples it")
        out[at] = plain(follower.fresh("resize") if wanted is None else wanted[place])
    return [Tensor(tuple(map(blurred, out)), None, tensor.taint, tensor.fed)]


# --- quantisation, recurrence, chance ---------------------------------------------------------------------------------


@rule("DynamicQuantizeLinear")
def dynamic_quantize(follower: Follower, node: Node, values: list[Any]) -> list[Any]:
    """Scale and zero point come from the smallest and largest of all elements."""
    tensor = follower.as_data(follower.tensor(values[0]))
    if not tensor.dims:
        scalar = Tensor((), None, tensor.taint, tensor.fed)
        return [tensor, scalar, scalar]
    axes = tuple(map(blurred, tensor.axes or ()))
    name = follower.batch(axes) or min(tensor.dims)
    why = "takes its scale from the whole tensor, all rows and the padding"
    raise Mixing(name, why, [Tensor(axes, None, tensor.taint), Tensor(()), Tensor(())])


@rule("QuantizeLinear", "DequantizeLinear")
def quantize(follower: Follower, node: Node, values: list[Any]) -> list[Any]:
    """Element by element, with a scale per tensor or per slice of a plain axis."""
    tensors = [follower.as_data(follower.tensor(v)) for v in values if v is not None]
    if any(t.dims for t in tensors[1:]) or (attribute(node, "block_size", 0) and tensors[0].dims):
        raise Mixing(min(frozenset().union(*(t.dims for t in tensors))), "its scale depends on it")
    axes = follower.ranked(tensors[0])
    return [Tensor(tuple(map(blurred, axes)), None, taint_of(*tensors), tensors[0].fed)]


@rule("LSTM", "GRU", "RNN")
def recurrent(follower: Follower, node: Node, values: list[Any]) -> list[Any]:
    """Rows of the batch axis are independent; steps follow each other."""
    tensors = [None if v is None else follower.as_data(follower.tensor(v)) for v in values]
    given = [t for t in tensors if t is not None]
    axes = follower.ranked(given[0])
    step, row = (1, 0) if attribute(node, "layout", 0) else (0, 1)
    if attribute(node, "layout", 0) and any(t.dims for t in given):
        raise Undecided("layout=1 is not followed")
    for index in (1, 2, 3, 7):
        found = tensors[index] if len(tensors) > index else None
        if found is not None and found.dims:
            raise Mixing(min(found.dims), "its weights depend on it")
    if labels([axes[2]]) or follower.batch([axes[step]]) or follower.padded([axes[row]]):
        raise Mixing(min(labels(axes)), "runs along it")
    for index, at in ((4, 0), (5, 1), (6, 1)):
        found = tensors[index] if len(tensors) > index else None
        if found is None:
            continue
        held = follower.ranked(found)
        if labels([a for i, a in enumerate(held) if i != at]) or (
            shape_key(held[at]) != shape_key(axes[row]) and labels([held[at], axes[row]])
        ):
            raise Mixing(min(labels([*held, axes[row]])), "its state is not along the same rows")
    if labels([axes[step]]):
        name = min(labels([axes[step]]))
        last = any(name and index in (1, 2) for index, name in enumerate(node.outputs))
        if attribute(node, "direction", "forward") != "forward" or last or len(axes[step]) > 1:
            raise Mixing(name, "its last state, or its way back, comes through the padding")
    directions = plain(2 if attribute(node, "direction", "forward") == "bidirectional" else 1)
    hidden = plain(int(attribute(node, "hidden_size", 0)) or follower.fresh("hidden"))
    taint = taint_of(*given)
    rows, steps = blurred(axes[row]), blurred(axes[step])
    last_state = Tensor((directions, rows, hidden), None, taint)
    return [Tensor((steps, directions, rows, hidden), None, taint), last_state, last_state][: len(node.outputs)]


@rule("Dropout")
def dropout(follower: Follower, node: Node, values: list[Any]) -> list[Any]:
    """At inference it passes its input on."""
    tensor = follower.tensor(values[0])
    training = values[2] if len(values) > 2 else None
    if training is not None and not (isinstance(training, np.ndarray) and not training.any()) and tensor.dims:
        raise Mixing(min(tensor.dims), "draws depend on the padded shape")
    return [tensor, replace(tensor, content=None)][: max(1, len(node.outputs))]


@rule("RandomNormalLike", "RandomUniformLike", "Bernoulli", "Multinomial", "RandomNormal", "RandomUniform")
def draw(follower: Follower, node: Node, values: list[Any]) -> list[Any]:
    """Random draws over a padded shape are others than over the true one."""
    shape = attribute(node, "shape", None)
    if shape is not None:
        return [Tensor(tuple(plain(n) for n in shape), fed=True)]
    tensor = follower.tensor(values[0])
    if tensor.dims and node.op_type.endswith(("Like", "Bernoulli")) and tensor.axes is not None:
        # Numbers are drawn by their place in the whole: padding that stands behind all of the data changes none.
        first = next(axis for axis in tensor.axes if not is_unit(axis))
        outermost = first[0].dim is not None and follower.kind(first[0].dim) == "padded"
        if outermost and tensor.dims == {first[0].dim} and len(labels([first[1:]])) == 0:
            if sum(bool(labels([axis])) for axis in tensor.axes) == 1:
                return [replace(tensor, axes=tuple(map(blurred, tensor.axes)), content=None, fed=True)]
    if tensor.dims:
        raise Mixing(min(tensor.dims), "draws over a padded shape are others than over the true one")
    return [replace(tensor, content=None, fed=True)]
