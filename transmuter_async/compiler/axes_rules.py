"""How each operator that computes treats followed axes; see `axes` for what is proved. Sources: ai.onnx 1 to 24."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from transmuter_async.compiler.axes import (
    GARBAGE,
    JUDGES,
    WILD,
    Atom,
    Axis,
    Follower,
    Mixes,
    Mixing,
    Rule,
    State,
    Tensor,
    Undecided,
    constant,
    is_unit,
    labels,
    plain,
    size_of,
)
from transmuter_async.compiler.sizes import Poly
from transmuter_async.graph import Graph, Node

__all__ = ["RULES", "aligned", "attribute", "axes_of", "combined", "joined", "reduced", "shape_key"]

RULES: dict[tuple[str, str], Rule] = {}


def rule(*names: str, domain: str = "") -> Callable[[Rule], Rule]:
    """Register a rule for some operators."""

    def register(function: Rule) -> Rule:
        for name in names:
            RULES[domain, name] = function
        return function

    return register


def attribute(node: Node, name: str, default: Any) -> Any:
    """An attribute, or its default."""
    return node.attributes.get(name, default)


def axes_of(node: Node, values: Sequence[Any], rank: int, *, default: Any = None, index: int = 1) -> tuple[int, ...]:
    """The `axes` of a node, as attribute or as input `index`, normalised; all where it says nothing."""
    found: Any = attribute(node, "axes", None)
    if found is None and len(values) > index and values[index] is not None:
        if not isinstance(values[index], np.ndarray):
            raise Undecided("its axes are not known")
        found = [int(v) for v in values[index].reshape(-1)]
    if found is None:
        found = range(rank) if default is None else default
    if isinstance(found, int):
        found = (found,)
    return tuple(sorted(int(a) % rank for a in found)) if rank else ()


def shape_key(axis: Axis) -> tuple[tuple[str | None, Poly], ...]:
    """An axis without its states."""
    return tuple((atom.dim, atom.size) for atom in axis)


def taint_of(*tensors: Tensor) -> Mixes | None:
    """The first taint."""
    return next((t.taint for t in tensors if t.taint is not None), None)


# --- elementwise ------------------------------------------------------------------------------------------------------

UNARY = """Abs Acos Acosh Asin Asinh Atan Atanh BitwiseNot Cast Ceil Celu Cos Cosh Elu Erf Exp Floor Gelu HardSigmoid HardSwish
Identity IsInf IsNaN LeakyRelu Log Mish Neg Not Reciprocal Relu Round Selu Shrink Sigmoid Sign Sin Sinh Softplus Softsign
Sqrt Tan Tanh ThresholdedRelu Swish""".split()
NARY = """Add And BitShift BitwiseAnd BitwiseOr BitwiseXor CastLike Clip Div Equal Greater GreaterOrEqual Less LessOrEqual Max
Mean Min Mod Mul Or Pow PRelu Sub Sum Where Xor""".split()
CONTRIB = ["FastGelu", "BiasGelu", "Gelu", "QuickGelu"]
_TRUTHS = JUDGES | {"IsNaN", "IsInf"}


def aligned(follower: Follower, groups: Sequence[Sequence[Axis]]) -> list[list[Axis | None]]:
    """For each axis of a broadcast result, the axis that each operand has there; None where it has none."""
    rank = max((len(axes) for axes in groups), default=0)
    return [
        [axes[len(axes) - rank + at] if len(axes) - rank + at >= 0 else None for axes in groups] for at in range(rank)
    ]


def spread(follower: Follower, held: Sequence[Axis | None]) -> Axis:
    """The axis that operands' axes broadcast to; states are those of the first that has it."""
    wide = [axis for axis in held if axis is not None and not is_unit(axis)]
    marked = [axis for axis in wide if labels([axis])]
    if not marked:
        exact = [axis for axis in wide if size_of(axis).constant() is not None]
        return (exact or wide or [plain(1)])[0]
    for axis in wide:
        if shape_key(axis) != shape_key(marked[0]):
            name = min(labels(marked))
            raise Mixing(name, "an axis that is not the same dimension is combined with it element by element")
    return marked[0]


