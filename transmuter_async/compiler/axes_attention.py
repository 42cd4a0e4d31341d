"""How fused attention and embedding treat followed axes; see `axes`.

Each is taken apart into the operators that it stands for, whose rules then judge. Two things are of its own: a causal
mask, which alone hides all keys behind the true ones from every true query, and masks given as lengths.
Sources: ai.onnx 23 to 25 (Attention); com.microsoft 1.
"""

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
    State,
    Tensor,
    Undecided,
    constant,
    is_unit,
    labels,
    plain,
    size_of,
)
from transmuter_async.compiler.axes_index import judge_index
from transmuter_async.compiler.axes_kinds import result_kind
from transmuter_async.compiler.axes_norms import layer_normalization
from transmuter_async.compiler.axes_rules import attribute, shape_key, taint_of
from transmuter_async.compiler.sizes import poly
from transmuter_async.graph import Node

__all__ = ["ATTENTION"]

ATTENTION: dict[tuple[str, str], Rule] = {}
FILTER = -10000.0
MICROSOFT = "com.microsoft"


def rule(name: str, domain: str) -> Callable[[Rule], Rule]:
    """Register a rule for an operator."""

    def register(function: Rule) -> Rule:
        ATTENTION[domain, name] = function
        return function

    return register


def apply(follower: Follower, op_type: str, values: Sequence[Any], **attributes: Any) -> Any:
    """The result of another operator on what is known of values, judged by its own rule."""
    assert follower.node is not None
    names = tuple("" if value is None else f"i{index}" for index, value in enumerate(values))
    node = Node(op_type, "", names, ("out",), attributes, follower.node.name, follower.node.path, 18)
    [found] = follower._outputs(node, list(values), [])[:1]
    if isinstance(found, Tensor):
        found = replace(found, kind=result_kind(node, 0, values, found.kind))
    return found


def given(values: Sequence[Any], index: int) -> Any:
    """An input, None where it is left out."""
    return values[index] if len(values) > index else None


def heads(follower: Follower, value: Any, count: int) -> Tensor:
    """(batch, length, heads * size) as (batch, heads, length, size); what has four axes already stays."""
    tensor = follower.as_data(follower.tensor(value))
    axes = follower.ranked(tensor)
    if len(axes) == 4:
        return tensor
    if len(axes) != 3:
        raise Undecided("packed queries, keys and values are not followed")
    if labels([axes[2]]):
        raise Mixing(min(labels([axes[2]])), "splits it into heads")
    size = size_of(axes[2]).divide(poly(count)) if count else None
    return replace(
        tensor, axes=(axes[0], plain(count), axes[1], plain(follower.fresh("head") if size is None else size))
    )


def joined_heads(axes: Sequence[Axis]) -> tuple[Axis, ...]:
    """(batch, heads, length, size) as (batch, length, heads * size)."""
    return axes[0], axes[2], plain(size_of(axes[1]) * size_of(axes[3]))


def cached(follower: Follower, past: Any, new: Tensor) -> Tensor:
    """New keys or values (batch, heads, length, size) behind those of a cache."""
    return new if past is None else follower.tensor(apply(follower, "Concat", [follower.tensor(past), new], axis=2))


def attend(
    follower: Follower,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    added: Sequence[Any] = (),
    allowed: Sequence[Any] = (),
    causal: bool = False,
    zero_rows: bool = False,
) -> tuple[Tensor, Tensor]:
    """Attention of (B, N, S, h), (B, N, T, h), (B, N, T, hv).

    Args:
        added: Masks and biases to add to the scores.
        allowed: Truth values: -inf where they are false.
        causal: A query sees the keys up to its own place. Of true queries those are all true ones.
        zero_rows: A query without an allowed key gives zeros; else NaN.

    Returns:
        (B, N, S, hv), and the scores (B, N, S, T).
    """
    scores = follower.tensor(apply(follower, "MatMul", [q, apply(follower, "Transpose", [k], perm=[0, 1, 3, 2])]))
    raw = scores
    for bias in added:
        scores = follower.tensor(apply(follower, "Add", [scores, bias]))
    finite = [[a.dim is None or a.state.kind != "wild" for a in axis] for axis in follower.ranked(scores)]
    for truth in allowed:
        scores = follower.tensor(apply(follower, "Where", [truth, scores, np.array(-np.inf, np.float32)]))
    axes = follower.ranked(scores)
    length, keys = axes[2], axes[3]
    batch = follower.batch([keys])
    if batch is not None:
        raise Mixing(batch, "normalises over the rows of the batch")
    own = causal and labels([keys]) and shape_key(length) == shape_key(keys) and len(keys) == 1
    weights = []
    for axis, fine in zip(axes[:3], finite[:3], strict=True):
        atoms = []
        for atom, ok in zip(axis, fine, strict=True):
            masked = atom.state.kind in ("constant", "masked")
            sure = ok and (zero_rows or not masked or np.isfinite(atom.state.value))
            atoms.append(atom if atom.dim is None else Atom(atom.size, atom.dim, GARBAGE if sure else WILD))
        weights.append(tuple(atoms))
    hidden = []
    for atom in keys:
        if atom.dim is not None and not own:
            if not atom.state.hidden():
                raise Mixing(atom.dim, "attends to it, and no mask covers the padding")
            follower.rely_on(atom)
        zero = constant(np.float32(0))
        hidden.append(atom if atom.dim is None else Atom(atom.size, atom.dim, zero))
    if own:
        # Behind the true queries, padding is attended to: it has to be finite, and so are the results then.
        state = follower.ranked(k)[2][0].state
        sure = state.finite and follower.ranked(v)[2][0].state.finite and all(all(part) for part in finite)
        weights[2] = (Atom(length[0].size, length[0].dim, GARBAGE if sure else WILD),)
    probabilities = Tensor((*weights, tuple(hidden)), None, scores.taint, True, "f")
    return follower.tensor(apply(follower, "MatMul", [probabilities, v])), raw


