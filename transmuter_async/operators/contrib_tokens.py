"""com.microsoft: tokens and hashes — Tokenizer, MurmurHash3, n-gram hashes and masks."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from transmuter_async.operators.context import Context
from transmuter_async.operators.regex import longest_matcher
from transmuter_async.operators.registry import is_host, operator, xp

MICROSOFT = "com.microsoft"
START, END = "\x02", "\x03"


# --- strings ----------------------------------------------------------------------------------------------------------


@operator("Tokenizer", since_version=1, domain=MICROSOFT, host=True)
def tokenizer_1(
    X: np.ndarray,
    /,
    *,
    mark: int,
    mincharnum: int,
    pad_value: str,
    separators: tuple[str, ...] | None = None,
    tokenexp: str | None = None,
) -> np.ndarray:
    """Strings to tokens along one more axis, between start and end marks if `mark`, padded with `pad_value` behind.

    Tokens are what lies between matches of the separators, which are tried in order, each within what the ones before
    left; or the matches of `tokenexp`. Both are RE2 expressions, of which the longest match counts. An empty separator, or the expression ".", splits into characters. Tokens of fewer
    than `mincharnum` characters are dropped.
    """
    if X.ndim not in (1, 2):
        raise ValueError(f"X has shape {X.shape}, but has to be (C,) or (N, C)")
    if (separators is None) == (tokenexp is None):
        raise ValueError("one of separators and tokenexp has to be given, and only one")
    by_character = tokenexp == "." or separators is not None and tuple(separators) == ("",)
    if separators is not None and "" in separators and not by_character:
        raise ValueError("an empty separator has to be the only one")
    rows = []
    for text in X.reshape(-1).tolist():
        if by_character:
            rows.append(list(text))
            continue
        parts = [text]
        if tokenexp is not None:
            parts = _matches(tokenexp, text)
        for separator in separators or ():
            parts = [piece for part in parts for piece in _split(separator, part)]
        rows.append([part for part in parts if part and len(part) >= mincharnum])
    longest = max((len(row) for row in rows), default=0)
    if longest == 0:
        return np.empty((*X.shape, 0), object)
    width = longest + (2 if mark else 0)
    table = np.full((len(rows), width), pad_value, object)
    for place, row in enumerate(rows):
        filled = [START, *row, END] if mark else row
        table[place, : len(filled)] = filled
    return table.reshape(*X.shape, width)


def _next_match(pattern: str, text: str, place: int) -> tuple[int, int]:
    """The leftmost match from `place` on, the longest of those that begin there; (-1, -1) where there is none."""
    longest = longest_matcher(pattern)
    for start in range(place, len(text) + 1):
        end = longest(text, start)
        if end >= 0:
            return start, end
    return -1, -1


def _split(pattern: str, text: str) -> list[str]:
    """What lies between the matches. An empty match takes the character behind it away, as in onnxruntime."""
    pieces, place = [], 0
    while place < len(text):
        start, end = _next_match(pattern, text, place)
        if start < 0:
            break
        pieces.append(text[place:start])
        place = max(end, start + 1)
    pieces.append(text[place:])
    return pieces


def _matches(pattern: str, text: str) -> list[str]:
    """The matches, which do not overlap; empty ones are skipped."""
    found, place = [], 0
    while place < len(text):
        start, end = _next_match(pattern, text, place)
        if start < 0:
            break
        found.append(text[start:end])
        place = max(end, start + 1)
    return [match for match in found if match]


# --- hashes -----------------------------------------------------------------------------------------------------------

_C1, _C2, _N = np.uint32(0xCC9E2D51), np.uint32(0x1B873593), np.uint32(0xE6546B64)


def _rotate(x: Any, bits: int) -> Any:
    return (x << np.uint32(bits)) | (x >> np.uint32(32 - bits))


def _final(state: Any, length: int) -> Any:
    state = state ^ np.uint32(length)
    state = (state ^ (state >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    state = (state ^ (state >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return state ^ (state >> np.uint32(16))


def _block(state: Any, word: Any) -> Any:
    state = state ^ (_rotate(word * _C1, 15) * _C2)
    return _rotate(state, 13) * np.uint32(5) + _N


def _of_text(text: str, seed: int) -> int:
    data = text.encode()
    state = np.asarray(seed & 0xFFFFFFFF, np.uint32)
    whole = len(data) // 4 * 4
    for word in np.frombuffer(data[:whole], "<u4"):
        state = _block(state, np.asarray(word, np.uint32))
    tail = int.from_bytes(data[whole:], "little")
    if len(data) > whole:
        state = state ^ (_rotate(np.asarray(tail, np.uint32) * _C1, 15) * _C2)
    return int(_final(state, len(data)))


@operator("MurmurHash3", since_version=1, domain=MICROSOFT)
def murmur_hash3_1(X: Any, /, *, positive: int = 1, seed: int = 0) -> Any:
    """The 32-bit MurmurHash3 of each element's bytes, uint32, or int32 with `positive=0`."""
    m = xp(X)
    with np.errstate(over="ignore"):
        if X.dtype == object:
            hashes: Any = np.fromiter((_of_text(text, seed) for text in X.reshape(-1).tolist()), np.uint32, X.size)
            hashes = hashes.reshape(X.shape)
        else:
            if m is np:
                words: Any = np.ascontiguousarray(X).reshape(*X.shape, 1).view(np.uint32)
            else:
                words = jax.lax.bitcast_convert_type(X, jnp.uint32)
                words = words if X.dtype.itemsize > 4 else words[..., None]
            hashes = m.full(X.shape, np.uint32(seed & 0xFFFFFFFF))
            for place in range(words.shape[-1]):
                hashes = _block(hashes, words[..., place])
            hashes = _final(hashes, X.dtype.itemsize)
    if positive:
        return np.asarray(hashes) if m is np else hashes
    return np.asarray(hashes).view(np.int32) if m is np else jax.lax.bitcast_convert_type(hashes, jnp.int32)


