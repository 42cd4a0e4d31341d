"""How each operator that computes treats followed axes; see `axes` for what is proved. Sources: ai.onnx 1 to 24."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from transmuter_async.compiler.axes import (
    GARBAGE,
    JUDGES,
    LARGE,
    NAN,
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
    everywhere,
    is_unit,
    labels,
    plain,
    size_of,
    within,
)
from transmuter_async.compiler.axes_live import ONE_AND_OTHER, SCORE, UNKNOWN, Live, live_after, point
from transmuter_async.compiler.axes_spans import (
    EVERYTHING,
    Span,
    hull,
    kind_of_dtype,
    may_be_zero,
    span_after,
    span_of_array,
    undefined,
)
from transmuter_async.compiler.sizes import Poly, Sizes
from transmuter_async.graph import Node, dtype_of

__all__ = [
    "RULES",
    "aligned",
    "attribute",
    "axes_of",
    "blurred",
    "combined",
    "joined",
    "loosened",
    "product_state",
    "shape_key",
    "taint_of",
    "unsure",
]

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
SCORES = 4900.0
"""What is taken for a score beside a mask: see `MASK`."""

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
            follower.along = atom.dim
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

    kinds = [tensor.kind for tensor in tensors]
    ranges = [_range(value) for value in given]
    same = len(node.inputs) > 1 and node.inputs[0] == node.inputs[1]
    judged = _against_length(follower, node, originals)

    def combine(states: list[State | None]) -> State:
        if judged is not None and follower.along == judged[0]:
            return judged[1]
        seen = [constant(s) if s is not None else state for state, s in zip(states, scalars, strict=True)]
        spans = [r if s is None else s.span for s, r in zip(seen, ranges, strict=True)]
        made = _combine(follower, node, seen, optional, guarded=bool(guarded))
        if made.kind == "garbage":
            made = _defined(follower, node, states, spans, kinds)
            if made.kind == "garbage":
                made = _settled(node, seen, spans) or within(span_after(node, spans, kinds, same))
        if not _tells(made):
            return made
        marked = [(s, t) for s, t in zip(states, tensors, strict=True) if s is not None and _tells(s)]
        if node.op_type in ("Add", "Sub", "Sum"):
            marked = [(s, t) for s, t in marked if not _is_score(s)] or marked
        elif node.op_type == "Where" and states[0] is not None and states[0].kind == "constant":
            picked = states[1 if bool(states[0].value) else 2]
            marked = [(s, t) for s, t in marked if s is states[0] or s is picked]
        flat = all(s.flat and (s.kind == "masked" or follower.varying(t) <= 1) for s, t in marked)
        lives = tuple(_live(follower, node, states, originals, given, at) for at in range(ONE_AND_OTHER))
        return replace(made, source=frozenset().union(*(s.source for s, _ in marked)), flat=flat, live=lives)

    axes = combined(follower, [tensor.axes or () for tensor in tensors], combine)
    content: Any = None
    taint = taint_of(*tensors)
    if node.op_type == "Identity" or (
        node.op_type == "Cast" and originals[0].content and originals[0].content[0] != "isnan"
    ):
        content, taint = originals[0].content, originals[0].taint
        if content is not None and content[0] in ("atmost", "number") and _narrows(node):
            content = None
    elif node.op_type == "Cast" and isinstance(values[0], Sizes):
        content = _as_float(follower, node, values[0])
    elif node.op_type == "IsNaN":
        content = ("isnan", node.inputs[0])
    elif node.op_type == "GreaterOrEqual" and originals[0].content is not None and originals[0].content[0] == "iota":
        if scalars[1] is not None and scalars[1] <= 0:  # an index is never below zero: true everywhere
            true = everywhere(np.True_)
            axes = tuple(
                tuple(a if a.dim is None else replace(a, state=true, level=True) for a in axis) for axis in axes
            )
            content, taint = ("everywhere", np.asarray(np.True_)), None
    if content is None or content[0] == "everywhere":
        content = (
            _everywhere(follower, node, originals, given, optional)
            if content is None or node.op_type == "Cast"
            else content
        )
    return [Tensor(axes, content, taint, any(tensor.fed for tensor in tensors))]


def _one_number(tensor: Tensor, value: Any) -> np.ndarray | None:
    """The number that all elements are, None where they differ or are not known."""
    if tensor.content is not None and tensor.content[0] == "everywhere":
        return np.asarray(tensor.content[1])
    if (
        isinstance(value, np.ndarray)
        and 0 < value.size <= LARGE
        and not value.dtype.hasobject
        and (value == value.flat[0]).all()
    ):
        return np.asarray(value.reshape(-1)[0])
    return None


def _everywhere(
    follower: Follower, node: Node, originals: list[Tensor], given: list[Any], optional: list[bool]
) -> tuple[Any, ...] | None:
    """The content of what is one number everywhere, whatever the sizes."""
    numbers = [_one_number(tensor, value) for tensor, value in zip(originals, given, strict=True)]
    if any(number is None for number in numbers):
        return None
    scalars = iter(numbers)
    found = follower.evaluate(node, [next(scalars) if there else None for there in optional])
    return None if found is None else ("everywhere", found)


def _tells(state: State) -> bool:
    """Whether a state may be that of a mask: a number, or anything between two."""
    return state.kind in ("constant", "masked") or (
        state.kind == "garbage" and math.isfinite(state.low) and math.isfinite(state.high)
    )


def _as_float(follower: Follower, node: Node, sizes: Sizes) -> tuple[Any, ...] | None:
    """A size as a float, which is exact where no float rounds it: a Range may count up to it."""
    to = dtype_of(int(attribute(node, "to", 1)))
    most = follower.bounds.span(sizes.values.reshape(-1)[0])[1] if sizes.values.size == 1 else math.inf
    return (
        ("size", sizes.values.reshape(-1)[0])
        if kind_of_dtype(to) == "f" and to.itemsize >= 4 and most < 1 << 24
        else None
    )


def _narrows(node: Node) -> bool:
    """Whether a cast may change the order of integers: those of fewer than 32 bits wrap."""
    if node.op_type != "Cast":
        return False
    to = dtype_of(int(attribute(node, "to", 1)))
    return kind_of_dtype(to) != "f" and to.itemsize < 4


def _live(
    follower: Follower, node: Node, states: list[State | None], originals: list[Tensor], given: list[Any], at: int
) -> Live:
    """What stands where the mask's input holds data, under one of the assumptions."""
    lives: list[Live] = []
    for state, tensor, value in zip(states, originals, given, strict=True):
        number = _one_number(tensor, value)
        if number is not None:
            lives.append(point(number))
        elif state is not None and state.live:
            lives.append(state.live[at])
        else:
            lives.append(SCORE if tensor.kind == "f" else UNKNOWN)
    first, second = (
        (tensor.content is not None and tensor.content[0] == "iota" for tensor in originals[:2])
        if len(originals) == 2
        else (False, False)
    )
    if first != second or (first and second):  # the first place of one axis against any of another
        zeros = [live[0] == "point" and live[1] <= 0 for live in lives]
        truth = {
            "LessOrEqual": (True, None),
            "Greater": (False, None),
            "GreaterOrEqual": (None, True),
            "Less": (None, False),
        }
        for side, (zero, other) in enumerate(((zeros[0], second), (zeros[1], first))):
            known = truth.get(node.op_type, (None, None))[side]
            if zero and other and lives[1 - side][0] != "point" and known is not None:
                return point(np.bool_(known))
    return live_after(node, lives, follower.evaluate)


