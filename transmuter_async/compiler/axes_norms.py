"""How reductions, softmax and normalisations treat followed axes; see `axes`. Sources: ai.onnx 1 to 24."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from transmuter_async.compiler.axes import (
    GARBAGE,
    NAN,
    WILD,
    Atom,
    Axis,
    Follower,
    Mixing,
    Rule,
    State,
    Tensor,
    Undecided,
    constant,
    labels,
    plain,
    size_of,
    within,
)
from transmuter_async.compiler.axes_rules import attribute, axes_of, blurred, combined, product_state, taint_of
from transmuter_async.graph import Node

__all__ = ["NORMS"]

NORMS: dict[tuple[str, str], Rule] = {}


def rule(*names: str, domain: str = "") -> Callable[[Rule], Rule]:
    """Register a rule for some operators."""

    def register(function: Rule) -> Rule:
        for name in names:
            NORMS[domain, name] = function
        return function

    return register


# --- reductions and normalisation -------------------------------------------------------------------------------------


def reduced(follower: Follower, axis: Axis, op: str) -> None:
    """Judge a reduction over an axis."""
    batch = follower.batch([axis])
    if batch is not None:
        raise Mixing(batch, "reduces over the rows of the batch")
    for atom in axis:
        if atom.dim is None:
            continue
        state = atom.state
        neutral = {
            "ReduceSum": state.is_constant(0),
            "ReduceL1": state.is_constant(0),
            "ReduceL2": state.is_constant(0),
            "ReduceSumSquare": state.is_constant(0),
            "ReduceProd": state.is_constant(1),
            "ReduceMax": state.hidden(),
            "ReduceLogSumExp": state.hidden(),
            "ArgMax": state.hidden(),
        }.get(op, False)
        if not neutral:
            what = (
                "divides by the padded length"
                if op == "ReduceMean"
                else "reduces over the padding, which no mask covers"
            )
            raise Mixing(atom.dim, what)
        if op in ("ReduceMax", "ReduceLogSumExp", "ArgMax"):
            follower.rely_on(atom)


REDUCTIONS = "L1 L2 LogSum LogSumExp Max Mean Min Prod Sum SumSquare".split()


def reduction(follower: Follower, node: Node, values: list[Any]) -> list[Any]:
    """Reduce…, over axes given as attribute or input."""
    tensor = follower.as_data(follower.tensor(values[0]))
    axes = follower.ranked(tensor)
    empty = len(values) < 2 or values[1] is None or (isinstance(values[1], np.ndarray) and values[1].size == 0)
    if attribute(node, "axes", None) is None and empty and attribute(node, "noop_with_empty_axes", 0):
        return [tensor]
    chosen = axes_of(node, values if not empty else values[:1], len(axes))
    out = []
    for at, axis in enumerate(axes):
        if at in chosen:
            reduced(follower, axis, node.op_type)
            if attribute(node, "keepdims", 1):
                out.append(plain(1))
        else:
            out.append(_after(follower, axis, node.op_type, tensor.kind))
    return [Tensor(tuple(out), None, tensor.taint, tensor.fed)]


def _after(follower: Follower, axis: Axis, op: str, kind: str = "") -> Axis:
    """An axis that a reduction keeps. An integer sum may wrap, so bounds are kept for floats only."""
    atoms = []
    for atom in axis:
        if atom.dim is None:
            atoms.append(atom)
            continue
        state = _reduced_state(atom.state)
        low = atom.state.low if atom.state.kind == "garbage" else atom.state.span[0]
        real = kind == "f" and atom.state.finite
        if op == "ReduceProd":
            state = GARBAGE if atom.state.finite else WILD
        elif op == "ReduceLogSum":
            state = GARBAGE if low > 0 and real or follower.kind(atom.dim) == "batch" else WILD
        elif op in ("ReduceL1", "ReduceL2", "ReduceSumSquare"):
            state = within((0.0, math.inf)) if real else state
        elif op == "ReduceLogSumExp":
            state = GARBAGE if atom.state.finite else WILD
        elif real and state.kind == "garbage":
            low, high = atom.state.span
            state = within((0.0 if low >= 0 else -math.inf, math.inf) if op == "ReduceSum" else (low, high))
        atoms.append(replace(atom, state=state))
    return tuple(atoms)


def _reduced_state(state: State) -> State:
    if state.is_constant(0):
        return state
    return GARBAGE if state.finite or state.kind == "masked" and np.isfinite(state.value) else WILD


for _name in REDUCTIONS:
    NORMS["", "Reduce" + _name] = reduction


@rule("ArgMax", "ArgMin")
def arg_reduction(follower: Follower, node: Node, values: list[Any]) -> list[Any]:
    """The index of an extreme along one axis."""
    tensor = follower.as_data(follower.tensor(values[0]))
    axes = follower.ranked(tensor)
    at = int(attribute(node, "axis", 0)) % len(axes)
    if labels([axes[at]]) and attribute(node, "select_last_index", 0):
        raise Mixing(min(labels([axes[at]])), "takes the last of equal elements, which may be padding")
    reduced(follower, axes[at], node.op_type)
    keep = [plain(1)] if attribute(node, "keepdims", 1) else []
    count = size_of(axes[at]).constant()
    found = GARBAGE if count is None or labels([axes[at]]) else within((0.0, float(count - 1)))
    out = [tuple(a if a.dim is None else Atom(a.size, a.dim, found) for a in axis) for axis in axes]
    out[at : at + 1] = keep
    return [Tensor(tuple(out), None, tensor.taint, tensor.fed)]


@rule("Softmax", "LogSoftmax", "Hardmax")
def softmax(follower: Follower, node: Node, values: list[Any]) -> list[Any]:
    """A distribution along an axis; below opset 13 along all axes from it on."""
    tensor = follower.as_data(follower.tensor(values[0]))
    axes = list(follower.ranked(tensor))
    at = int(attribute(node, "axis", 1 if node.opset < 13 else -1)) % max(len(axes), 1)
    over = range(at, len(axes)) if node.opset < 13 else (at,)
    out: list[Axis] = []
    for index, axis in enumerate(axes):
        if index not in over:
            out.append(tuple(a if a.dim is None else replace(a, state=_all_alike(a.state, node.op_type)) for a in axis))
            continue
        batch = follower.batch([axis])
        if batch is not None:
            raise Mixing(batch, "normalises over the rows of the batch")
        atoms = []
        for atom in axis:
            if atom.dim is None:
                atoms.append(atom)
                continue
            if node.op_type == "Hardmax" or not atom.state.hidden():
                weak = atom.state.kind == "masked"
                why = (
                    f"the mask adds only {float(atom.state.value):g} to padding"
                    if weak
                    else "no mask covers the padding"
                )
                raise Mixing(atom.dim, f"normalises over it, and {why}")
            follower.rely_on(atom)
            zero = constant(np.float32(0)) if node.op_type == "Softmax" else State("masked", atom.state.value)
            atoms.append(replace(atom, state=zero))
        out.append(tuple(atoms))
    return [Tensor(tuple(out), None, tensor.taint, tensor.fed)]


def _all_alike(state: State, op: str) -> State:
    """Beyond the length of another axis than the one normalised over: a row of all -inf gives NaN."""
    if not np.isfinite(state.value) if state.kind in ("constant", "masked") else state.kind == "wild":
        return WILD if state.kind == "wild" or op != "Softmax" else NAN
    return GARBAGE if op == "LogSoftmax" else within((0.0, 1.0))


@rule("LayerNormalization", "RMSNormalization")
def layer_normalization(follower: Follower, node: Node, values: list[Any]) -> list[Any]:
    """Normalises over the axes from `axis` on."""
    tensors = [follower.as_data(follower.tensor(v)) for v in values if v is not None]
    axes = follower.ranked(tensors[0])
    at = int(attribute(node, "axis", -1)) % len(axes)
    for axis in axes[at:]:
        if labels([axis]):
            raise Mixing(min(labels([axis])), "normalises over it")
    for other in tensors[1:]:
        if other.dims:
            raise Undecided("scale or bias carry a followed axis")
    out = tuple(map(blurred if attribute(node, "epsilon", 1e-5) > 0 else _wild, axes))
    taint, fed = taint_of(*tensors), tensors[0].fed
    statistics = Tensor((*out[:at], *[plain(1)] * (len(axes) - at)), None, taint, fed)
    return [Tensor(out, None, taint, fed), statistics, statistics][: max(1, len(node.outputs))]


@rule("SkipLayerNormalization", "SkipSimplifiedLayerNormalization", domain="com.microsoft")
def skip_layer_normalization(follower: Follower, node: Node, values: list[Any]) -> list[Any]:
    """Normalises the sum of two inputs over the last axis."""
    tensors = [follower.as_data(follower.tensor(v)) for v in values if v is not None]
    axes = combined(follower, [follower.ranked(tensors[0]), follower.ranked(tensors[1])], product_state)
    if labels([axes[-1]]) or any(t.dims for t in tensors[2:]):
        raise Mixing(min(labels(axes)), "normalises over it")
    whole = Tensor(tuple(map(blurred, axes)), None, taint_of(*tensors), True)
    statistics = replace(whole, axes=(*(whole.axes or ())[:-1], plain(1)))
    return [whole, statistics, statistics, whole][: max(1, len(node.outputs))]


@rule("SimplifiedLayerNormalization")
def simplified_layer_normalization(follower: Follower, node: Node, values: list[Any]) -> list[Any]:
    """RMS normalisation, as exporters of the com.microsoft domain put it into the standard one."""
    return layer_normalization(follower, node, values)


@rule("BatchNormalization")
def batch_normalization(follower: Follower, node: Node, values: list[Any]) -> list[Any]:
    """At inference a scale and shift per channel."""
    tensors = [follower.as_data(follower.tensor(v)) for v in values if v is not None]
    axes = follower.ranked(tensors[0])
    if attribute(node, "training_mode", 0) and tensors[0].dims:
        raise Mixing(min(tensors[0].dims), "in training mode it takes mean and variance from the whole batch")
    if labels(axes[1:2]) or any(t.dims for t in tensors[1:]):
        raise Undecided("the channels carry a followed axis")
    return [Tensor(tuple(map(blurred, axes)), None, taint_of(*tensors), tensors[0].fed)] * max(1, len(node.outputs))


@rule("InstanceNormalization", "GroupNormalization", "LRN")
def channel_normalization(follower: Follower, node: Node, values: list[Any]) -> list[Any]:
    """Statistics over all axes but the first."""
    tensors = [follower.as_data(follower.tensor(v)) for v in values if v is not None]
    axes = follower.ranked(tensors[0])
    if labels(axes[1:]) or any(t.dims for t in tensors[1:]):
        raise Mixing(min(labels(axes[1:]) or tensors[0].dims), "takes statistics over it")
    return [Tensor(tuple(map(blurred, axes)), None, taint_of(*tensors), tensors[0].fed)]


@rule("LpNormalization", "MeanVarianceNormalization")
def axis_normalization(follower: Follower, node: Node, values: list[Any]) -> list[Any]:
    """Statistics along an axis, or several."""
    tensor = follower.as_data(follower.tensor(values[0]))
    axes = follower.ranked(tensor)
    many = node.op_type == "MeanVarianceNormalization"
    chosen = attribute(node, "axes", (0, 2, 3)) if many else (attribute(node, "axis", -1),)
    for at in chosen:
        if labels([axes[at]]):
            raise Mixing(min(labels([axes[at]])), "normalises over it")
    out = tuple(map(blurred if many else _wild, axes))  # the norm of a row of zeros is zero
    return [Tensor(out, None, tensor.taint, tensor.fed)]


def _wild(axis: Axis) -> Axis:
    """The axis after a division by what padding may make zero."""
    return tuple(a if a.dim is None else Atom(a.size, a.dim, WILD) for a in axis)


@rule("CumSum")
def cumulative_sum(follower: Follower, node: Node, values: list[Any]) -> list[Any]:
    """Forwards, what stands behind is not read."""
    tensor = follower.as_data(follower.tensor(values[0]))
    axes = list(follower.ranked(tensor))
    if not isinstance(values[1], np.ndarray):
        raise Undecided("its axis is not known")
    at = int(values[1].reshape(())) % len(axes)
    batch = follower.batch([axes[at]])
    if batch is not None:
        raise Mixing(batch, "sums over the rows of the batch")
    if labels([axes[at]]) and (attribute(node, "reverse", 0) or len(axes[at]) > 1):
        raise Mixing(min(labels([axes[at]])), "sums from the end, so through the padding")
    out = [blurred(axis) if index == at else _after(follower, axis, "ReduceSum") for index, axis in enumerate(axes)]
    return [Tensor(tuple(out), None, tensor.taint, tensor.fed)]