def padding_bias(follower: Follower, mask: Any, batch: Axis, keys: Axis, value: float) -> Any:
    """One of the forms of a padding mask of com.microsoft as something to add to (B, N, S, T)."""
    if mask is None:
        return None
    tensor = follower.tensor(mask)
    axes = follower.ranked(tensor)
    zero, low = np.zeros((), np.float32), np.array(value, np.float32)
    if len(axes) == 1:
        if size_of(axes[0]) != size_of(batch):
            raise Undecided("a mask of starts and ends is not followed")
        live = up_to_length(follower, mask, keys)
    elif len(axes) == 2:
        if labels([keys]) and shape_key(axes[1]) != shape_key(keys):
            raise Mixing(min(labels([keys])), "its mask is not along the same keys")
        live = apply(follower, "Greater", [mask, np.zeros((), np.int32)])
        live = apply(follower, "Unsqueeze", [live, np.array([1, 2])])
    elif len(axes) == 3:
        live = apply(follower, "Unsqueeze", [apply(follower, "Greater", [mask, np.zeros((), np.int32)]), np.array([1])])
    else:
        raise Undecided("a mask of four axes is not followed")
    return apply(follower, "Where", [live, zero, low])


def up_to_length(follower: Follower, lengths: Any, keys: Axis) -> Any:
    """Truth values (B, 1, 1, T): which keys lie before lengths (B,)."""
    name = min(labels([keys]), default=None)
    if name is not None and len(keys) > 1:
        raise Undecided("merged keys are not followed")
    dim = None if name is None else ("iota", name)
    axis = keys if name is None else (Atom(keys[0].size, name, GARBAGE),)
    places = Tensor((axis,), dim, None, False, "i")
    return apply(follower, "Less", [places, apply(follower, "Unsqueeze", [lengths, np.array([1, 2, 3])])])


def results(node: Node, *found: Tensor) -> list[Any]:
    """As many outputs as the node has."""
    return list(found)[: max(1, len(node.outputs))]


# --- ai.onnx ----------------------------------------------------------------------------------------------------------


@rule("Attention", "")
def attention(follower: Follower, node: Node, values: list[Any]) -> list[Any]:
    """Q, K and V with three or four axes; a mask of truth values or to add; a past; lengths of what counts."""
    packed = len(follower.ranked(values[0])) == 3
    queries, groups = int(attribute(node, "q_num_heads", 0) or 0), int(attribute(node, "kv_num_heads", 0) or 0)
    q, k, v = (
        heads(follower, values[0], queries),
        heads(follower, values[1], groups),
        heads(follower, values[2], groups),
    )
    past, lengths, mask = given(values, 4), given(values, 6), given(values, 3)
    present_k, present_v = cached(follower, past, k), cached(follower, given(values, 5), v)
    keys = follower.ranked(present_k)[2]
    added: list[Any] = []
    allowed: list[Any] = []
    if mask is not None:
        held = follower.ranked(mask)
        if labels([keys]) and shape_key(held[-1]) != shape_key(keys):
            raise Mixing(min(labels([keys])), "its mask is not along the same keys")
        (allowed if follower.tensor(mask).kind == "b" else added).append(mask)
        if follower.tensor(mask).kind not in ("b", "f"):
            raise Undecided("the dtype of its mask is not known")
    if lengths is not None:
        allowed.append(up_to_length(follower, lengths, keys))
    causal = bool(attribute(node, "is_causal", 0)) and past is None and lengths is None
    y, scores = attend(follower, q, present_k, present_v, added=added, allowed=allowed, causal=causal, zero_rows=True)
    if packed:
        y = replace(y, axes=joined_heads(follower.ranked(y)))
    return results(node, y, present_k, present_v, scores)