# --- n-grams ----------------------------------------------------------------------------------------------------------


@operator("NGramRepeatBlock", since_version=1, domain=MICROSOFT)
def n_gram_repeat_block_1(input_ids: Any, scores: Any, /, *, ngram_size: int, context: Context) -> Any:
    """-inf for each token that would complete an n-gram which the row already holds."""
    if ngram_size < 1:
        raise ValueError(f"ngram_size is {ngram_size}, but has to be positive")
    m = xp(input_ids, scores)
    batch, length = input_ids.shape
    count = length - ngram_size + 1
    if count < 1 or batch == 0:
        return m.asarray(scores)
    suffix = input_ids[:, length - ngram_size + 1 :]
    same = m.ones((batch, count), bool)
    for place in range(ngram_size - 1):
        same = same & (input_ids[:, place : place + count] == suffix[:, place : place + 1])
    banned = m.where(same, input_ids[:, ngram_size - 1 : ngram_size - 1 + count], 0)
    banned, _ = context.bounded(banned, scores.shape[1], input="input_ids", axis=1)
    rows = np.broadcast_to(np.arange(batch)[:, None], (batch, count))
    if m is np:
        result = np.array(scores)
        result[rows[same], banned[same]] = -np.inf
        return result
    value = m.where(same, scores.dtype.type(-np.inf), scores.dtype.type(np.inf))
    return m.asarray(scores).at[rows, banned].min(value, mode="promise_in_bounds")


def _hashes(shifted: list[Any], multipliers: Any, vocab_sizes: Any, offsets: Any, heads: int, dtype: Any) -> Any:
    """`(..., orders * heads)` out of the ids `0 .. n - 1` positions back."""
    m = xp(*shifted, multipliers, vocab_sizes)
    with np.errstate(over="ignore"):
        mix = shifted[0] * multipliers[0]
        columns = []
        for order in range(1, len(shifted)):
            mix = mix ^ (shifted[order] * multipliers[order])
            sizes = vocab_sizes[(order - 1) * heads : order * heads]
            # A remainder with the divisor's sign; a size that is not positive (the host form refuses it) gives 0.
            safe = m.where(sizes > 0, sizes, m.ones_like(sizes))
            columns.append(m.where(sizes > 0, m.mod(mix[..., None], safe), m.zeros_like(sizes)))
        result = m.concatenate(columns, axis=-1)
        return (result if offsets is None else result + offsets).astype(dtype)


def _check_sizes(max_ngram_size: int, vocab_sizes: Any, context: Context) -> None:
    if max_ngram_size < 2:
        raise ValueError(f"max_ngram_size is {max_ngram_size}, but has to be at least 2")
    context.refuse(vocab_sizes <= 0, "vocab_sizes have to be positive")


