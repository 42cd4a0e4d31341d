"""Operators on strings, which live on the host: object arrays of `str`. TfIdfVectorizer also takes, and traces, integers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import jax.numpy as jnp
import numpy as np

from transmuter_async.graph import STRING
from transmuter_async.operators.context import Context
from transmuter_async.operators.regex import full_matcher
from transmuter_async.operators.registry import is_host, operator, xp

__all__: list[str] = []


def _strings(values: Any, shape: tuple[int, ...]) -> np.ndarray:
    """A string tensor of `shape` from an iterable; numpy alone would make a matrix of equally long lists."""
    out = np.empty(len(values), STRING)
    out[:] = values
    return out.reshape(shape)


@operator("StringConcat", since_version=20, host=True)
def string_concat_20(X: Any, Y: Any, /) -> np.ndarray:
    """Strings joined element by element, broadcast."""
    left, right = np.broadcast_arrays(X, Y)
    return _strings([a + b for a, b in zip(left.reshape(-1), right.reshape(-1), strict=True)], left.shape)


@operator("StringSplit", since_version=20, host=True)
def string_split_20(
    X: Any,
    /,
    *,
    delimiter: str | None = None,
    maxsplit: int | None = None,
    context: Context,
) -> tuple[np.ndarray, np.ndarray]:
    """Pieces on a new last axis, filled up with "", and the number of pieces, int64.

    Without a delimiter (or with "") any run of whitespace separates, and none is left at the ends. An empty string has
    no pieces, as in onnxruntime; the reference evaluator counts one where a delimiter is given.
    """
    most = -1 if maxsplit is None else maxsplit
    pieces = []
    for text in X.reshape(-1):
        found = text.split(delimiter or None, most) if text else []
        if not delimiter and found:
            found[-1] = found[-1].rstrip()  # str.split leaves it after the last allowed split
        pieces.append(found)
    longest = max(map(len, pieces), default=0)
    context.budget((*X.shape, longest), STRING)
    flat = [piece for found in pieces for piece in [*found, *[""] * (longest - len(found))]]
    counts = np.array([len(found) for found in pieces], np.int64).reshape(X.shape)
    return _strings(flat, (*X.shape, longest)), counts


@operator("RegexFullMatch", since_version=20, host=True)
def regex_full_match_20(X: Any, /, *, pattern: str | None = None) -> np.ndarray:
    """Whether each whole string matches `pattern`, in the syntax of RE2."""
    if pattern is None:
        raise ValueError("RegexFullMatch has no `pattern`")
    matches = full_matcher(pattern)
    return np.array([matches(text) for text in X.reshape(-1)], np.bool_).reshape(X.shape)


# --- StringNormalizer -------------------------------------------------------------------------------------------------

_TURKIC = {"LOWER": {"I": "ı", "İ": "i"}, "UPPER": {"i": "İ", "ı": "I"}}


def _case_changer(action: str, locale: str | None) -> Callable[[str], str]:
    """Character by character, as the C library does it: what would become several characters stays."""
    if action == "NONE":
        return str
    special = _TURKIC[action] if locale is not None and locale[:2] in ("tr", "az") else {}

    def change(text: str) -> str:
        changed = []
        for char in text:
            other = special.get(char) or (char.lower() if action == "LOWER" else char.upper())
            changed.append(other if len(other) == 1 else char)
        return "".join(changed)

    return change


@operator("StringNormalizer", since_version=10, host=True)
def string_normalizer_10(
    X: Any,
    /,
    *,
    case_change_action: str = "NONE",
    is_case_sensitive: int = 0,
    locale: str | None = None,
    stopwords: Sequence[str] | None = None,
) -> np.ndarray:
    """Remove stopwords from (C,) or (1, C) strings and change the case of the rest; nothing left is one "".

    Case changes character by character, as in onnxruntime ("ß" stays); of locales only the Turkic i makes a difference.
    """
    if case_change_action not in ("NONE", "LOWER", "UPPER"):
        raise ValueError(f"case_change_action {case_change_action!r} is none of NONE, LOWER, UPPER")
    if X.ndim not in (1, 2) or (X.ndim == 2 and X.shape[0] != 1):
        raise ValueError(f"X has shape {list(X.shape)}, neither (C,) nor (1, C)")
    change = _case_changer(case_change_action, locale)
    compared: Callable[[str], str] = str
    if not is_case_sensitive:
        compared = _case_changer("LOWER" if case_change_action == "NONE" else case_change_action, locale)
    stop = {compared(word) for word in stopwords or ()}
    kept = [change(text) for text in X.reshape(-1) if compared(text) not in stop] or [""]
    return _strings(kept, (len(kept),) if X.ndim == 1 else (1, len(kept)))


# --- TfIdfVectorizer --------------------------------------------------------------------------------------------------


@operator("TfIdfVectorizer", since_version=9)
def tf_idf_vectorizer_9(
    X: Any,
    /,
    *,
    max_gram_length: int,
    max_skip_count: int,
    min_gram_length: int,
    mode: str,
    ngram_counts: Sequence[int],
    ngram_indexes: Sequence[int],
    pool_int64s: Sequence[int] | None = None,
    pool_strings: Sequence[str] | None = None,
    weights: Sequence[float] | None = None,
    context: Context,
) -> Any:
    """How often each n-gram of the pool occurs in (C,) or in each row of (N, C): (W,) or (N, W) float32.

    With skips of up to `max_skip_count` between the items of an n-gram; single items are counted once. "IDF" gives the
    weight where the n-gram occurs, "TFIDF" the count times the weight.
    """
    if mode not in ("TF", "IDF", "TFIDF") or X.ndim not in (1, 2):
        raise ValueError(f"mode {mode!r} must be TF, IDF or TFIDF, and X of shape {list(X.shape)} have 1 or 2 axes")
    if not 1 <= min_gram_length <= max_gram_length or max_skip_count < 0 or not len(ngram_indexes):
        raise ValueError(f"n-grams of {min_gram_length} to {max_gram_length} items, {max_skip_count} skipped, are none")
    if (pool_strings is None) == (pool_int64s is None) or (pool_strings is not None) != (X.dtype == STRING):
        raise ValueError("pool_strings goes with strings, pool_int64s with integers")
    pool = np.asarray(pool_int64s, np.int64) if pool_strings is None else _strings(list(pool_strings), (-1,))
    vocabulary, words = np.unique(pool, return_inverse=True)
    words = words.reshape(-1).astype(np.int64)
    rows = _tokens(X if X.ndim == 2 else X[None], vocabulary)
    columns, width = np.asarray(ngram_indexes, np.int64), max(ngram_indexes) + 1
    context.budget((rows.shape[0], width), np.float32)
    counts = xp(rows).zeros((rows.shape[0], width + 1), np.float32)
    bounds = [*ngram_counts, len(pool)]
    first = 0
    for length, (start, stop) in enumerate(pairwise(bounds), 1):
        grams = words[start:stop].reshape(-1, length)
        targets = columns[first : first + len(grams)]
        first += len(grams)
        if min_gram_length <= length <= max_gram_length and len(grams):
            counts = _count(counts, rows, grams, targets, max_skip_count if length > 1 else 0, len(vocabulary))
    if first != len(columns):
        raise ValueError(f"ngram_indexes names {len(columns)} n-grams, the pool has {first}")
    result = counts[:, :width]
    if mode != "TF":
        scale = np.zeros(width, np.float32)
        scale[columns] = 1 if weights is None else np.asarray(weights, np.float32)
        result = (xp(result).minimum(result, np.float32(1)) if mode == "IDF" else result) * scale
    return result if X.ndim == 2 else result[0]


def _tokens(x: Any, vocabulary: np.ndarray) -> Any:
    """Each item's number in the sorted vocabulary, -1 for one that it lacks."""
    if x.dtype == STRING:
        number = {word: index for index, word in enumerate(vocabulary)}
        return np.array([number.get(word, -1) for word in x.reshape(-1)], np.int64).reshape(x.shape)
    return _ranks(x.astype(np.int64), vocabulary)


