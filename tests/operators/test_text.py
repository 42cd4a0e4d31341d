"""Strings: regular expressions as RE2 has them, splitting, cases, n-grams; onnxruntime is the oracle."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from tests.operators.oracle import compare, host_outputs, onnxruntime_outputs
from transmuter_async.operators.regex import full_matcher

TEXTS = [
    "", "a", "ab", "abc", "abbc", "aaac", "ccc", "c", "xyz", "12", "1234", "12345", "me@x.com", "STRASSE", "STRAßE",
    "straße", "k", "K", "\u212a", "foo", "foo bar", "a.b", "a.bb", "axb", "aa", "aaa", "{", "a{x", "a{1", "Ab", "A😀",
    "A", "é", "Éa", "1", "a\nb", "y", "xxy", "]a", "-a", "n", "\n", "AB", "aB", "x", "x-1", "_", "a{", "ſ", "s", "S",
    "\v", "1 2", " \t", "αβγ", "a]", "a\nB", "ababab", "abab", "\x07", "ÿ", "^", "$", "ab\n", "a,b", "--",
]  # fmt: skip
PATTERNS = [
    r"a*b+c?", r"(a|b)*c", r"[^a-c]+", r"\d{2,4}", r"\w+@\w+\.com", r"(?i)straße", r"(?i)k+", r"\bfoo\b.*", r"^a$",
    r"a{,2}", r"a{2}", r"a{2,}", r"[[:alpha:]]+", r"[[:^digit:]]*", r"\pL+", r"\p{Lu}\p{Ll}*", r"\PN", r"[\d\-x]+",
    r"\x41\x{1F600}", r"\101", r"\Qa.b\E+", r"(?s).*", r".*", "(?m)^a$\n^b$", r"x*?y", r"[]a]+", r"[a-]+", r"[-a]+",
    r"(?P<n>a)b", r"(?<n>a)b", r"(?i:a)b", r"(?i)(?-i)a", r"", r"()", r"a||b", r"\Bx", r"\z", r"\Aab\z", r"[^\D]",
    r"[\W]", r"\s+", r"[\n]", r"\p{Any}+", r"\p{^L}", r"[\pL\d]+", r"(?i)[k]", r"(?i)[^k]", r"(?U)a+", r"a+?b*", r"{",
    r"a{x", r"a{1", r"x{0}", r"(|a)+", r"(a*)*", r"(?:a?){3}", r"$a", r"a$b", r"(^a|b)*", r"[^\n]", r"[^a]", r"(?i)ſ",
    r"\v", r"a\Q", r"(?i-s:.)", r"[a\]]+", r"(?is)A.B", r"\07", r"\377", r"a{0,3}?", r"(ab){2,3}", r"\_", r"(\w),(\w)",
]  # fmt: skip
NO_PATTERNS = [
    r"a**", r"a{2}{3}", r"*a", r"(a", r"a)", r"\1", r"\8", r"[z-a]", r"a{1001}", r"(?=a)", r"(?!a)", r"[[:foo:]]",
    r"a{3,2}", r"(?z)a", r"[a", r"\e", r"[\Qa]", "a\\",
]  # fmt: skip


@pytest.mark.parametrize("pattern", PATTERNS)
def test_regex_full_match_as_onnxruntime(pattern):
    texts = np.array(TEXTS, object)
    compare("RegexFullMatch", [texts], {"pattern": pattern}, domain="", opset=20, traced=False)


@pytest.mark.parametrize("pattern", NO_PATTERNS)
def test_what_re2_refuses_is_refused(pattern):
    with pytest.raises(Exception, match="regex"):  # onnxruntime's own kinds of exceptions
        onnxruntime_outputs("RegexFullMatch", [np.array(["a"], object)], {"pattern": pattern}, domain="", opset=20)
    with pytest.raises(ValueError, match="is no RE2 expression"):
        full_matcher(pattern)


def test_a_hostile_pattern_takes_linear_time_and_bounded_space():
    assert not full_matcher(r"(a|a)*(a+)+b")("a" * 20_000)
    with pytest.raises(ValueError, match="states"):
        full_matcher(r"((a{1000}){1000}){1000}")
    with pytest.raises(ValueError, match="deeper"):
        full_matcher("(" * 5000 + ")" * 5000)


def test_string_concat_as_onnxruntime():
    x, y = np.array([["a"], ["ü"]], object), np.array(["b", "", "c"], object)
    compare("StringConcat", [x, y], {}, domain="", opset=20, traced=False)
    (got,) = host_outputs("StringConcat", [np.array("a", object), np.array("b", object)], {}, domain="", opset=20)
    assert isinstance(got, np.ndarray) and got.shape == () and got.item() == "ab"


@pytest.mark.parametrize(("delimiter", "maxsplit"), list(itertools.product([None, "", ",", "--"], [None, 0, 1, 2])))
def test_string_split_as_onnxruntime(delimiter, maxsplit):
    texts = np.array([["a,b,,c", "", " a  b c "], ["--a--", ",", "a b"]], object)
    if maxsplit is not None and maxsplit < 1:
        texts = texts[:, :1]
    attributes = {"delimiter": delimiter, "maxsplit": maxsplit}
    compare("StringSplit", [texts], attributes, domain="", opset=20, outputs=2, traced=False)


@pytest.mark.parametrize("action", ["NONE", "LOWER", "UPPER"])
@pytest.mark.parametrize("sensitive", [0, 1])
@pytest.mark.parametrize("stopwords", [None, ["Monday", "straße"]])
def test_string_normalizer_as_onnxruntime(action, sensitive, stopwords):
    texts = np.array(["monday", "Monday", "Straße", "STRASSE", "ÀÉ", "été", "ΑΣ"], object)
    attributes = {
        "case_change_action": action, "is_case_sensitive": sensitive, "stopwords": stopwords, "locale": "C.UTF-8",
    }  # fmt: skip
    compare("StringNormalizer", [texts], attributes, domain="", opset=10, traced=False)


def test_string_normalizer_with_nothing_left_gives_one_empty_string():
    attributes = {"stopwords": ["a"], "is_case_sensitive": 1}
    for texts, expected in ((["a", "a"], [""]), ([["a", "a"]], [[""]])):
        (got,) = host_outputs("StringNormalizer", [np.array(texts, object)], attributes, domain="", opset=10)
        assert got.tolist() == expected
    (got,) = host_outputs(
        "StringNormalizer",
        [np.array(["Iİ"], object)],
        {"case_change_action": "LOWER", "locale": "tr_TR"},
        domain="",
        opset=10,
    )
    assert got.tolist() == ["ıi"]


@pytest.mark.parametrize("mode", ["TF", "IDF", "TFIDF"])
@pytest.mark.parametrize("lengths", [(1, 1), (1, 3), (2, 2), (2, 3), (3, 3)])
@pytest.mark.parametrize("skips", [0, 1, 4])
@pytest.mark.parametrize("text", [False, True])
def test_tf_idf_as_onnxruntime(mode, lengths, skips, text):
    """Integers also traced, for the richest mode."""
    rng = np.random.default_rng(7)
    grams = [(1,), (4,), (6,), (1, 2), (2, 2), (4, 1), (3, 3), (1, 2, 3), (2, 2, 1), (4, 4, 4)]
    pool = [item for gram in grams for item in gram]
    attributes = {
        "mode": mode,
        "min_gram_length": lengths[0],
        "max_gram_length": lengths[1],
        "max_skip_count": skips,
        "ngram_counts": [0, 3, 11],
        "ngram_indexes": [3, 0, 9, 1, 2, 4, 6, 5, 8, 7],
        "weights": [float(w) for w in rng.uniform(0.5, 2, len(grams)).astype(np.float32)],
        ("pool_strings" if text else "pool_int64s"): [str(item) for item in pool] if text else pool,
    }
    for shape in ((12,), (3, 9), (2, 1), (1, 0)):
        x = rng.integers(0, 6, shape)
        x = x.astype(str).astype(object) if text else x.astype(np.int64)
        if x.size == 0:
            expected = [np.zeros((1, 10), np.float32)]
            compare("TfIdfVectorizer", [x], attributes, domain="", opset=9, traced=False, expected=expected)
        else:
            traced = not text and shape == (3, 9) and mode == "TFIDF"
            compare("TfIdfVectorizer", [x], attributes, domain="", opset=9, traced=traced)