def _cut(ids: Any, position: Any, limit: Any, fill: Any) -> Any:
    """`ids` with `fill` where their `position` lies before `limit`."""
    return xp(ids, position, limit).where(position >= limit, ids, fill)


def _running_maximum(values: Any, axis: int) -> Any:
    if is_host(values):
        return np.maximum.accumulate(values, axis=axis)
    return jax.lax.cummax(values, axis=axis)


@operator("NGramHashMapping", since_version=1, domain=MICROSOFT)
def n_gram_hash_mapping_1(
    input_ids: Any,
    multipliers: Any,
    vocab_sizes: Any,
    past_ids: Any = None,
    head_offsets: Any = None,
    eos_token_id: Any = None,
    segment_ids: Any = None,
    /,
    *,
    max_ngram_size: int,
    n_head_per_ngram: int,
    pad_id: int,
    reset_on_eos: int = 0,
    context: Context,
) -> tuple[Any, Any]:
    """Hashes of the n-grams that end at each token, for n from 2 on, and the ids to carry into the next call.

    What lies before the beginning, before an end-of-sequence token (`reset_on_eos`), or in another segment is the
    end-of-sequence id, or `pad_id` where there is none.
    """
    _check_sizes(max_ngram_size, vocab_sizes, context)
    m = xp(input_ids, multipliers, vocab_sizes, past_ids, eos_token_id, segment_ids)
    dtype = input_ids.dtype
    batch, length = input_ids.shape
    back = max_ngram_size - 1
    fill = np.asarray(pad_id, dtype) if eos_token_id is None else eos_token_id.reshape(()).astype(dtype)
    past = m.broadcast_to(fill, (batch, back)) if past_ids is None else past_ids
    both = m.concatenate([past, input_ids], axis=1)
    now = np.arange(length) + back
    # The first position that still counts for each token.
    limit: Any = m.zeros((batch, length), np.int64)
    if reset_on_eos and eos_token_id is not None:
        after = m.where(both == fill, np.arange(back + length) + 1, 0)
        limit = m.maximum(limit, _running_maximum(after, 1)[:, back - 1 : back + length - 1])
    if segment_ids is not None and length:
        changed = m.concatenate([m.zeros((batch, 1), bool), segment_ids[:, 1:] != segment_ids[:, :-1]], axis=1)
        limit = m.maximum(limit, _running_maximum(m.where(changed, now, 0), 1))
    shifted = [
        _cut(both[:, back - n : back - n + length], now - n, limit, fill) if n else input_ids
        for n in range(max_ngram_size)
    ]
    hashes = _hashes(shifted, multipliers, vocab_sizes, head_offsets, n_head_per_ngram, dtype)
    return hashes, both[:, length:]


