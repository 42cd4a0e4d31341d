"""com.microsoft: operators that generate text — GreedySearch, Sampling, BeamSearch, WhisperBeamSearch.

They carry a decoder (and an encoder) as subgraphs and call it once a token, on the host: how long an answer becomes depends
on its tokens. Everything between two calls is numpy. A decoder only is GPT-2's kind (`model_type` 0, a cache
`(2, rows, heads, tokens, size)` a layer); an encoder and a decoder are T5's (1) and Whisper's (2). The inputs and outputs of
the subgraphs come in the order of onnxruntime's converter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from transmuter_async.operators.context import Context
from transmuter_async.operators.contrib_decoders import prepare
from transmuter_async.operators.contrib_tokens import n_gram_repeat_block_1
from transmuter_async.operators.random import uniform
from transmuter_async.operators.registry import operator
from transmuter_async.operators.threefry import fold_in

MICROSOFT = "com.microsoft"
LOWEST = np.finfo(np.float32).min


def _number(value: np.ndarray | None, default: Any) -> Any:
    return default if value is None else value.reshape(-1)[0].item()


# --- what is done to the logits ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Rules:
    """What is allowed as the next token."""

    eos: int
    minimum: int = 0
    repetition: float = 1.0
    ngram: int = 0
    vocab_mask: np.ndarray | None = None
    prefix_mask: np.ndarray | None = None
    temperature: float = 1.0
    presence: np.ndarray | None = None

    def apply(self, scores: np.ndarray, sequences: np.ndarray, first: bool) -> np.ndarray:
        """`scores` `(rows, vocabulary)` changed by the rules, in onnxruntime's order, for the next token of each row."""
        rows = np.arange(len(scores))[:, None]
        if self.repetition != 1.0:
            seen = np.zeros(scores.shape, bool)
            seen[rows, np.clip(sequences, 0, scores.shape[1] - 1)] = True
            factor = np.float32(self.repetition)
            scores = np.where(seen, np.where(scores < 0, scores * factor, scores / factor), scores)
        if self.ngram > 0:
            scores = n_gram_repeat_block_1(sequences, scores, ngram_size=self.ngram)
            scores = np.maximum(scores, LOWEST)
        if self.vocab_mask is not None:
            scores = np.where(self.vocab_mask.reshape(1, -1) == 0, LOWEST, scores)
        if self.prefix_mask is not None and first:
            mask = self.prefix_mask.reshape(-1, scores.shape[1])
            mask = np.repeat(mask, len(scores) // max(1, len(mask)), axis=0)
            scores = np.where(mask == 0, LOWEST, scores)
        if sequences.shape[1] < self.minimum:
            scores = np.where(np.arange(scores.shape[1]) == self.eos, LOWEST, scores)
        if self.temperature not in (0.0, 1.0):
            scores = scores / np.float32(self.temperature)
        if self.presence is not None:
            scores = scores - self.presence
        return scores


# --- one answer a row -------------------------------------------------------------------------------------------------


def _search(
    attributes: dict[str, Any],
    ids: np.ndarray,
    max_length: np.ndarray,
    mask: np.ndarray | None,
    rules: _Rules,
    choose: Callable[[np.ndarray, int], np.ndarray],
    after: Callable[[np.ndarray], None] = lambda tokens: None,
) -> np.ndarray:
    """`(rows, max_length)`: tokens by `choose`, padding after a row's end."""
    model, sequences = prepare(attributes, ids, mask, None, 1)
    longest, pad, eos = _number(max_length, 0), attributes["pad_token_id"], attributes["eos_token_id"]
    if longest < sequences.shape[1]:
        raise ValueError(f"max_length is {longest}, but the prompt has {sequences.shape[1]} tokens already")
    done, tokens, number = np.zeros(len(sequences), bool), sequences, 0
    while sequences.shape[1] < longest:
        scores = rules.apply(model.step(tokens.astype(np.int32)), sequences, number == 0)
        chosen = choose(scores, number)
        done = done | (chosen == eos)
        chosen = np.where(done, pad, chosen).astype(np.int32)
        after(chosen)
        tokens, number = chosen[:, None], number + 1
        sequences = np.concatenate([sequences, tokens], axis=1)
        if done.all():
            break
    rest = np.full((len(sequences), longest - sequences.shape[1]), pad, np.int32)
    return np.concatenate([sequences.astype(np.int32), rest], axis=1)


@operator("GreedySearch", since_version=1, domain=MICROSOFT, host=True)
def greedy_search_1(
    input_ids: np.ndarray,
    max_length: np.ndarray,
    min_length: np.ndarray | None = None,
    repetition_penalty: np.ndarray | None = None,
    vocab_mask: np.ndarray | None = None,
    prefix_vocab_mask: np.ndarray | None = None,
    attention_mask: np.ndarray | None = None,
    /,
    *,
    decoder: Any,
    decoder_start_token_id: int = -1,
    encoder: Any = None,
    eos_token_id: int,
    init_decoder: Any = None,
    model_type: int = 0,
    no_repeat_ngram_size: int = 0,
    pad_token_id: int,
    vocab_size: int = -1,
) -> np.ndarray:
    """The most likely token, again and again. The end token itself is not written, padding is."""
    attributes = _attributes(locals())
    rules = _Rules(
        eos_token_id,
        _number(min_length, 0),
        _number(repetition_penalty, 1.0),
        no_repeat_ngram_size,
        vocab_mask,
        prefix_vocab_mask,
    )
    return _search(attributes, input_ids, max_length, attention_mask, rules, lambda scores, _: scores.argmax(1))


def _attributes(given: dict[str, Any]) -> dict[str, Any]:
    names = (
        "decoder",
        "encoder",
        "init_decoder",
        "model_type",
        "pad_token_id",
        "eos_token_id",
        "decoder_start_token_id",
    )
    return {name: given[name] for name in names}


@operator("Sampling", since_version=1, domain=MICROSOFT, host=True, random=True)
def sampling_1(
    input_ids: np.ndarray,
    max_length: np.ndarray,
    min_length: np.ndarray | None = None,
    repetition_penalty: np.ndarray | None = None,
    vocab_mask: np.ndarray | None = None,
    prefix_vocab_mask: np.ndarray | None = None,
    attention_mask: np.ndarray | None = None,
    presence_mask: np.ndarray | None = None,
    seed: np.ndarray | None = None,
    /,
    *,
    custom: int = 0,
    decoder: Any,
    decoder_start_token_id: int = -1,
    encoder: Any = None,
    eos_token_id: int,
    filter_value: float = -1.0000000200408773e20,
    init_decoder: Any = None,
    min_tokens_to_keep: int = 0,
    model_type: int = 0,
    no_repeat_ngram_size: int = 0,
    pad_token_id: int,
    presence_penalty: float = 0.0,
    temperature: float = 1.0,
    top_p: float = 0.0,
    vocab_size: int = -1,
    context: Context,
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens drawn from the smallest set of likely ones whose probabilities add up to `top_p`.

    Draws come from the key of the run (the input `seed` wins), so that they repeat with it; they are not those of
    onnxruntime's generator. The second output holds the filtered logits of the last step.
    """
    attributes = _attributes(locals())
    penalty = None
    if presence_mask is not None and presence_penalty:
        penalty = presence_mask.astype(np.float32) * np.float32(presence_penalty)
    rules = _Rules(
        eos_token_id,
        _number(min_length, 0),
        _number(repetition_penalty, 1.0),
        no_repeat_ngram_size,
        vocab_mask,
        prefix_vocab_mask,
        temperature,
        penalty,
    )
    key = np.asarray(context.random_key(None if seed is None else float(_number(seed, 0))))
    last = np.zeros((len(input_ids), 0), np.float32)

    def choose(scores: np.ndarray, number: int) -> np.ndarray:
        nonlocal last
        last = _nucleus(scores, top_p, np.float32(filter_value), min_tokens_to_keep, custom)
        powers = np.exp(last - last.max(1, keepdims=True))
        total = np.cumsum(powers / powers.sum(1, keepdims=True), axis=1)
        draws = uniform(fold_in(key, number), (len(scores),))
        return np.minimum((total <= draws[:, None]).sum(1), scores.shape[1] - 1)

    sequences = _search(attributes, input_ids, max_length, attention_mask, rules, choose)
    return sequences, last


def _nucleus(scores: np.ndarray, top_p: float, filler: np.float32, keep: int, custom: int) -> np.ndarray:
    """The logits outside of the nucleus replaced by `filler`."""
    if top_p <= 0 or top_p >= 1:
        return scores
    order = np.argsort(-scores, axis=1, kind="stable") if custom else np.argsort(scores, axis=1, kind="stable")
    ranked = np.take_along_axis(scores, order, axis=1)
    powers = np.exp(ranked - ranked.max(1, keepdims=True))
    total = np.cumsum(powers / powers.sum(1, keepdims=True), axis=1)
    place = np.arange(scores.shape[1])
    if custom:  # from the most likely on: what comes after the sum is reached
        before = np.concatenate([np.zeros((len(total), 1), total.dtype), total[:, :-1]], axis=1)
        dropped = (before > np.float32(top_p)) & (place >= keep)
    else:
        dropped = (total <= np.float32(1 - top_p)) & (place < scores.shape[1] - max(1, keep))
    result = scores.copy()
    np.put_along_axis(result, order, np.where(dropped, filler, ranked), axis=1)
    return result


# --- beams ------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Hypotheses:
    """The best finished answers of one input."""

    size: int
    penalty: float
    early: bool
    best: list[tuple[float, np.ndarray]] = field(default_factory=list)
    done: bool = False

    def add(self, sequence: np.ndarray, total: float) -> None:
        score = float(np.float32(total) / np.float32(len(sequence)) ** np.float32(self.penalty))
        if len(self.best) < self.size or score > self.best[-1][0]:
            self.best.append((score, sequence))
            self.best.sort(key=lambda entry: -entry[0])  # stable: of equal ones the older comes first
            del self.best[self.size :]

    def closed(self, total: float, length: int) -> bool:
        """Whether no running beam can still improve on what is kept."""
        if len(self.best) < self.size:
            return False
        return self.early or self.best[-1][0] >= total / length**self.penalty


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(1, keepdims=True))


def _beam_search(
    attributes: dict[str, Any],
    ids: np.ndarray,
    max_length: np.ndarray,
    beams: int,
    answers: int,
    penalty: float,
    mask: np.ndarray | None,
    start: np.ndarray | None,
    rules: _Rules,
    early: bool,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """`(batch, answers, max_length)` tokens, their scores, and the scores of all tokens at all steps."""
    if not 1 <= answers <= beams:
        raise ValueError(f"num_return_sequences is {answers}, but there are {beams} beams")
    model, sequences = prepare(attributes, ids, mask, start, beams)
    batch, longest = len(ids), _number(max_length, 0)
    pad, eos = attributes["pad_token_id"], attributes["eos_token_id"]
    begin = sequences.shape[1]
    if longest < begin:
        raise ValueError(f"max_length is {longest}, but the prompt has {begin} tokens already")
    totals = np.full((batch, beams), -1e9, np.float32)
    totals[:, 0] = 0
    kept = [_Hypotheses(beams, penalty, early) for _ in range(batch)]
    tokens = sequences
    steps: list[np.ndarray] = []
    vocabulary = 0
    while sequences.shape[1] < longest:
        scores = rules.apply(_log_softmax(model.step(tokens.astype(np.int32))), sequences, not steps)
        vocabulary = scores.shape[1]
        scores = scores + totals.reshape(-1, 1)
        steps.append(scores.reshape(batch, beams, vocabulary))
        flat = scores.reshape(batch, beams * vocabulary)
        best = np.argsort(-flat, axis=1, kind="stable")[:, : 2 * beams]
        chosen, sources = np.full((batch, beams), pad), np.repeat(np.arange(batch)[:, None] * beams, beams, axis=1)
        for b in range(batch):
            totals[b] = _pick(kept[b], flat[b], best[b], b, beams, vocabulary, eos, sequences, chosen[b], sources[b])
        rows = sources.reshape(-1)
        model.reorder(rows)
        tokens = chosen.reshape(-1, 1).astype(np.int32)
        sequences = np.concatenate([sequences[rows], tokens], axis=1)
        if all(hypotheses.done for hypotheses in kept):
            break
    result = np.full((batch, answers, longest), pad, np.int32)
    points = np.zeros((batch, answers), np.float32)
    for b, hypotheses in enumerate(kept):
        if not hypotheses.done:
            for beam in range(beams):
                hypotheses.add(sequences[b * beams + beam], totals[b, beam])
        for place, (score, sequence) in enumerate(hypotheses.best[:answers]):
            result[b, place, : len(sequence)] = sequence
            points[b, place] = score
    every = np.zeros((longest - begin, batch, beams, vocabulary), np.float32)
    every[: len(steps)] = np.asarray(steps).reshape(-1, batch, beams, vocabulary) if steps else 0
    return result, points, every


def _pick(
    kept: _Hypotheses,
    scores: np.ndarray,
    best: Sequence[int],
    entry: int,
    beams: int,
    vocabulary: int,
    eos: int,
    sequences: np.ndarray,
    chosen: np.ndarray,
    sources: np.ndarray,
) -> np.ndarray:
    """The next tokens of one input's beams, written to `chosen` and `sources`; the beams' new totals."""
    totals = np.zeros(beams, np.float32)
    if kept.done:
        return totals
    filled = 0
    for rank, index in enumerate(best):
        beam, token = divmod(int(index), vocabulary)
        source = entry * beams + beam
        if token == eos:
            if rank < beams:  # an end that is not among the best does not count
                kept.add(sequences[source], float(scores[index]))
            continue
        chosen[filled], sources[filled], totals[filled] = token, source, scores[index]
        filled += 1
        if filled == beams:
            break
    kept.done = kept.closed(float(scores[best[0]]), sequences.shape[1])
    return totals


@operator("BeamSearch", since_version=1, domain=MICROSOFT, host=True)
def beam_search_1(
    input_ids: np.ndarray,
    max_length: np.ndarray,
    min_length: np.ndarray | None,
    num_beams: np.ndarray,
    num_return_sequences: np.ndarray,
    length_penalty: np.ndarray | None = None,
    repetition_penalty: np.ndarray | None = None,
    vocab_mask: np.ndarray | None = None,
    prefix_vocab_mask: np.ndarray | None = None,
    attention_mask: np.ndarray | None = None,
    decoder_input_ids: np.ndarray | None = None,
    logits_processor: np.ndarray | None = None,
    /,
    *,
    decoder: Any,
    decoder_start_token_id: int = -1,
    early_stopping: int = 0,
    encoder: Any = None,
    eos_token_id: int,
    init_decoder: Any = None,
    model_type: int = 0,
    no_repeat_ngram_size: int = 0,
    pad_token_id: int,
    vocab_size: int = -1,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Beam search: sequences `(batch, answers, max_length)`, their scores, and the scores of all tokens by step."""
    if _number(logits_processor, 0):
        raise ValueError(
            "logits_processor asks for a model's own rules (Whisper's time stamps), which are not supported"
        )
    rules = _Rules(
        eos_token_id,
        _number(min_length, 0),
        _number(repetition_penalty, 1.0),
        no_repeat_ngram_size,
        vocab_mask,
        prefix_vocab_mask,
    )
    return _beam_search(
        _attributes(locals()),
        input_ids,
        max_length,
        int(_number(num_beams, 1)),
        int(_number(num_return_sequences, 1)),
        float(_number(length_penalty, 1.0)),
        attention_mask,
        decoder_input_ids,
        rules,
        bool(early_stopping),
    )


@operator("WhisperBeamSearch", since_version=1, domain=MICROSOFT, host=True)
def whisper_beam_search_1(
    input_ids: np.ndarray,
    max_length: np.ndarray,
    min_length: np.ndarray | None,
    num_beams: np.ndarray,
    num_return_sequences: np.ndarray,
    length_penalty: np.ndarray | None = None,
    repetition_penalty: np.ndarray | None = None,
    vocab_mask: np.ndarray | None = None,
    prefix_vocab_mask: np.ndarray | None = None,
    attention_mask: np.ndarray | None = None,
    decoder_input_ids: np.ndarray | None = None,
    logits_processor: np.ndarray | None = None,
    cross_qk_layer_head: np.ndarray | None = None,
    extra_decoding_ids: np.ndarray | None = None,
    temperature: np.ndarray | None = None,
    /,
    *,
    beginning_timestamp_token_id: int | None = None,
    decoder: Any,
    decoder_output_cross_qk: int | None = None,
    decoder_start_token_id: int = -1,
    early_stopping: int = 0,
    encoder: Any = None,
    eos_token_id: int,
    init_decoder: Any = None,
    model_type: int = 2,
    no_repeat_ngram_size: int = 0,
    no_speech_token_id: int | None = None,
    no_timestamps_token_id: int | None = None,
    pad_token_id: int,
    start_of_lm_token_id: int | None = None,
    transcribe_token_id: int | None = None,
    translate_token_id: int | None = None,
    vocab_size: int = -1,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """BeamSearch over audio features. Time stamp rules and the outputs about cross attention and silence are refused."""
    if _number(logits_processor, 0) or decoder_output_cross_qk or cross_qk_layer_head is not None:
        raise ValueError("time stamp rules and cross-attention outputs of WhisperBeamSearch are not supported")
    if extra_decoding_ids is not None or (no_speech_token_id is not None and no_speech_token_id >= 0):
        raise ValueError("extra_decoding_ids and no_speech_token_id of WhisperBeamSearch are not supported")
    rules = _Rules(
        eos_token_id,
        _number(min_length, 0),
        _number(repetition_penalty, 1.0),
        no_repeat_ngram_size,
        vocab_mask,
        prefix_vocab_mask,
        float(_number(temperature, 1.0)),
    )
    return _beam_search(
        _attributes(locals()),
        input_ids,
        max_length,
        int(_number(num_beams, 1)),
        int(_number(num_return_sequences, 1)),
        float(_number(length_penalty, 1.0)),
        attention_mask,
        decoder_input_ids,
        rules,
        bool(early_stopping),
    )