def _ranks(x: Any, table: np.ndarray) -> Any:
    """Positions in a sorted table, -1 for what it lacks."""
    module = xp(x)
    index = module.minimum(module.searchsorted(table, x), len(table) - 1)
    return module.where(module.asarray(table)[index] == x, index.astype(np.int64), np.int64(-1))


def _count(counts: Any, rows: Any, grams: np.ndarray, targets: np.ndarray, skips: int, size: int) -> Any:
    """`counts` with the occurrences of `grams` (k, n) in `rows` added at the columns `targets`; a miss lands in the last.

    An n-gram is told from its prefix's number and its last item, so that it is one number however long it is.
    """
    steps = []
    code = grams[:, 0]
    for item in grams.T[1:]:
        table, code = np.unique(code * size + item, return_inverse=True)
        code = code.reshape(-1)
        steps.append(table)
    if len(np.unique(code)) != len(code):
        raise ValueError("the pool holds an n-gram twice")
    column = np.full(size if not steps else len(steps[-1]), counts.shape[1] - 1, np.int64)
    column[code] = targets
    length, items = grams.shape[1], rows.shape[1]
    for stride in range(1, skips + 2):
        windows = items - stride * (length - 1)
        if windows <= 0:
            break
        found = rows[:, :windows]
        for place, table in enumerate(steps, 1):
            item = rows[:, place * stride : place * stride + windows]
            both = xp(found).where((found >= 0) & (item >= 0), found * size + item, np.int64(-1))
            found = _ranks(both, table)
        where = xp(found).where(found >= 0, xp(found).asarray(column)[found], np.int64(counts.shape[1] - 1))
        row = np.broadcast_to(np.arange(rows.shape[0])[:, None], where.shape)
        if is_host(counts, where):
            np.add.at(counts, (row, where), np.float32(1))
        else:
            counts = jnp.asarray(counts).at[row, where].add(np.float32(1), mode="promise_in_bounds")
    return counts