@operator("VarlenNGramHashMapping", since_version=1, domain=MICROSOFT)
def varlen_n_gram_hash_mapping_1(
    input_ids: Any,
    multipliers: Any,
    vocab_sizes: Any,
    cumulative_sequence_length: Any,
    past_ids: Any = None,
    head_offsets: Any = None,
    eos_token_id: Any = None,
    segment_ids: Any = None,
    past_segment_ids: Any = None,
    capture_count: Any = None,
    /,
    *,
    max_ngram_size: int,
    n_head_per_ngram: int,
    pad_id: int,
    reset_on_eos: int = 0,
    state_update_capacity: int = 0,
    context: Context,
) -> tuple[Any, Any, Any, Any]:
    """NGramHashMapping over packed tokens of several requests: hashes, ids and segments to carry on, states captured."""
    _check_sizes(max_ngram_size, vocab_sizes, context)
    m = xp(input_ids, multipliers, vocab_sizes, cumulative_sequence_length, past_ids, eos_token_id, segment_ids)
    dtype, tokens, back = input_ids.dtype, input_ids.shape[0], max_ngram_size - 1
    edges = cumulative_sequence_length.astype(np.int64)
    requests = edges.shape[0] - 1
    starts, lengths = edges[:-1], edges[1:] - edges[:-1]
    fill = np.asarray(pad_id, dtype) if eos_token_id is None else eos_token_id.reshape(()).astype(dtype)
    past = m.broadcast_to(fill, (requests, back)) if past_ids is None else past_ids
    owner = m.clip((np.arange(tokens)[:, None] >= edges[1:]).sum(1), 0, max(0, requests - 1))
    local = np.arange(tokens) - m.take(starts, owner, mode="clip")

    def read(live: Any, old: Any, position: Any, request: Any) -> Any:
        """The entry at a position of a request, negative ones out of what came before it."""
        place = m.clip(m.take(starts, request, mode="clip") + position, 0, max(0, tokens - 1))
        before = old[request, m.clip(back + position, 0, back - 1)]
        return m.where(position >= 0, m.take(live, place, mode="clip"), before)

    segments_before = None
    if segment_ids is not None:
        segments_before = past_segment_ids
        if segments_before is None:  # unknown: as if the first segment had always been there
            first = m.take(segment_ids, m.clip(starts, 0, max(0, tokens - 1)), mode="clip")
            segments_before = m.broadcast_to(first[:, None], (requests, back))
    shifted, alive = [input_ids], m.ones(tokens, bool)
    for n in range(1, max_ngram_size):
        ids = read(input_ids, past, local - n, owner)
        if reset_on_eos and eos_token_id is not None:
            alive = alive & (ids != fill)
        if segment_ids is not None:
            here = read(segment_ids, segments_before, local - n + 1, owner)
            alive = alive & (read(segment_ids, segments_before, local - n, owner) == here)
        shifted.append(m.where(alive, ids, fill))
    hashes = _hashes(shifted, multipliers, vocab_sizes, head_offsets, n_head_per_ngram, dtype)
    which = np.broadcast_to(np.arange(requests)[:, None], (requests, back))
    tail = lengths[:, None] - back + np.arange(back)
    present = read(input_ids, past, tail, which)
    present_segments = None
    if segment_ids is not None:
        present_segments = read(segment_ids, segments_before, tail, which)
    update = None
    if state_update_capacity:
        if capture_count is None:
            raise context.error("state_update_capacity needs capture_count")
        slot = np.arange(state_update_capacity)[None, :, None]
        position = np.broadcast_to(
            slot + 1 - back + np.arange(back)[None, None], (requests, state_update_capacity, back)
        )
        request = np.broadcast_to(np.arange(requests)[:, None, None], position.shape)
        count = m.minimum(capture_count.astype(np.int64), lengths)[:, None, None]
        update = m.where(slot < count, read(input_ids, past, position, request), np.asarray(pad_id, dtype))
    return hashes, present, present_segments, update


@operator("BifurcationDetector", since_version=1, domain=MICROSOFT, host=True)
def bifurcation_detector_1(
    src_tokens: np.ndarray,
    cur_tokens: np.ndarray,
    prev_suffix_match_idx: np.ndarray,
    pred_tokens: np.ndarray | None = None,
    /,
    *,
    max_ngram_size: int = 3,
    min_ngram_size: int = 1,
) -> tuple[np.ndarray, np.ndarray]:
    """Aggressive decoding: take over the predictions up to the first that differs from the source; then find the end.

    The last n-gram of the result is looked for in the source, where it must occur once: the place behind it, or -1.
    """
    tokens = cur_tokens
    if pred_tokens is not None:
        start = int(prev_suffix_match_idx.reshape(-1)[0])
        if not 0 <= start <= len(src_tokens) or len(pred_tokens) != len(src_tokens) + 1 - start:
            raise ValueError(
                f"{len(pred_tokens)} predictions do not fit {len(src_tokens)} source tokens from place {start} on"
            )
        differs = np.flatnonzero(pred_tokens[:-1] != src_tokens[start:])
        same = int(differs[0]) if len(differs) else len(src_tokens) - start
        tokens = np.concatenate([cur_tokens, pred_tokens[: same + 1]])
    match = -1
    for size in range(min_ngram_size, max_ngram_size + 1):
        if size > len(tokens) or size > len(src_tokens):
            break
        views = np.lib.stride_tricks.sliding_window_view(src_tokens, size)
        found = np.flatnonzero((views == tokens[len(tokens) - size :]).all(1))
        if not len(found):
            break
        match = int(found[0]) + size
        if match >= len(src_tokens):
            break
        if len(found) > 1:
            match = -1
    return tokens, np.full(prev_suffix_match_idx.shape, match, np.int64)