def combined(
    follower: Follower, groups: Sequence[Sequence[Axis]], combine: Callable[[list[State | None]], State]
) -> tuple[Axis, ...]:
    """Broadcast axes, and for each followed atom the state that `combine` makes of the operands' (None: it lacks it)."""
    out: list[Axis] = []
    for held in aligned(follower, groups):
        axis = spread(follower, held)
        if not labels([axis]):
            out.append(axis)
            continue
        atoms = []
        for at, atom in enumerate(axis):
            if atom.dim is None:
                atoms.append(atom)
                continue
            carried = [h[at] for h in held if h is not None and not is_unit(h)]
            states = [None if h is None or is_unit(h) else h[at].state for h in held]
            atoms.append(replace(atom, state=combine(states), level=all(a.level for a in carried)))
        out.append(tuple(atoms))
    return tuple(out)


def elementwise(follower: Follower, node: Node, values: list[Any]) -> list[Any]:
    """Each result from the elements at its place."""
    given = [value for value in values if value is not None]
    originals = [follower.tensor(value) for value in given]
    tensors = [follower.as_data(tensor) for tensor in originals]
    if any(tensor.axes is None for tensor in tensors):
        if any(tensor.dims for tensor in tensors):
            raise Undecided("the rank of an operand is not known")
        return [Tensor(None, taint=taint_of(*tensors))]
    scalars = [value.reshape(()) if isinstance(value, np.ndarray) and value.size == 1 else None for value in given]
    optional = [value is not None for value in values]
    guarded = None
    if node.op_type == "Where" and originals[0].content is not None and originals[0].content[0] == "isnan":
        guarded = originals[0].content[1] == node.inputs[2]

    def combine(states: list[State | None]) -> State:
        seen = [constant(s) if s is not None else state for state, s in zip(states, scalars, strict=True)]
        made = _combine(follower, node, seen, optional, guarded=bool(guarded))
        if made.kind not in ("constant", "masked"):
            return made
        marked = [(s, t) for s, t in zip(states, tensors, strict=True) if s is not None and s.kind in ("constant", "masked")]
        flat = all(s.flat and (s.kind == "masked" or follower.varying(t) <= 1) for s, t in marked)
        return replace(made, source=frozenset().union(*(s.source for s, _ in marked)), flat=flat)

    axes = combined(follower, [tensor.axes or () for tensor in tensors], combine)
    content: Any = None
    taint = taint_of(*tensors)
    if node.op_type == "Identity" or (node.op_type == "Cast" and originals[0].content and originals[0].content[0] != "isnan"):
        content, taint = originals[0].content, originals[0].taint
    elif node.op_type == "IsNaN":
        content = ("isnan", node.inputs[0])
    elif node.op_type == "GreaterOrEqual" and originals[0].content is not None and originals[0].content[0] == "iota":
        if scalars[1] is not None and scalars[1] <= 0:  # an index is never below zero: true everywhere
            true = constant(np.True_)
            axes = tuple(tuple(a if a.dim is None else replace(a, state=true, level=True) for a in axis) for axis in axes)
            taint = None
    return [Tensor(axes, content, taint, any(tensor.fed for tensor in tensors))]


def _combine(
    follower: Follower, node: Node, states: list[State | None], optional: list[bool], *, guarded: bool
) -> State:
    """The state of a result; None among `states` is data, the same with and without padding."""
    op = node.op_type
    if all(state is not None and state.kind == "constant" for state in states):
        scalars = iter(states)
        found = follower.evaluate(node, [next(scalars).value if there else None for there in optional])  # type: ignore[union-attr]
        if found is not None:
            return constant(found)
    held = [state for state in states if state is not None]
    if op == "Where":
        return _where(states, guarded=guarded)
    if op == "Mul" and any(s.is_constant(0) for s in held) and all(s.finite or s.kind == "masked" for s in held):
        if all(s.kind != "masked" or np.isfinite(s.value) for s in held):
            return constant(np.asarray(next(s.value for s in held if s.is_constant(0))))
    if op == "And" and any(s.is_constant(0) for s in held):
        return constant(np.False_)
    if op == "Or" and any(s.kind == "constant" and bool(s.value) for s in held):
        return constant(np.True_)
    if op in ("Add", "Sub", "Sum") and not any(s.kind == "wild" for s in held):
        signs = [1.0] + [-1.0 if op == "Sub" else 1.0] * (len(states) - 1)
        total = 0.0
        for state, sign in zip(states, signs, strict=True):
            if state is not None and state.kind in ("constant", "masked"):
                if state.kind == "masked" and sign < 0:
                    return WILD if not np.isfinite(state.value) else GARBAGE
                total += sign * float(np.asarray(state.value, np.float64))
        if total <= -1000.0:
            return State("masked", np.float64(total))
        if not np.isfinite(total):
            return WILD
        return GARBAGE
    if op == "Exp" and held and held[0].kind == "masked" and held[0].hidden():
        return constant(np.float32(0))
    if op == "Div" and len(states) == 2:
        if states[1] is not None and (states[1].is_constant(0) or states[1].kind == "wild"):
            return WILD
        if states[0] is not None and states[0].is_constant(0) and (states[1] is None or states[1].kind == "constant"):
            return states[0]
    if op in _TRUTHS or (op == "Cast" and int(attribute(node, "to", 1)) == 9):
        return GARBAGE
    if any(not s.finite and not (s.kind == "masked" and np.isfinite(s.value)) for s in held):
        return WILD
    return GARBAGE