# --- com.microsoft ----------------------------------------------------------------------------------------------------


@rule("Attention", MICROSOFT)
def attention_with_projection(follower: Follower, node: Node, values: list[Any]) -> list[Any]:
    """Queries, keys and values are one product of the input."""
    x = follower.as_data(follower.tensor(values[0]))
    if len(follower.ranked(x)) != 3:
        raise Undecided("an input of this rank is not followed")
    if given(values, 4) is not None and attribute(node, "past_present_share_buffer", 0):
        raise Undecided("a shared cache is not followed")
    projected = follower.tensor(apply(follower, "MatMul", [x, values[1]]))
    if given(values, 2) is not None:
        projected = follower.tensor(apply(follower, "Add", [projected, values[2]]))
    count = int(attribute(node, "num_heads", 0))
    sizes = attribute(node, "qkv_hidden_sizes", None)
    hidden = size_of(follower.ranked(projected)[2]).divide(poly(3))
    widths = [poly(n) for n in sizes] if sizes else [follower.fresh("hidden") if hidden is None else hidden] * 3
    q, k, v = (
        heads(follower, replace(projected, axes=(*follower.ranked(projected)[:2], plain(width))), count)
        for width in widths
    )
    past = given(values, 4)
    if past is not None:
        parts = follower.ranked(past)
        old = replace(follower.as_data(follower.tensor(past)), axes=parts[1:])
        if labels([parts[0]]):
            raise Mixing(min(labels([parts[0]])), "takes it for keys and values")
        k, v = cached(follower, old, k), cached(follower, old, v)
    keys = follower.ranked(k)[2]
    filled = attribute(node, "mask_filter_value", None)
    bias = padding_bias(
        follower, given(values, 3), follower.ranked(x)[0], keys, FILTER if filled is None else float(filled)
    )
    added = [each for each in (bias, given(values, 5)) if each is not None]
    y, _ = attend(follower, q, k, v, added=added, causal=bool(attribute(node, "unidirectional", 0)) and past is None)
    present = replace(k, axes=(plain(2), *follower.ranked(k)))
    return results(node, replace(y, axes=joined_heads(follower.ranked(y))), present)


@rule("MultiHeadAttention", MICROSOFT)
def multi_head_attention(follower: Follower, node: Node, values: list[Any]) -> list[Any]:
    """Projected queries, keys and values; the keys may be those of a cache."""
    if given(values, 8) is not None or given(values, 9) is not None:
        raise Undecided("a shared cache is not followed")
    if given(values, 1) is None or given(values, 2) is None:
        raise Undecided("packed queries, keys and values are not followed")
    count = int(attribute(node, "num_heads", 0))
    if any(len(follower.ranked(values[i])) not in (3, 4) for i in range(3)) or len(follower.ranked(values[0])) != 3:
        raise Undecided("packed queries, keys and values are not followed")
    bias = given(values, 3)
    if bias is not None and follower.tensor(bias).dims:
        raise Mixing(min(follower.tensor(bias).dims), "its bias depends on it")
    q, k, v = (heads(follower, shifted(follower, values[i], bias), count) for i in range(3))
    whole = len(follower.ranked(values[1])) == 4
    past = None if whole else given(values, 6)
    present_k, present_v = cached(follower, past, k), cached(follower, None if whole else given(values, 7), v)
    keys = follower.ranked(present_k)[2]
    filled = attribute(node, "mask_filter_value", None)
    padding = padding_bias(
        follower, given(values, 4), follower.ranked(q)[0], keys, FILTER if filled is None else float(filled)
    )
    added = [each for each in (padding, given(values, 5)) if each is not None]
    causal = bool(attribute(node, "unidirectional", 0)) and past is None
    y, scores = attend(follower, q, present_k, present_v, added=added, causal=causal)
    return results(node, replace(y, axes=joined_heads(follower.ranked(y))), present_k, present_v, scores)


def shifted(follower: Follower, value: Any, bias: Any) -> Tensor:
    """A tensor after a bias that is the same everywhere: what was a constant on the padding is none any more."""
    tensor = follower.as_data(follower.tensor(value))
    if bias is None:
        return tensor
    axes = tuple(
        tuple(a if a.dim is None else Atom(a.size, a.dim, GARBAGE if a.state.finite else WILD) for a in axis)
        for axis in follower.ranked(tensor)
    )
    return replace(tensor, axes=axes, taint=taint_of(tensor, follower.tensor(bias)))


