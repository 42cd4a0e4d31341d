"""docs/operators.md says what the registry says, and only what has to runs on the host."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest

from transmuter_async.cli import main
from transmuter_async.cli.ops import _dtypes, markdown, rows
from transmuter_async.operators import supported
from transmuter_async.operators.registry import COVERED

PAGE = Path(__file__).resolve().parents[2] / "docs" / "operators.md"

STRINGS, MAPS, SHAPE, IMAGE = "strings", "maps", "the output's shape depends on values", "decodes an image file"

HOST_ONLY = {
    ("", "ImageDecoder"): IMAGE,
    ("", "NonMaxSuppression"): SHAPE,
    ("", "NonZero"): SHAPE,
    ("", "RegexFullMatch"): STRINGS,
    ("", "StringConcat"): STRINGS,
    ("", "StringNormalizer"): STRINGS,
    ("", "StringSplit"): STRINGS,
    ("", "Unique"): SHAPE,
    ("ai.onnx.ml", "CastMap"): MAPS,
    ("ai.onnx.ml", "DictVectorizer"): MAPS,
    ("ai.onnx.ml", "ZipMap"): MAPS,
    ("com.microsoft", "BifurcationDetector"): SHAPE,
    ("com.microsoft", "DynamicTimeWarping"): SHAPE,
    ("com.microsoft", "Tokenizer"): STRINGS,
    ("com.microsoft", "Unique"): SHAPE,
}
"""All operators that no program can hold, and why."""


def test_only_what_has_to_is_host_only() -> None:
    assert {(each.domain, each.name) for each in supported() if each.host} == set(HOST_ONLY)


def test_host_only_is_no_matter_of_versions() -> None:
    for each in supported():
        assert each.host == ((each.domain, each.name) in HOST_ONLY), f"{each.name}-{each.since_version}"


@pytest.mark.skipif(
    onnx.defs.onnx_opset_version() != COVERED[""], reason="the page is of the newest version known here"
)
def test_the_page_is_not_stale() -> None:
    assert PAGE.read_text("utf-8") == markdown(), "write it anew: transmuter ops --markdown > docs/operators.md"


def test_every_operator_is_on_the_page() -> None:
    listed = rows()
    assert len(listed) == len({(each.domain, each.name) for each in supported()})
    text = PAGE.read_text("utf-8")
    for each in listed:
        assert f"| {each.name} | {' '.join(map(str, each.versions))} |" in text


def test_every_row_tells_what_the_operator_does() -> None:
    assert not [f"{each.domain}:{each.name}" for each in rows() if not each.notes]


def test_dtypes_in_few_words() -> None:
    types = [
        "tensor(float16)",
        "tensor(float)",
        "tensor(double)",
        "tensor(int8)",
        "tensor(bool)",
        "seq(tensor(float))",
        "map(int64, float)",
    ]
    assert list(_dtypes(types)) == ["float", "bool", "int8", "map", "sequence"]


def test_the_command_prints_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ops", "--markdown"]) == 0
    assert capsys.readouterr().out == markdown()
    assert main(["ops", "nonzero", "--json"]) == 0
    assert '"runs": "host"' in capsys.readouterr().out