def _where(states: list[State | None], *, guarded: bool) -> State:
    condition, yes, no = states
    if condition is not None and condition.kind == "constant":
        chosen = yes if bool(condition.value) else no
        return GARBAGE if chosen is None else chosen
    if guarded and (yes is None or yes.finite):  # Where(IsNaN(x), number, x): NaN is what wild stands for after Softmax
        return GARBAGE if no is None or no.kind == "wild" else no
    if yes is not None and no is not None and yes.hidden() and no.hidden():
        return State("masked", max(np.float64(yes.value), np.float64(no.value)))
    if any(s is not None and not (s.finite or (s.kind == "masked" and np.isfinite(s.value))) for s in (yes, no)):
        return WILD
    return GARBAGE


for _name in (*UNARY, *NARY):
    RULES["", _name] = elementwise
for _name in CONTRIB:
    RULES["com.microsoft", _name] = elementwise


def joined(states: Sequence[State]) -> State:
    """What holds where the value comes from any one of several."""
    first = states[0]
    if all(s.kind == first.kind and _same(s.value, first.value) for s in states):
        source = frozenset().union(*(s.source for s in states))
        return replace(first, source=source, flat=all(s.flat for s in states))
    return GARBAGE if all(s.finite for s in states) else WILD


def _same(a: Any, b: Any) -> bool:
    if a is None or b is None:
        return a is b
    return bool(np.array_equal(a, b))


# --- sums of products -------------------------------------------------------------------------------------------------


def contract(follower: Follower, left: Axis, right: Axis) -> None:
    """Judge a sum over an axis that two factors share."""
    marked = [axis for axis in (left, right) if labels([axis])]
    if not marked:
        return
    name = min(labels(marked))
    batch = follower.batch(marked)
    if batch is not None:
        raise Mixing(batch, "sums over the rows of the batch")
    if shape_key(left) != shape_key(right):
        raise Mixing(name, "sums over it together with an axis that is not the same dimension")
    for a, b in zip(left, right, strict=True):
        if a.dim is None:
            continue
        if not (a.state.is_constant(0) and b.state.finite) and not (b.state.is_constant(0) and a.state.finite):
            raise Mixing(name, "sums over the padding, which no mask makes zero" if a.dim == name else "sums over padding")


def product_state(states: list[State | None]) -> State:
    """Beyond an axis that one or both factors keep."""
    held = [s for s in states if s is not None]
    if any(s.kind == "wild" or not (s.finite or s.kind == "masked") for s in held):
        return WILD
    return constant(np.float32(0)) if any(s.is_constant(0) for s in held) else GARBAGE


def _kept(axis: Axis) -> Axis:
    return tuple(a if a.dim is None else replace(a, state=product_state([a.state]), level=False) for a in axis)


