"""ai.onnx.ml: tree ensembles.

Every version becomes one table of nodes (`_Trees`). A row walks all trees at once: the state is the node of each tree,
`(rows, trees)`, and one step moves all of them; leaves point to themselves. As many steps as the deepest tree has
levels are enough, so the walk is a loop of fixed length, in numpy and in a program alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from jax import lax

from transmuter_async.operators.context import Context
from transmuter_async.operators.ml_scores import as_rows, labels_of, probit, second_class, transformed
from transmuter_async.operators.numeric import first_highest
from transmuter_async.operators.registry import is_host, operator, xp

ML = "ai.onnx.ml"

Floats = tuple[float, ...]
Integers = tuple[int, ...]

MODES = ("BRANCH_LEQ", "BRANCH_LT", "BRANCH_GTE", "BRANCH_GT", "BRANCH_EQ", "BRANCH_NEQ", "BRANCH_MEMBER", "LEAF")
LEAF = MODES.index("LEAF")
MEMBER = MODES.index("BRANCH_MEMBER")
CHUNK = 1 << 20  # (rows x trees x targets) of one pass of the host form, so that its temporaries stay in the cache


@dataclass(frozen=True, slots=True)
class _Trees:
    """An ensemble as arrays by node.

    Attributes:
        features, splits, modes, missing: What a node tests; `missing`: NaN goes the true way.
        when_true, when_false: The next nodes; a leaf's are itself.
        roots: `(trees,)`.
        depth: Levels below the roots.
        members: `(nodes, most members)` of the sets that BRANCH_MEMBER nodes test, padded with NaN, or None.
        weights: `(nodes, targets)`, the sum of what a leaf gives to each target.
        scored: `(nodes, targets)`, whether it gives anything.
    """

    features: np.ndarray
    splits: np.ndarray
    modes: np.ndarray
    missing: np.ndarray
    when_true: np.ndarray
    when_false: np.ndarray
    roots: np.ndarray
    depth: int
    members: np.ndarray | None
    weights: np.ndarray
    scored: np.ndarray


def _depth(roots: np.ndarray, when_true: np.ndarray, when_false: np.ndarray, leaf: np.ndarray) -> int:
    """Levels below the roots. Raises ValueError where a node is its own descendant."""
    frontier, depth = roots[~leaf[roots]], 0
    while len(frontier):
        depth += 1
        if depth > len(leaf):
            raise ValueError("the nodes of a tree form a cycle")
        below = np.unique(np.concatenate([when_true[frontier], when_false[frontier]]))
        frontier = below[~leaf[below]]
    return depth


def _named_trees(
    targets: int,
    dtype: Any,
    nodes: dict[str, Any],
    weight_trees: Integers | None,
    weight_nodes: Integers | None,
    weight_ids: Integers | None,
    weight_values: Any,
) -> _Trees:
    """The table of the versions 1 and 3, whose nodes are named by (tree id, node id)."""
    trees = np.asarray(nodes["treeids"] or (), np.int64)
    ids = np.asarray(nodes["nodeids"] or (), np.int64)
    count = len(trees)
    if not count:
        raise ValueError("the ensemble has no nodes")
    for name, values in nodes.items():
        if name not in ("missing", "hitrates") and (values is None or len(values) != count):
            raise ValueError(f"nodes_{name} has {0 if values is None else len(values)} entries for {count} nodes")
    modes = np.asarray([_mode(name) for name in nodes["modes"]], np.int8)
    span = int(ids.max()) + 1 if ids.min() >= 0 else 0
    if not span:
        raise ValueError("a node id is negative")
    key = trees * span + ids
    order = np.argsort(key, kind="stable")
    if (np.diff(key[order]) == 0).any():
        raise ValueError("two nodes of a tree have the same id")

    def find(of_trees: np.ndarray, of_nodes: np.ndarray, what: str) -> np.ndarray:
        wanted = of_trees * span + of_nodes
        place = order[np.minimum(np.searchsorted(key[order], wanted), count - 1)]
        if ((key[place] != wanted) | (of_nodes < 0) | (of_nodes >= span)).any():
            raise ValueError(f"{what} names a node that is not in its tree")
        return place

    leaf = modes == LEAF
    when_true, when_false = np.arange(count), np.arange(count)
    for way, name in ((when_true, "truenodeids"), (when_false, "falsenodeids")):
        way[~leaf] = find(trees[~leaf], np.asarray(nodes[name], np.int64)[~leaf], f"nodes_{name}")
    roots = np.flatnonzero(np.concatenate([[True], trees[1:] != trees[:-1]]))
    missing = np.zeros(count, bool) if not nodes["missing"] else np.asarray(nodes["missing"]) != 0
    weights, scored = np.zeros((count, targets), dtype), np.zeros((count, targets), bool)
    target = np.asarray(weight_ids or (), np.int64)
    if len(target):
        if target.min() < 0 or target.max() >= targets:
            raise ValueError(f"a leaf names target or class {target.max()}, but there are {targets}")
        at = find(np.asarray(weight_trees, np.int64), np.asarray(weight_nodes, np.int64), "a leaf weight")
        np.add.at(weights, (at, target), np.asarray(weight_values, dtype))
        scored[at, target] = True
    return _Trees(
        features=np.asarray(nodes["featureids"], np.int32),
        splits=np.asarray(nodes["values"]).astype(dtype),
        modes=modes,
        missing=missing,
        when_true=when_true.astype(np.int32),
        when_false=when_false.astype(np.int32),
        roots=roots.astype(np.int32),
        depth=_depth(roots, when_true, when_false, leaf),
        members=None,
        weights=weights,
        scored=scored,
    )


def _mode(name: str) -> int:
    if name not in MODES:
        raise ValueError(f"node mode {name!r} is none of {', '.join(MODES)}")
    return MODES.index(name)


def _leaves(trees: _Trees, x: Any) -> Any:
    """The leaf of every tree that each row of `x` ends in, `(rows, trees)` int32."""
    np_ = xp(x)
    inner = trees.modes[trees.modes != LEAF]
    features = int(trees.features[trees.modes != LEAF].max(initial=-1)) + 1
    if features > x.shape[1]:
        raise ValueError(f"the trees test feature {features - 1}, but X has {x.shape[1]} features")
    modes = tuple(int(m) for m in np.unique(inner))

    def step(at: Any) -> Any:
        value = np_.take_along_axis(x, np_.take(trees.features, at), axis=1)
        split = np_.take(trees.splits, at)
        goes = _tests(trees, modes, at, value, split)
        if trees.missing.any() and x.dtype.kind == "f":
            goes = goes | (np_.take(trees.missing, at) & np_.isnan(value))
        return np_.where(goes, np_.take(trees.when_true, at), np_.take(trees.when_false, at))

    at = np_.broadcast_to(trees.roots, (x.shape[0], len(trees.roots)))
    if x.shape[0] == 0 or trees.depth == 0:
        return at
    if is_host(x):
        for _ in range(trees.depth):
            at = step(at)
        return at
    return lax.fori_loop(0, trees.depth, lambda _, at: step(at), at)


def _tests(trees: _Trees, modes: tuple[int, ...], at: Any, value: Any, split: Any) -> Any:
    """Where the test of the node holds. `modes`: those that occur, most often a single one."""
    np_ = xp(value)
    compare = {
        0: lambda: value <= split,
        1: lambda: value < split,
        2: lambda: value >= split,
        3: lambda: value > split,
        4: lambda: value == split,
        5: lambda: value != split,
        MEMBER: lambda: (np_.take(trees.members, at, axis=0) == value[..., None]).any(-1),
    }
    goes = compare[modes[0]]()
    for mode in modes[1:]:
        goes = np_.where(np_.take(trees.modes, at) == mode, compare[mode](), goes)
    return goes


def _aggregate(trees: _Trees, x: Any, function: str) -> tuple[Any, Any]:
    """`(scores, scored)`, both `(rows, targets)`: the leaves' weights aggregated, and whether any leaf gave one."""
    if function not in ("SUM", "AVERAGE", "MIN", "MAX"):
        raise ValueError(f"aggregate_function {function!r} is none of SUM, AVERAGE, MIN, MAX")
    if not is_host(x):
        return _aggregate_some(trees, x, function)
    targets = trees.weights.shape[1]
    size = max(1, CHUNK // (max(1, targets) * len(trees.roots)))
    parts = [_aggregate_some(trees, x[start : start + size], function) for start in range(0, max(1, len(x)), size)]
    return np.concatenate([p[0] for p in parts]), np.concatenate([p[1] for p in parts])


def _aggregate_some(trees: _Trees, x: Any, function: str) -> tuple[Any, Any]:
    np_ = xp(x)
    at = _leaves(trees, x).T  # trees first: numpy then adds tree after tree, in onnxruntime's order
    weights = np_.take(trees.weights, at, axis=0)
    leaves = np.flatnonzero(trees.modes == LEAF)
    always, ever = trees.scored[leaves].all(0), trees.scored[leaves].any(0)
    if (always == ever).all():
        scored = np_.broadcast_to(always, (x.shape[0], trees.weights.shape[1]))
    else:
        scored = np_.take(trees.scored, at, axis=0).any(0)
    if function in ("MIN", "MAX"):
        worst = np.asarray(np.inf if function == "MIN" else -np.inf, trees.weights.dtype)
        weights = np_.where(np_.take(trees.scored, at, axis=0), weights, worst)
        scores = weights.min(0) if function == "MIN" else weights.max(0)
        return np_.where(scored, scores, np_.zeros_like(scores)), scored
    scores = weights.sum(0, dtype=trees.weights.dtype)
    return scores / scores.dtype.type(len(trees.roots)) if function == "AVERAGE" else scores, scored


def _input(X: Any, wide: bool) -> tuple[Any, Any]:
    """Rows, and the dtype to compute in: float64 where X is (or the attributes are) double, else float32."""
    dtype = np.float64 if X.dtype == np.float64 or wide else np.float32
    return as_rows(X, dtype), dtype


# --- classifier -------------------------------------------------------------------------------------------------------


@operator("TreeEnsembleClassifier", since_version=1, domain=ML, loops=True)
def tree_ensemble_classifier_1(
    X: Any,
    /,
    *,
    base_values: Floats | None = None,
    class_ids: Integers | None = None,
    class_nodeids: Integers | None = None,
    class_treeids: Integers | None = None,
    class_weights: Floats | None = None,
    classlabels_int64s: Integers | None = None,
    classlabels_strings: tuple[str, ...] | None = None,
    nodes_falsenodeids: Integers | None = None,
    nodes_featureids: Integers | None = None,
    nodes_hitrates: Floats | None = None,
    nodes_missing_value_tracks_true: Integers | None = None,
    nodes_modes: tuple[str, ...] | None = None,
    nodes_nodeids: Integers | None = None,
    nodes_treeids: Integers | None = None,
    nodes_truenodeids: Integers | None = None,
    nodes_values: Floats | None = None,
    post_transform: str = "NONE",
    context: Context,
) -> tuple[Any, Any]:
    """Version 3 without the attributes that are tensors."""
    return tree_ensemble_classifier_3(
        X,
        base_values=base_values,
        class_ids=class_ids,
        class_nodeids=class_nodeids,
        class_treeids=class_treeids,
        class_weights=class_weights,
        classlabels_int64s=classlabels_int64s,
        classlabels_strings=classlabels_strings,
        nodes_falsenodeids=nodes_falsenodeids,
        nodes_featureids=nodes_featureids,
        nodes_hitrates=nodes_hitrates,
        nodes_missing_value_tracks_true=nodes_missing_value_tracks_true,
        nodes_modes=nodes_modes,
        nodes_nodeids=nodes_nodeids,
        nodes_treeids=nodes_treeids,
        nodes_truenodeids=nodes_truenodeids,
        nodes_values=nodes_values,
        post_transform=post_transform,
        context=context,
    )


@operator("TreeEnsembleClassifier", since_version=3, domain=ML, loops=True)
def tree_ensemble_classifier_3(
    X: Any,
    /,
    *,
    base_values: Floats | None = None,
    base_values_as_tensor: np.ndarray | None = None,
    class_ids: Integers | None = None,
    class_nodeids: Integers | None = None,
    class_treeids: Integers | None = None,
    class_weights: Floats | None = None,
    class_weights_as_tensor: np.ndarray | None = None,
    classlabels_int64s: Integers | None = None,
    classlabels_strings: tuple[str, ...] | None = None,
    nodes_falsenodeids: Integers | None = None,
    nodes_featureids: Integers | None = None,
    nodes_hitrates: Floats | None = None,
    nodes_hitrates_as_tensor: np.ndarray | None = None,
    nodes_missing_value_tracks_true: Integers | None = None,
    nodes_modes: tuple[str, ...] | None = None,
    nodes_nodeids: Integers | None = None,
    nodes_treeids: Integers | None = None,
    nodes_truenodeids: Integers | None = None,
    nodes_values: Floats | None = None,
    nodes_values_as_tensor: np.ndarray | None = None,
    post_transform: str = "NONE",
    context: Context,
) -> tuple[Any, Any]:
    """Label and scores, one column for each label.

    Three or more classes: the label of the highest of the classes that any leaf scored. Two classes whose leaves all
    score the same class id are one probability (all weights positive, threshold 0.5) or one margin (threshold 0), which
    `second_class` spreads over two columns. The standard does not say this; it is what onnxruntime does. So is the
    rest of the two-class case: a class that no leaf scored is 0 whatever its base value, and with two base values and
    both classes scored the columns are the margin `score[0] + base[1]` and its negative.
    """
    labels = classlabels_strings or classlabels_int64s or ()
    values = nodes_values if nodes_values_as_tensor is None else nodes_values_as_tensor
    weights = class_weights if class_weights_as_tensor is None else class_weights_as_tensor
    x, dtype = _input(X, isinstance(values, np.ndarray) and values.dtype == np.float64)
    trees = _named_trees(
        max(1, len(labels)),
        dtype,
        {
            "treeids": nodes_treeids,
            "nodeids": nodes_nodeids,
            "featureids": nodes_featureids,
            "values": values,
            "modes": nodes_modes,
            "truenodeids": nodes_truenodeids,
            "falsenodeids": nodes_falsenodeids,
            "missing": nodes_missing_value_tracks_true,
        },
        class_treeids,
        class_nodeids,
        class_ids,
        weights,
    )
    base = base_values if base_values_as_tensor is None else base_values_as_tensor
    bases = np.asarray(() if base is None else base).astype(dtype).reshape(-1)
    scores, scored = _aggregate(trees, x, "SUM")
    positive = bool((np.asarray(weights if weights is not None else ()) >= 0).all())
    one_id = len(set(class_ids or ())) == 1
    index, columns = _decide(scores, scored, bases, post_transform, positive, one_id)
    label = labels_of(index, classlabels_strings, classlabels_int64s, context)
    return label, columns.astype(np.float32)


def _decide(
    scores: Any, scored: Any, bases: np.ndarray, transform: str, positive: bool, one_id: bool
) -> tuple[Any, Any]:
    """`(class index, columns)` out of the summed scores."""
    np_ = xp(scores)
    if scores.shape[1] > 2:
        if len(bases):
            scores, scored = scores + bases, np_.ones_like(scored)
        worst = scores.dtype.type(-np.inf)
        return first_highest(np_.where(scored, scores, worst), 1), transformed(scores, transform)
    if scores.shape[1] == 1:
        scores = scores + (bases[0] if len(bases) else 0)
        return np_.zeros(scores.shape[0], np.int64), _single(scores, transform)
    zero, one, has_zero, has_one = scores[:, 0], scores[:, 1], scored[:, 0], scored[:, 1]
    if len(bases) == 2:
        margin = zero + bases[1]
        zero, one = np_.where(has_one, -margin, zero + bases[0]), np_.where(has_one, margin, one)
    elif len(bases) == 1:
        zero = zero + bases[0]
    weight = np_.where(has_one, one, zero)
    index = (weight > (0.5 if one_id and positive else 0)).astype(np.int64)
    nothing = np_.zeros_like(zero)
    two = np_.stack([np_.where(has_zero, zero, nothing), np_.where(has_one, one, nothing)], axis=1)
    columns = transformed(two, transform)
    if len(bases) != 2 and (one_id or not len(bases)):
        spread = second_class(zero[:, None], transform, mixed=not (one_id and positive) or transform == "LOGISTIC")
        columns = np_.where(has_one[:, None], columns, spread)
    return index, columns


def _single(scores: Any, transform: str) -> Any:
    """One target: PROBIT is applied and none of the others, as in onnxruntime."""
    return probit(scores) if transform == "PROBIT" else scores


# --- regressor --------------------------------------------------------------------------------------------------------


@operator("TreeEnsembleRegressor", since_version=1, domain=ML, loops=True)
def tree_ensemble_regressor_1(
    X: Any,
    /,
    *,
    aggregate_function: str = "SUM",
    base_values: Floats | None = None,
    n_targets: int | None = None,
    nodes_falsenodeids: Integers | None = None,
    nodes_featureids: Integers | None = None,
    nodes_hitrates: Floats | None = None,
    nodes_missing_value_tracks_true: Integers | None = None,
    nodes_modes: tuple[str, ...] | None = None,
    nodes_nodeids: Integers | None = None,
    nodes_treeids: Integers | None = None,
    nodes_truenodeids: Integers | None = None,
    nodes_values: Floats | None = None,
    post_transform: str = "NONE",
    target_ids: Integers | None = None,
    target_nodeids: Integers | None = None,
    target_treeids: Integers | None = None,
    target_weights: Floats | None = None,
) -> Any:
    """Version 3 without the attributes that are tensors."""
    return tree_ensemble_regressor_3(
        X,
        aggregate_function=aggregate_function,
        base_values=base_values,
        n_targets=n_targets,
        nodes_falsenodeids=nodes_falsenodeids,
        nodes_featureids=nodes_featureids,
        nodes_hitrates=nodes_hitrates,
        nodes_missing_value_tracks_true=nodes_missing_value_tracks_true,
        nodes_modes=nodes_modes,
        nodes_nodeids=nodes_nodeids,
        nodes_treeids=nodes_treeids,
        nodes_truenodeids=nodes_truenodeids,
        nodes_values=nodes_values,
        post_transform=post_transform,
        target_ids=target_ids,
        target_nodeids=target_nodeids,
        target_treeids=target_treeids,
        target_weights=target_weights,
    )


@operator("TreeEnsembleRegressor", since_version=3, domain=ML, loops=True)
def tree_ensemble_regressor_3(
    X: Any,
    /,
    *,
    aggregate_function: str = "SUM",
    base_values: Floats | None = None,
    base_values_as_tensor: np.ndarray | None = None,
    n_targets: int | None = None,
    nodes_falsenodeids: Integers | None = None,
    nodes_featureids: Integers | None = None,
    nodes_hitrates: Floats | None = None,
    nodes_hitrates_as_tensor: np.ndarray | None = None,
    nodes_missing_value_tracks_true: Integers | None = None,
    nodes_modes: tuple[str, ...] | None = None,
    nodes_nodeids: Integers | None = None,
    nodes_treeids: Integers | None = None,
    nodes_truenodeids: Integers | None = None,
    nodes_values: Floats | None = None,
    nodes_values_as_tensor: np.ndarray | None = None,
    post_transform: str = "NONE",
    target_ids: Integers | None = None,
    target_nodeids: Integers | None = None,
    target_treeids: Integers | None = None,
    target_weights: Floats | None = None,
    target_weights_as_tensor: np.ndarray | None = None,
) -> Any:
    """`(rows, targets)` float32. Base values are added after the aggregation; one for all targets counts with one target."""
    values = nodes_values if nodes_values_as_tensor is None else nodes_values_as_tensor
    weights = target_weights if target_weights_as_tensor is None else target_weights_as_tensor
    x, dtype = _input(X, isinstance(values, np.ndarray) and values.dtype == np.float64)
    targets = max(target_ids or (0,)) + 1 if n_targets is None else n_targets
    trees = _named_trees(
        targets,
        dtype,
        {
            "treeids": nodes_treeids,
            "nodeids": nodes_nodeids,
            "featureids": nodes_featureids,
            "values": values,
            "modes": nodes_modes,
            "truenodeids": nodes_truenodeids,
            "falsenodeids": nodes_falsenodeids,
            "missing": nodes_missing_value_tracks_true,
        },
        target_treeids,
        target_nodeids,
        target_ids,
        weights,
    )
    scores, _ = _aggregate(trees, x, aggregate_function)
    base = base_values if base_values_as_tensor is None else base_values_as_tensor
    if base is not None and len(base) == targets:
        scores = scores + np.asarray(base).astype(dtype)
    scores = _single(scores, post_transform) if targets == 1 else transformed(scores, post_transform)
    return scores.astype(np.float32)


# --- version 5: one operator for both ---------------------------------------------------------------------------------

AGGREGATES = ("AVERAGE", "SUM", "MIN", "MAX")
TRANSFORMS_5 = ("NONE", "SOFTMAX", "LOGISTIC", "SOFTMAX_ZERO", "PROBIT")


@operator("TreeEnsemble", since_version=5, domain=ML, loops=True)
def tree_ensemble_5(
    X: Any,
    /,
    *,
    aggregate_function: int = 1,
    leaf_targetids: Integers,
    leaf_weights: np.ndarray,
    membership_values: np.ndarray | None = None,
    n_targets: int | None = None,
    nodes_falseleafs: Integers,
    nodes_falsenodeids: Integers,
    nodes_featureids: Integers,
    nodes_hitrates: np.ndarray | None = None,
    nodes_missing_value_tracks_true: Integers | None = None,
    nodes_modes: np.ndarray,
    nodes_splits: np.ndarray,
    nodes_truenodeids: Integers,
    nodes_trueleafs: Integers,
    post_transform: int = 0,
    tree_roots: Integers,
) -> Any:
    """`(rows, targets)` in the dtype of X; float16 is compared and summed in float32.

    Inner nodes and leaves are apart; a single leaf is a node whose both ways are that leaf. BRANCH_MEMBER nodes take
    their sets from `membership_values` in order, each ended by a NaN. `post_transform` counts as the standard's text does
    (1 is SOFTMAX, 2 is LOGISTIC); onnxruntime has these two the other way round.
    """
    if not 0 <= aggregate_function < len(AGGREGATES) or not 0 <= post_transform < len(TRANSFORMS_5):
        raise ValueError(f"aggregate_function {aggregate_function} or post_transform {post_transform} is unknown")
    x, dtype = _input(X, False)
    inner, leaves = len(nodes_featureids), len(leaf_targetids)
    targets = max(leaf_targetids, default=0) + 1 if n_targets is None else n_targets
    ways = []
    for ids, is_leaf in ((nodes_truenodeids, nodes_trueleafs), (nodes_falsenodeids, nodes_falseleafs)):
        to_leaf = np.asarray(is_leaf, np.int64) != 0
        index = np.asarray(ids, np.int64)
        if ((index < 0) | (index >= np.where(to_leaf, leaves, inner))).any():
            raise ValueError("a node points to a node or leaf that does not exist")
        ways.append(np.concatenate([np.where(to_leaf, index + inner, index), np.arange(inner, inner + leaves)]))
    modes = np.concatenate([np.asarray(nodes_modes, np.int8).reshape(-1), np.full(leaves, LEAF, np.int8)])
    if ((modes[:inner] < 0) | (modes[:inner] > MEMBER)).any():
        raise ValueError("nodes_modes holds a mode that is unknown")
    roots = np.asarray(tree_roots, np.int64)
    if len(roots) == 0 or roots.min() < 0 or roots.max() >= inner:
        raise ValueError("tree_roots is empty or names a node that does not exist")
    tail = np.zeros(leaves, np.int64)
    target = np.asarray(leaf_targetids, np.int64)
    if len(target) and (target.min() < 0 or target.max() >= targets):
        raise ValueError(f"a leaf names target {target.max()}, but there are {targets}")
    weights, scored = np.zeros((inner + leaves, targets), dtype), np.zeros((inner + leaves, targets), bool)
    weights[np.arange(inner, inner + leaves), target] = np.asarray(leaf_weights).astype(dtype).reshape(-1)
    scored[np.arange(inner, inner + leaves), target] = True
    missing = nodes_missing_value_tracks_true or (0,) * inner
    trees = _Trees(
        features=np.concatenate([np.asarray(nodes_featureids, np.int64), tail]).astype(np.int32),
        splits=np.concatenate([np.asarray(nodes_splits).astype(dtype).reshape(-1), tail.astype(dtype)]),
        modes=modes,
        missing=np.concatenate([np.asarray(missing) != 0, tail != 0]),
        when_true=ways[0].astype(np.int32),
        when_false=ways[1].astype(np.int32),
        roots=roots.astype(np.int32),
        depth=_depth(roots, ways[0], ways[1], modes == LEAF),
        members=_members(modes, membership_values, dtype),
        weights=weights,
        scored=scored,
    )
    scores, _ = _aggregate(trees, x, AGGREGATES[aggregate_function])
    name = TRANSFORMS_5[post_transform]
    scores = _single(scores, name) if targets == 1 else transformed(scores, name)
    return scores.astype(X.dtype if X.dtype.kind == "f" else np.float32)


def _members(modes: np.ndarray, values: np.ndarray | None, dtype: Any) -> np.ndarray | None:
    nodes = np.flatnonzero(modes == MEMBER)
    if not len(nodes):
        return None
    flat = np.asarray(() if values is None else values).astype(dtype).reshape(-1)
    ends = np.flatnonzero(np.isnan(flat))
    if len(ends) < len(nodes) - (1 if len(flat) and not np.isnan(flat[-1]) else 0):
        raise ValueError(f"membership_values holds {len(ends)} sets, but {len(nodes)} nodes test one")
    sets = np.split(flat, ends + 1)[: len(nodes)]
    table = np.full((len(modes), max(1, *(len(s) for s in sets))), np.nan, dtype)
    for node, members in zip(nodes, sets, strict=True):
        table[node, : len(members)] = members
    return table
