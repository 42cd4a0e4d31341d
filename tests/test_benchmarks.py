"""The frame of the benchmarks: bounds, names, and what becomes of a figure that misses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.benchmarks import __main__ as command
from tests.benchmarks import overhead
from tests.benchmarks.frame import Benchmark, Figure, find


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
    assert json.loads(file.read_text("utf-8"))["benchmarks"][0]["figures"] == [figure]


def test_a_benchmark_that_fails_is_told(monkeypatch) -> None:
    failed = {"name": "m.f", "title": "t", "figures": [], "skipped": None, "failed": "it broke", "seconds": 0.1}
    monkeypatch.setattr(command, "_apart", lambda each: failed)
    assert command.main(["overhead"]) == 2
