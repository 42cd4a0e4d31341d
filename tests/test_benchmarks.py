"""The frame of the benchmarks: bounds, names, what becomes of a figure that misses, and the page of the last full run."""

from __future__ import annotations

import ast
import json
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.benchmarks import __main__ as command
from tests.benchmarks import overhead, picture, report, versus, zoo
from tests.benchmarks.build import Draft
from tests.benchmarks.frame import Benchmark, Figure, find

FOLDER = Path(command.__file__).parent


def test_a_bound_holds_from_above_or_from_below() -> None:
    assert Figure("a", 2, "×", bound=2).met
    assert not Figure("a", 2.01, "×", bound=2).met
    assert Figure("a", 2, "/s", bound=2, least=True).met
    assert not Figure("a", 1.99, "/s", bound=2, least=True).met
    assert Figure("a", 1e9, "s").met


def test_benchmarks_are_found_by_module_and_by_function() -> None:
    names = [each.name for each in find()]
    assert len(names) == len(set(names))
    assert [each.measure for each in find(["overhead"])] == [overhead.call]
    assert [each.name for each in find(["emitting.closes", "overhead"])] == ["emitting.closes", "overhead.call"]
    with pytest.raises(LookupError, match="nothing_like_it"):
        find(["nothing_like_it"])
    with pytest.raises(LookupError, match=r"overhead\.nothing"):
        find(["overhead.nothing"])


def test_an_async_benchmark_runs_on_both_loops() -> None:
    async def measure():
        yield Figure("a", 1, "s")

    found = list(Benchmark("m.measure", "", measure).run())
    assert [each.name for each in found] == ["a (asyncio)", "a (trio)"]


@pytest.mark.parametrize("value", [1.0, 3.0])
def test_check_fails_where_a_bound_is_missed(value: float, monkeypatch, tmp_path: Path, capsys) -> None:
    figure = Figure("a", value, "×", bound=2).to_dict()
    result = {"name": "m.f", "title": "t", "figures": [figure], "skipped": None, "failed": None, "seconds": 0.1}
    monkeypatch.setattr(command, "_apart", lambda each: result)
    file = tmp_path / "figures.json"
    assert command.main(["overhead", "--check", "--json", str(file)]) == (value > 2)
    assert command.main(["overhead"]) == 0
    assert ("MISSED" in capsys.readouterr().out) == (value > 2)
    written = json.loads(file.read_text("utf-8"))
    assert written["benchmarks"][0]["figures"] == [figure]
    assert written["command"] == "python -m tests.benchmarks overhead --check"  # as it can be pasted
    with pytest.raises(SystemExit):
        command.main(["compare", str(file), str(tmp_path / "none.json")])
    assert "none.json is no file" in capsys.readouterr().err


def test_a_benchmark_that_fails_is_told(monkeypatch) -> None:
    failed = {"name": "m.f", "title": "t", "figures": [], "skipped": None, "failed": "it broke", "seconds": 0.1}
    monkeypatch.setattr(command, "_apart", lambda each: failed)
    assert command.main(["overhead"]) == 2


def run_of(**figures: Figure) -> report.Run:
    """A run with one figure in each named benchmark; `_` in a name stands for its dot."""
    results = [
        {"name": name.replace("_", ".", 1), "title": "t", "figures": [figure.to_dict()], "load": [1, 1]}
        | {"skipped": None, "failed": None, "seconds": 1.0}
        for name, figure in figures.items()
    ]
    machine = {"date": "2026-01-01", "processor": "p", "cores": 2, "load_at_start": 0, "load_at_end": 1}
    machine |= {"memory_gib": 1, "system": "s", "python": "3", "versions": {"jax": "1"}}
    return {"command": "c", "machine": machine, "benchmarks": results}


def test_two_runs_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = run_of(m_a=Figure("x: against onnxruntime", 2, "×"), m_b=Figure("y", 3, "s"), m_c=Figure("old", 1, "s"))
    after = run_of(
        m_a=Figure("x: against onnxruntime", 1, "×"), m_b=Figure("y", 3.1, "s"), m_d=Figure("new one", 1, "s")
    )
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    for file, run in zip(files, (before, after), strict=True):
        file.write_text(json.dumps(run), "utf-8")
    assert command.main(["compare", *map(str, files)]) == 0
    told = capsys.readouterr().out
    rows = {line[:80].strip(): line[80:].split() for line in told.splitlines()}
    assert rows["m.a: x: against onnxruntime"] == ["2", "1", "0.50"]
    assert rows["m.c: old"] == ["1", "-", "gone"]
    assert rows["m.d: new one"] == ["-", "1", "new"]
    assert "m.b: y" not in rows
    assert "1 figures changed by less than 10%" in told
    assert command.main(["compare", "--all", *map(str, files)]) == 0
    assert "m.b: y" in capsys.readouterr().out


def test_a_part_of_a_run_can_be_made_anew() -> None:
    before = run_of(m_a=Figure("x", 2, "s"), m_b=Figure("y", 3, "s"))
    after = run_of(m_b=Figure("y", 4, "s"), m_c=Figure("z", 5, "s"))
    found = report.merged(before, after)
    values = {each["name"]: each["figures"][0]["value"] for each in found["benchmarks"]}
    assert values == {"m.a": 2, "m.b": 4, "m.c": 5}