def _is_score(state: State) -> bool:
    """Whether it is something that a mask is added to."""
    return state.span[1] > -1000.0 and (state.live[0] == SCORE if state.live else not state.source)


def _range(value: Any) -> Span:
    """Between which bounds data lies: known for small weights only."""
    return span_of_array(value) if isinstance(value, np.ndarray) and value.size <= LARGE else EVERYTHING


def _defined(follower: Follower, node: Node, states: list[State | None], spans: list[Span], kinds: list[str]) -> State:
    """Wild where the operator may leave its domain on padding; refused where it would raise there."""
    if follower.kind(follower.along) == "batch" or not undefined(node, spans, kinds):
        return GARBAGE  # spare rows repeat a true one
    divides = node.op_type in ("Div", "Mod") and len(states) == 2 and states[1] is not None
    if divides and kinds[1] != "f":
        raise Mixing(
            follower.along,
            "divides integers by what stands on the padding, which may be zero, and that is an error; pad the divisor "
            "with another value: Batching(pad=...)",
        )
    return WILD


def _settled(node: Node, states: list[State | None], spans: list[Span]) -> State | None:
    """Max and Min with a known number that no other operand can pass: a mask joined to another one."""
    if node.op_type not in ("Max", "Min"):
        return None
    sign = 1 if node.op_type == "Max" else -1
    known = [state for state in states if state is not None and state.kind == "constant"]
    for state in known:
        bound = state.span[0] * sign
        if all(max(low * sign, high * sign) <= bound for low, high in spans):
            return state
    return None