@rule("GroupQueryAttention", MICROSOFT)
def group_query_attention(follower: Follower, node: Node, values: list[Any]) -> list[Any]:
    """Rows of the batch are independent; how many keys there are is told by a number, so nothing along them is padded."""
    tensors = [None if v is None else follower.as_data(follower.tensor(v)) for v in values]
    query = tensors[0]
    assert query is not None
    rows, length, width = follower.ranked(query)
    for index, tensor in enumerate(tensors):
        if tensor is None:
            continue
        axes = follower.ranked(tensor)
        padded = follower.padded(axes)
        if padded is not None:
            raise Mixing(
                padded, "writes keys into a cache whose length total_sequence_length tells, the padding with them"
            )
        behind = labels(axes[1:]) or (index not in (0, 1, 2, 3, 4, 5, 9, 10, 16) and tensor.dims)
        if behind:
            raise Mixing(min(behind), "expects the rows of the batch on the first axis")
        if labels([axes[0], rows]) and shape_key(axes[0]) != shape_key(rows) and index in (1, 2, 3, 4, 5, 16):
            raise Mixing(min(labels([axes[0], rows])), "its inputs do not have the same rows")
        if index in (9, 10) and labels([rows]) and not is_unit(axes[0]) and shape_key(axes[0]) != shape_key(rows):
            raise Mixing(min(labels([rows])), "its inputs do not have the same rows")
    taint = taint_of(*[t for t in tensors if t is not None])
    groups, count = int(attribute(node, "kv_num_heads", 1)), int(attribute(node, "num_heads", 1))
    packed = tensors[1] is None
    size = size_of(width).divide(poly(count + 2 * groups if packed else count))
    head = follower.fresh("head") if size is None else size
    first = (Atom(rows[0].size, rows[0].dim),) if labels([rows]) else rows
    y = Tensor((first, length, plain(head * poly(count))), None, taint, True)
    cache = Tensor(
        (first, plain(groups), plain(follower.fresh("cache")), plain(follower.fresh("head"))), None, taint, True
    )
    scores = Tensor((first, plain(count), length, plain(follower.fresh("keys"))), None, taint, True)
    return results(node, y, cache, cache, scores)


@rule("EmbedLayerNormalization", MICROSOFT)
def embed_layer_normalization(follower: Follower, node: Node, values: list[Any]) -> list[Any]:
    """Rows of three tables, added and normalised; and how many ones each row of the mask has."""
    ids = follower.tensor(values[0])
    axes = follower.ranked(ids)
    segments, table, positions, segment_table = given(values, 1), values[2], values[3], given(values, 4)
    mask, places = given(values, 7), given(values, 8)
    total = looked_up(follower, table, values[0])
    if places is not None:
        total = follower.tensor(apply(follower, "Add", [total, looked_up(follower, positions, places)]))
    elif labels([axes[1]]):
        rows = size_of(follower.ranked(positions)[0]).constant()
        name = min(labels([axes[1]]))
        most = follower.dims[name].largest
        if len(axes[1]) > 1 or follower.kind(name) == "batch":
            raise Mixing(name, "takes a position for each of its elements")
        if rows is None or most is None or most > rows:
            raise Mixing(
                name, f"takes that many of {rows} positions, so sizes above {rows} are not possible: say buckets"
            )
    if segments is not None and segment_table is not None:
        total = follower.tensor(apply(follower, "Add", [total, looked_up(follower, segment_table, segments)]))
    small = replace(node, op_type="LayerNormalization", domain="", outputs=("out",))
    [y, *_] = layer_normalization(follower, small, [total, values[5], given(values, 6)])
    counts = Tensor((axes[0],), None, None, True, "i")
    if mask is not None:
        counts = counted(follower, mask)
    return results(node, y, replace(counts, kind="i"), total)


def looked_up(follower: Follower, table: Any, ids: Any) -> Tensor:
    """Rows of a table, as Gather finds them."""
    judge_index(follower, follower.tensor(ids), ids, follower.ranked(table)[0])
    return follower.tensor(apply(follower, "Gather", [table, ids], axis=0))


def counted(follower: Follower, mask: Any) -> Tensor:
    """How many ones each row (B, S) of a mask has: never more than there are true elements, when padding is none."""
    ones = follower.tensor(apply(follower, "Equal", [mask, np.ones((), np.int32)]))
    numbers = follower.tensor(apply(follower, "Cast", [ones], to=6))
    found = follower.tensor(apply(follower, "ReduceSum", [numbers, np.array([1])], keepdims=0))
    axis = follower.ranked(mask)[1]
    if not labels([axis]) or len(axis) > 1:
        return found
    source: State = axis[0].state
    return replace(found, content=("atmost", axis[0].dim, "", source.source))