@rule("MatMul", "MatMulInteger", "QLinearMatMul")
def matmul(follower: Follower, node: Node, values: list[Any]) -> list[Any]:
    """Matrix products, also of integers: zero points are per tensor or per column."""
    a, b = (values[0], values[1]) if node.op_type != "QLinearMatMul" else (values[0], values[3])
    others = [v for v in values if v is not None and v is not a and v is not b]
    for other in others:
        if follower.tensor(other).dims:
            raise Mixing(min(follower.tensor(other).dims), "a scale or zero point depends on it")
    ta, tb = follower.as_data(follower.tensor(a)), follower.as_data(follower.tensor(b))
    la, lb = list(follower.ranked(ta)), list(follower.ranked(tb))
    squeeze_a, squeeze_b = len(la) == 1, len(lb) == 1
    la = [plain(1), *la] if squeeze_a else la
    lb = [*lb, plain(1)] if squeeze_b else lb
    if node.op_type == "MatMul":
        contract(follower, la[-1], lb[-2])
    elif labels([la[-1], lb[-2]]):
        raise Mixing(min(labels([la[-1], lb[-2]])), "sums over the padding of integers, whose zero point is not zero")
    axes = list(combined(follower, [la[:-2], lb[:-2]], product_state))
    if not squeeze_a:
        axes.append(_kept(la[-2]))
    if not squeeze_b:
        axes.append(_kept(lb[-1]))
    return [Tensor(tuple(axes), None, taint_of(ta, tb, *map(follower.tensor, others)), ta.fed or tb.fed)]


@rule("Gemm")
def gemm(follower: Follower, node: Node, values: list[Any]) -> list[Any]:
    """alpha A' B' + beta C."""
    ta, tb = follower.as_data(follower.tensor(values[0])), follower.as_data(follower.tensor(values[1]))
    la, lb = list(follower.ranked(ta)), list(follower.ranked(tb))
    if attribute(node, "transA", 0):
        la.reverse()
    if attribute(node, "transB", 0):
        lb.reverse()
    contract(follower, la[1], lb[0])
    axes: tuple[Axis, ...] = (_kept(la[0]), _kept(lb[1]))
    tensors = [ta, tb]
    if len(values) > 2 and values[2] is not None:
        tc = follower.as_data(follower.tensor(values[2]))
        tensors.append(tc)
        axes = combined(follower, [axes, follower.ranked(tc)], lambda states: _not_zero(product_state(states)))
    return [Tensor(axes, None, taint_of(*tensors), any(t.fed for t in tensors))]


def _not_zero(state: State) -> State:
    return GARBAGE if state.kind == "constant" else state


@rule("Einsum")
def einsum(follower: Follower, node: Node, values: list[Any]) -> list[Any]:
    """Letters that do not reach the output are summed over."""
    equation = str(attribute(node, "equation", "")).replace(" ", "")
    left, arrow, out = equation.partition("->")
    terms = left.split(",")
    tensors = [follower.as_data(follower.tensor(value)) for value in values]
    if "." in equation or not arrow or any(len(set(term)) < len(term) for term in terms) or len(terms) > 2:
        raise Undecided("an equation of this form is not followed")
    places: dict[str, list[Axis]] = {}
    for term, tensor in zip(terms, tensors, strict=True):
        for letter, axis in zip(term, follower.ranked(tensor), strict=True):
            places.setdefault(letter, []).append(axis)
    for letter, held in places.items():
        if letter in out:
            continue
        if len(held) == 2:
            contract(follower, held[0], held[1])
        elif labels(held):
            reduced(follower, held[0], "ReduceSum")
    axes = [combined(follower, [[axis] for axis in places[letter]], product_state)[0] for letter in out]
    return [Tensor(tuple(axes), None, taint_of(*tensors), any(t.fed for t in tensors))]


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
            what = "divides by the padded length" if op == "ReduceMean" else "reduces over the padding, which no mask covers"
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
        elif node.op_type in ("ReduceSum", "ReduceMax", "ReduceMean", "ReduceMin"):
            out.append(tuple(a if a.dim is None else replace(a, state=_reduced_state(a.state)) for a in axis))
        else:
            out.append(blurred(axis))
    return [Tensor(tuple(out), None, tensor.taint, tensor.fed)]


def _reduced_state(state: State) -> State:
    if state.is_constant(0):
        return state
    return GARBAGE if state.finite or state.kind == "masked" and np.isfinite(state.value) else WILD


def blurred(axis: Axis) -> Axis:
    """The axis after something that keeps no constant."""
    return tuple(a if a.dim is None else Atom(a.size, a.dim, GARBAGE if a.state.finite else WILD) for a in axis)


for _name in REDUCTIONS:
    RULES["", "Reduce" + _name] = reduction


