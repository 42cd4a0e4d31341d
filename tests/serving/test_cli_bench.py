"""`transmuter bench`: the table, the JSON, the picture, and what it refuses."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from tests.serving.fakes import doubling
from transmuter_async.cli import main

DIGITS = str(resources.files("transmuter_async.demo") / "digits.onnx")
SHORT = ["--seconds", "0.05"]


def test_direct_calls_by_batch_size_and_callers(capsys, tmp_path: Path) -> None:
    picture = tmp_path / "out.svg"
    arguments = [
        "bench",
        DIGITS,
        "--fill",
        "ones",
        "--batch",
        "4,1",
        "--concurrency",
        "1,3",
        "--plot",
        str(picture),
        *SHORT,
    ]
    assert main([*arguments, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [(each["batch"], each["concurrency"]) for each in told["results"]] == [(1, 1), (1, 3), (4, 1), (4, 3)]
    for each in told["results"]:
        assert each["rows_per_second"] == pytest.approx(each["batch"] * each["calls_per_second"])
        assert 0 < each["p50_ns"] <= each["p90_ns"] <= each["p99_ns"]
    drawn = ET.parse(picture).getroot()
    assert drawn.tag.endswith("svg")
    assert len([each for each in drawn.iter() if each.tag.endswith("polyline")]) == 4  # two panels, two lines
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert out.startswith("batch\tcallers\trows/s")
    assert "most rows per second" in out


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_serve_stands_beside_direct_calls(capsys, tmp_path: Path, backend: str) -> None:
    model = tmp_path / "double.onnx"
    model.write_bytes(doubling())
    arguments = [
        "bench",
        str(model),
        "--fill",
        "random",
        "--serve",
        "--lengths",
        "length=1-8",
        "--buckets",
        "length=4,8",
    ]
    arguments += ["--batch-size", "4", "--concurrency", "1,8", "--backend", backend, *SHORT]
    assert main([*arguments, "--json", "--plot", str(tmp_path / "out.svg")]) == 0
    told = json.loads(capsys.readouterr().out)
    found = {(each["way"], each["concurrency"]): each for each in told["results"]}
    assert found.keys() == {(way, callers) for way in ("direct", "serve") for callers in (1, 8)}
    assert found["serve", 1]["mean_batch"] == 1
    assert 1 < found["serve", 8]["mean_batch"] <= 4
    assert 0 < found["serve", 8]["padded"] < 1
    assert main(arguments) == 0
    assert "were padding" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--batch", "0,1"], "--batch 0,1: write numbers"),
        (["--batch-dim", "rows"], "no input has it; the inputs name ['batch']"),
        (["--dim", "zz=3"], "--dim zz=3: no input has it; the inputs name ['batch']"),
        (["--plot", "/no/such/folder/x.svg"], "there is no folder /no/such/folder"),
        (["--seconds", "0"], "must be positive"),
        (["--seconds", "nan"], "must be positive"),
        (["--serve", "--max-padded", "0"], "--max-padded must be positive"),
        (["--serve", "--lengths", "batch=4"], "the smallest and the largest"),
        (["--serve", "--buckets", "batch"], "write a dimension and sizes"),
        (["--mask", "image_mask"], "there is no such input"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_wrong_options_are_told(arguments: list[str], said: str, capsys) -> None:
    assert main(["bench", DIGITS, "--fill", "ones", *SHORT, *arguments]) == 4
    assert said in capsys.readouterr().err


@pytest.mark.slow
def test_tuning_is_shown_and_kept(tmp_path: Path, capsys) -> None:
    arguments = ["bench", DIGITS, "--fill", "ones", "--batch", "1,4", "--concurrency", "1", "--seconds", "0.05", "--tune"]
    cache = ["--cache-dir", str(tmp_path / "programs")]
    assert main([*arguments, *cache, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert len(told["tuned"]) == 2
    assert all(row["chosen"] and row["values"] == "call" for row in told["tuned"])
    assert main([*arguments, *cache]) == 0
    shown = capsys.readouterr().out
    assert f"tuned at 0 (image:float[4, 1, 8, 8]): {told['tuned'][1]['chosen']}" in shown
    assert "fusions: none" in shown
    assert main([*arguments, "--compiler", "eager"]) == 4