def test_models_are_summed_over_when_all_were_measured() -> None:
    ratios = {
        each.name.replace(".", "_", 1): Figure("batch 1: against onnxruntime", 2, "×")
        for each in find(["zoo", "light"])
    }
    ratios["zoo_minilm_int8"] = Figure("2 × 12: against onnxruntime", 50, "×")
    ratios["light_vgg19"] = Figure("batch 1: against onnxruntime", 4, "×")
    sums = report.summed(run_of(**ratios))["benchmarks"][-1]["figures"]
    found = {figure["name"]: figure for figure in sums}
    floats = len(ratios) - 1
    mean = found["float models: geometric mean"]
    assert mean["value"] == pytest.approx((2 ** (floats - 1) * 4) ** (1 / floats))
    assert (mean["bound"], mean["met"]) == (report.MEAN, False)
    slowest = found["float models: the slowest"]
    assert (slowest["value"], slowest["note"], slowest["bound"]) == (4, "vgg19", zoo.WORST)
    del ratios["light_vgg19"]
    assert not any(each["name"] == report.SUMMARY for each in report.summed(run_of(**ratios))["benchmarks"])


def test_the_picture_places_ratios_on_a_logarithmic_axis() -> None:
    rows = [picture.Row("half", 0.5), picture.Row("one & <more>", 1, (4,), 1.8), picture.Row("two", 2)]
    tree = ET.fromstring(picture.draw(rows, "title"))
    space = "{http://www.w3.org/2000/svg}"
    half, ring, one, two = (float(each.attrib["cx"]) for each in tree.iter(f"{space}circle"))
    assert one - half == pytest.approx(two - one, abs=0.2)
    assert ring - one == pytest.approx(2 * (two - one), abs=0.2)
    assert "one & <more>" in [each.text for each in tree.iter(f"{space}text")]


@pytest.mark.parametrize(
    ("found", "expected", "share"),
    [
        (np.float32([1, 2]), np.float32([1, 2]), 0),
        (np.float32([1, 2.1]), np.float32([1, 2]), 0.5),
        (np.float32([np.nan, np.inf]), np.float32([np.nan, np.inf]), 0),
        (np.float32([np.nan]), np.float32([1]), np.inf),
        (np.array([1, 3]), np.array([1, 2]), np.inf),
        (np.uint8([1, 3]), np.uint8([1, 2]), 1),
        (np.array([True]), np.array([False]), np.inf),
        ([np.float32([1.2])], [np.float32([1])], 2),
    ],
)
def test_outputs_are_compared_before_times_are_taken(found, expected, share: float) -> None:
    assert versus.apart(found, expected, 0.1) == pytest.approx(share, rel=1e-5)


def test_outputs_of_another_shape_or_dtype_are_wrong() -> None:
    with pytest.raises(versus.Wrong, match=r"float32\(2, 1\) instead of float32\(2,\)"):
        versus.apart(np.zeros((2, 1), np.float32), np.zeros(2, np.float32), 0.1)
    with pytest.raises(versus.Wrong, match="int32"):
        versus.apart(np.zeros(2, np.int32), np.zeros(2, np.int64), 0.1)


def test_a_wrong_result_is_a_failed_benchmark(monkeypatch) -> None:
    draft = Draft()
    case = draft.case("tanh", draft("Tanh", draft.input((4,))))
    monkeypatch.setattr(versus.Ours, "__call__", lambda self, inputs: {"tanh0_0": np.zeros(4, np.float32)})
    with pytest.raises(versus.Wrong, match="'tanh0_0' is"):
        versus.compare(case.source, case.inputs, seconds=0.01)


def test_the_page_is_what_the_last_full_run_gives() -> None:
    run = json.loads(report.RUN.read_text("utf-8"))
    for file, text in report.pages(run).items():
        assert file.read_text("utf-8") == text, "python -m tests.benchmarks page"


def bounds_in_code() -> Iterator[tuple[str, float | None]]:
    """Module and bound of every figure that has one; None for a bound that is computed."""
    for file in sorted(FOLDER.glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if not isinstance(node, ast.Call) or getattr(node.func, "id", "") != "Figure" or file.stem == "versus":
                continue
            given = [each.value for each in node.keywords if each.arg == "bound"] + node.args[3:4]
            for bound in given:
                if not isinstance(bound, ast.Constant):
                    yield file.stem, None
                elif bound.value is not None:
                    yield file.stem, float(bound.value)


def test_every_bound_in_code_stands_in_the_page() -> None:
    run = json.loads(report.RUN.read_text("utf-8"))
    bounded = [
        (each["name"].partition(".")[0], figure["bound"])
        for each in run["benchmarks"]
        for figure in each["figures"]
        if figure["bound"] is not None
    ]
    modules = {"report": "summary"}
    wanted = [(modules.get(module, module), bound) for module, bound in bounds_in_code()]
    assert len(wanted) > 10
    for module, bound in wanted:
        assert (module, bound) in bounded or (bound is None and module in dict(bounded)), f"{module}: {bound}"
    for name, public in zoo.MODELS.items():
        [result] = [each for each in run["benchmarks"] if each["name"] == f"zoo.{name}"]
        assert result["failed"] or public.bound in {figure["bound"] for figure in result["figures"]}, name
    page = report.PAGE.read_text("utf-8")
    assert page.count("| at most ") + page.count("| at least ") == len(bounded)