@rule("ArgMax", "ArgMin")
def arg_reduction(follower: Follower, node: Node, values: list[Any]) -> list[Any]:
    """The index of an extreme along one axis."""
    tensor = follower.as_data(follower.tensor(values[0]))
    axes = follower.ranked(tensor)
    at = int(attribute(node, "axis", 0)) % len(axes)
    reduced(follower, axes[at], node.op_type)
    keep = [plain(1)] if attribute(node, "keepdims", 1) else []
    out = [*map(blurred, axes[:at]), *keep, *map(blurred, axes[at + 1 :])]
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
            out.append(tuple(a if a.dim is None else replace(a, state=_all_alike(a.state)) for a in axis))
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
                why = f"the mask adds only {float(atom.state.value):g} to padding" if weak else "no mask covers the padding"
                raise Mixing(atom.dim, f"normalises over it, and {why}")
            follower.rely_on(atom)
            zero = constant(np.float32(0)) if node.op_type == "Softmax" else State("masked", atom.state.value)
            atoms.append(replace(atom, state=zero))
        out.append(tuple(atoms))
    return [Tensor(tuple(out), None, tensor.taint, tensor.fed)]


def _all_alike(state: State) -> State:
    """Beyond the length of another axis than the one normalised over: a row of all -inf gives NaN."""
    if state.kind in ("constant", "masked"):
        return GARBAGE if np.isfinite(state.value) else WILD
    return state


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
    out = tuple(map(blurred, axes))
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
    return [Tensor(tuple(map(blurred, axes)), None, tensor.taint, tensor.fed)]


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
    out = [blurred(axis) if index == at else _summed(axis) for index, axis in enumerate(axes)]
    return [Tensor(tuple(out), None, tensor.taint, tensor.fed)]


def _summed(axis: Axis) -> Axis:
    return tuple(a if a.dim is None else replace(a, state=_reduced_state(a.state)) for a in axis)


def unsure(axis: Axis) -> Axis:
    """A constant padding may be joined by others: only 0 in 0 stays, which is not known here."""
    return tuple(a if a.dim is None else Atom(a.size, a.dim, GARBAGE if a.state.finite else a.state) for a in axis)


# --- control flow -----------------------------------------------------------------------------------------------------


@rule("If")
def conditional(follower: Follower, node: Node, values: list[Any]) -> list[Any]:
    """The branch that is taken, or what holds of both."""
    condition = values[0]
    branches = [attribute(node, name, None) for name in ("then_branch", "else_branch")]
    if isinstance(condition, np.ndarray):
        return _branch(follower, branches[0] if bool(condition.reshape(())) else branches[1])
    tensor = follower.tensor(condition)
    if tensor.dims or tensor.taint is not None:
        name = min(tensor.dims) if tensor.dims else tensor.taint.axis  # type: ignore[union-attr]
        raise Mixing(name, "which branch runs depends on it")
    follower.undecided = follower.undecided or not tensor.fed
    both = [_branch(follower, branch) for branch in branches]
    return [_either(follower, *pair) for pair in zip(*both, strict=True)]


def _branch(follower: Follower, graph: Graph) -> list[Any]:
    follower.run(graph)
    return [follower.read(v.name) if v.name not in graph.initializers else graph.initializers[v.name] for v in graph.outputs]


def _either(follower: Follower, one: Any, other: Any) -> Any:
    if one is other:
        return one
    a, b = follower.tensor(one), follower.tensor(other)
    taint = taint_of(a, b)
    if a.axes is None or b.axes is None or len(a.axes) != len(b.axes):
        if a.dims or b.dims:
            raise Undecided("its branches give values of different rank, and which one runs is not known")
        return Tensor(None, taint=taint)
    axes = []
    for x, y in zip(a.axes, b.axes, strict=True):
        if labels([x, y]):
            if shape_key(x) != shape_key(y):
                raise Undecided("its branches give different axes, and which one runs is not known")
            axes.append(tuple(
                p if p.dim is None else replace(p, state=joined([p.state, q.state])) for p, q in zip(x, y, strict=True)
            ))
        else:
            axes.append(x if shape_key(x) == shape_key(y) else plain(follower.fresh("branch")))
    return Tensor(tuple(axes), None, taint, a.fed or b.fed)




