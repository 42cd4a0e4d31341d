"""scikit-learn's text models through skl2onnx: words and n-grams, TF-IDF, a classifier behind them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import transmuter_async as tm

TEXTS = [
    "the cat sat on the mat",
    "a dog sat on the log",
    "cats and dogs are pets",
    "the stock market fell sharply today",
    "markets and stocks rose",
    "investors sold their stock",
    "my dog likes the cat",
    "bonds and the market are falling",
]
KINDS = np.array([0, 0, 0, 1, 1, 1, 0, 1])
UNSEEN = ["the dog fell on the mat", "stocks and cats", "nothing of all that", "sat sat sat market"]


def _converted(estimator: Any) -> Any:
    from skl2onnx import to_onnx
    from skl2onnx.common.data_types import StringTensorType

    options = {"zipmap": False} if hasattr(estimator, "predict") else None
    return to_onnx(estimator, initial_types=[("text", StringTensorType([None, 1]))], options=options)


def _vectorizers() -> dict[str, Any]:
    from sklearn.feature_extraction.text import CountVectorizer, TfidfVectorizer

    # The converter splits by the characters of its own tokenizer; this pattern is the same for both.
    words = {"token_pattern": "[a-zA-Z]+"}
    return {
        "counts": CountVectorizer(**words),
        "binary": CountVectorizer(binary=True, **words),
        "bigrams": CountVectorizer(ngram_range=(1, 2), **words),
        "tfidf": TfidfVectorizer(**words),
        "tfidf-bigrams": TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=False, norm="l1", **words),
        "stop words": TfidfVectorizer(stop_words=["the", "and", "on"], **words),
        "cased": TfidfVectorizer(lowercase=False, **words),
    }


@pytest.mark.parametrize("name", _vectorizers())
@pytest.mark.parametrize("compiler", ["eager", "xla"])
def test_vectors_of_text_equal_scikit_learn(name: str, compiler: str) -> None:
    vectorizer = _vectorizers()[name].fit(TEXTS)
    made = _converted(vectorizer)
    given = np.array([*TEXTS, *UNSEEN], object)[:, None]
    (found,) = tm.run_sync(made, {"text": given}, compiler=compiler).values()
    np.testing.assert_allclose(found, vectorizer.transform(given[:, 0]).toarray(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("compiler", ["eager", "xla"])
def test_a_classifier_of_text_equals_scikit_learn(compiler: str) -> None:
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline

    pipeline = make_pipeline(_vectorizers()["tfidf"], LogisticRegression()).fit(TEXTS, KINDS)
    made = _converted(pipeline)
    labels, chances = tm.run_sync(made, {"text": np.array(UNSEEN, object)[:, None]}, compiler=compiler).values()
    np.testing.assert_array_equal(labels, pipeline.predict(UNSEEN))
    np.testing.assert_allclose(chances, pipeline.predict_proba(UNSEEN), rtol=1e-4, atol=1e-5)