def _against_length(follower: Follower, node: Node, originals: list[Tensor]) -> tuple[str, State] | None:
    """An index compared with lengths of which none is above the dimension: known beyond it."""
    if len(originals) != 2:
        return None
    contents = [tensor.content or ("",) for tensor in originals]
    for at, (content, other) in enumerate((contents, contents[::-1])):
        if content[0] != "iota" or follower.kind(content[1]) == "batch":
            continue
        if (
            other[0] == "number"
            and content[1] not in follower.born.values()
            and follower.lengths.get(other[1], content[1]) == content[1]
        ):
            other = ("atmost", content[1], other[1])
        if other[0] == "atmost" and content[1] == other[1]:
            # index >= size >= length
            truth = {
                "Less": (False, None),
                "GreaterOrEqual": (True, None),
                "Greater": (None, False),
                "LessOrEqual": (None, True),
            }
            known = truth.get(node.op_type, (None, None))[at]
            if known is None:
                return None
            source = frozenset({other[2]}) if other[2] else frozenset(*other[3:])
            follower.ones |= frozenset(*other[3:])
            if other[2]:
                follower.lengths[other[2]] = content[1]
            live = (point(np.bool_(not known)),) * ONE_AND_OTHER  # at the first place, of lengths of at least 1
            return content[1], replace(constant(np.bool_(known)), source=source, live=live)
    return None


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
            elif state is not None and _tells(state):
                highest = sign * (state.high if sign > 0 else state.low)
                total += 0.0 if 0 <= highest <= SCORES else highest
        if total <= -1000.0:
            return State("masked", np.float64(total))
        if not np.isfinite(total):
            return WILD
        return GARBAGE
    if op == "Exp" and held and held[0].kind == "masked" and held[0].hidden():
        return constant(np.float32(0))
    if op == "Div" and len(states) == 2:
        if states[1] is not None and states[1].kind == "wild":
            return WILD
        if (
            states[0] is not None
            and states[0].is_constant(0)
            and (states[1] is None or not may_be_zero(states[1].span))
        ):
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
    if guarded and (yes is None or yes.finite) and (no is None or no.kind != "wild" or no == NAN):
        return GARBAGE if no is None or no == NAN else no  # Where(IsNaN(x), number, x)
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
        live = first.live if all(_alike(s.live, first.live) for s in states) else ()
        return replace(first, source=source, flat=all(s.flat for s in states), live=live)
    return within(hull([s.span for s in states])) if all(s.finite for s in states) else WILD


def _alike(a: tuple[Live, ...], b: tuple[Live, ...]) -> bool:
    return len(a) == len(b) and all(x[0] == y[0] and all(map(_same, x[1:], y[1:])) for x, y in zip(a, b, strict=True))


def _same(a: Any, b: Any) -> bool:
    if a is None or b is None:
        return a is b
    return bool(np.array_equal(a, b))


def product_state(states: list[State | None]) -> State:
    """Beyond an axis that one or both factors keep."""
    held = [s for s in states if s is not None]
    if any(s.kind == "wild" or not (s.finite or s.kind == "masked") for s in held):
        return WILD
    return constant(np.float32(0)) if any(s.is_constant(0) for s in held) else GARBAGE


def blurred(axis: Axis) -> Axis:
    """The axis after something that keeps no constant."""
    return tuple(a if a.dim is None else Atom(a.size, a.dim, GARBAGE if a.state.finite else WILD) for a in axis)


def unsure(axis: Axis) -> Axis:
    """A constant padding may be joined by others: only 0 in 0 stays, which is not known here."""
    return tuple(a if a.dim is None else Atom(a.size, a.dim, loosened(a.state)) for a in axis)


def loosened(state: State, *others: float) -> State:
    """The state where other known numbers may stand beside it."""
    if not state.finite:
        return state
    return within(hull([state.span, *((other, other) for other in others)])) if others else GARBAGE
