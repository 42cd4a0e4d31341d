"""The disk cache: a hit computes without tracing or compiling, and nothing that does not belong is ever used."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from tests.compiler.support import Session, assert_same, graph, node, proto
from transmuter_async.compiler.disk import DiskCache, Rejected, _decode, _encode
from transmuter_async.compiler.pickles import PickleRefused, scan

X = np.arange(12, dtype=np.float32).reshape(2, 6)


def reshaped(rows: int) -> Any:
    return proto(
        [node("Sin", ["x"], ["h"]), node("Reshape", ["h", "shape"], ["y"])],
        ["x:float[a,b]"],
        ["y:float[c,d]"],
        {"shape": np.array([rows, -1])},
    )


class Compiles:
    """Counts XLA compiles as jax reports them."""

    def __init__(self) -> None:
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._heard)

    def _heard(self, event: str, duration: float, **facts: Any) -> None:
        self.count += event == "/jax/core/compile/backend_compile_duration"


COMPILES = Compiles()


def outcomes(session: Session) -> list[str | None]:
    return [fact.disk_cache for fact in session.facts if type(fact).__name__ == "SegmentReady"]  # type: ignore[union-attr]


def call(folder: Path, made: Any, inputs: dict[str, Any], **options: Any) -> tuple[dict[str, Any], Session]:
    session = Session(made, cache_dir=str(folder), **options)
    return session(inputs), session


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.segment"))


def test_a_second_session_neither_traces_nor_compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = tmp_path / "cache"
    want, first = call(folder, reshaped(3), {"x": X})
    assert outcomes(first) == ["miss"]
    assert folder.stat().st_mode & 0o777 == 0o700
    before = COMPILES.count
    monkeypatch.setattr(jax, "eval_shape", lambda *a, **k: pytest.fail("it traced"))
    monkeypatch.setattr(jax, "jit", lambda *a, **k: pytest.fail("it compiled"))
    got, second = call(folder, reshaped(3), {"x": X})
    assert outcomes(second) == ["hit"] and COMPILES.count == before
    assert_same(got, want)


def test_two_graphs_that_differ_in_one_constant_never_share_a_file(tmp_path: Path):
    for rows in (2, 3, 4):
        got, session = call(tmp_path, reshaped(rows), {"x": X})
        assert outcomes(session) == ["miss"]
        assert_same(got, {"y": np.sin(X).reshape(rows, -1)})
    assert len(files(tmp_path)) == 3


@pytest.mark.parametrize("options", [{"bounds": "clamp"}, {"nonfinite": "error"}, {"precision": "platform"}, {"optimize": False}])
def test_options_are_part_of_the_name(tmp_path: Path, options: dict[str, Any]):
    call(tmp_path, reshaped(2), {"x": X})
    _, session = call(tmp_path, reshaped(2), {"x": X}, **options)
    assert outcomes(session) == ["miss"]


def test_large_weights_are_part_of_the_name(tmp_path: Path):
    def made(scale: float) -> Any:
        weights = {"w": np.full((6, 4000), scale, np.float32)}
        return proto([node("MatMul", ["x", "w"], ["y"])], ["x:float[a,6]"], ["y:float[a,4000]"], weights)

    for scale in (1.0, 2.0):
        got, _ = call(tmp_path, made(scale), {"x": X})
        np.testing.assert_allclose(got["y"], X @ np.full((6, 4000), scale, np.float32))


def test_static_values_lead_from_file_to_file(tmp_path: Path):
    branches = {
        "then_branch": graph([node("Reshape", ["x", "deep"], ["a"])], [], ["a:float[n,m]"]),
        "else_branch": graph([node("Concat", ["x", "x"], ["b"], axis=0)], [], ["b:float[n,m]"]),
    }
    made = proto(
        [
            node("Equal", ["sr", "k"], ["c"]),
            node("Concat", ["rows", "minus"], ["deep"], axis=0),
            node("If", ["c"], ["v"], **branches),
            node("Cos", ["v"], ["y"]),
        ],
        ["x:float[a,b]", "sr:int64[]", "rows:int64[1]"],
        ["y:float[c,d]"],
        {"k": np.array(16000), "minus": np.array([-1])},
    )
    calls = [{"x": X, "sr": np.array(sr), "rows": np.array([rows])} for sr in (16000, 8000) for rows in (3, 4)]
    want = [call(tmp_path, made, inputs)[0] for inputs in calls]
    for inputs, expected in zip(calls, want, strict=True):
        got, session = call(tmp_path, made, inputs)
        assert outcomes(session) == ["hit"]
        assert_same(got, expected)


def test_a_breaking_graph_with_alarms_sequences_and_known_values(tmp_path: Path):
    made = proto(
        [
            *[node("Tanh", [f"h{i}"], [f"h{i + 1}"]) for i in range(3)],
            node("Shape", ["h3"], ["size"]),
            node("NonZero", ["h3"], ["where"], name="find"),
            node("Transpose", ["where"], ["rows"]),
            node("GatherND", ["h3", "rows"], ["picked"]),
            node("SplitToSequence", ["h3", "one"], ["parts"], axis=0),
            node("ConcatFromSequence", ["parts"], ["joined"], axis=0),
            node("Gather", ["joined", "index"], ["row"], axis=0),
        ],
        ["h0:float[a,b]", "index:int64[k]"],
        ["picked:float[m]", "row:float[k,b]", "size:int64[2]", "parts:float[...]"],
        {"one": np.array(1)},
    )
    inputs = {"h0": X, "index": np.array([1, 0, -1])}
    want, first = call(tmp_path, made, inputs, min_segment_nodes=1)
    assert "miss" in outcomes(first)
    got, second = call(tmp_path, made, inputs, min_segment_nodes=1)
    assert set(outcomes(second)) <= {"hit", None} and "hit" in outcomes(second)
    assert_same(got, want)
    with pytest.raises(IndexError):
        second({**inputs, "index": np.array([7, 0, 0])})


def spoil(path: Path, how: str) -> None:
    content = bytearray(path.read_bytes())
    if how == "truncated":
        path.write_bytes(content[: len(content) // 2])
    elif how == "flipped":
        content[len(content) * 2 // 3] ^= 4
        path.write_bytes(content)
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "foreign":
        path.write_bytes(b"transmuter_async segment 0\n" + content[27:])
    elif how == "writable":
        path.chmod(0o622)
    elif how == "link":
        real = path.with_name("elsewhere")
        path.rename(real)
        path.symlink_to(real)
    elif how == "renamed":
        record, arrays, payload = _decode(bytes(content), path.stem)
        path.write_bytes(_encode(record, list(arrays), payload, "0" * 64))


@pytest.mark.parametrize("how", ["truncated", "flipped", "empty", "foreign", "writable", "link", "renamed"])
def test_a_spoilt_file_is_rejected_told_and_replaced(tmp_path: Path, how: str):
    want, _ = call(tmp_path, reshaped(3), {"x": X})
    [path] = files(tmp_path)
    spoil(path, how)
    got, session = call(tmp_path, reshaped(3), {"x": X})
    assert outcomes(session) == ["rejected"]
    [rejected] = [fact for fact in session.facts if type(fact).__name__ == "DiskRejected"]
    assert str(path) in rejected.reason  # type: ignore[union-attr]
    assert_same(got, want)
    _, again = call(tmp_path, reshaped(3), {"x": X})
    assert outcomes(again) == ["hit"]


def test_a_folder_that_others_may_write_to_is_not_used(tmp_path: Path):
    folder = tmp_path / "open"
    folder.mkdir(mode=0o700)
    call(folder, reshaped(3), {"x": X})
    folder.chmod(0o770)
    got, session = call(folder, reshaped(3), {"x": X})
    assert outcomes(session) == ["rejected"]
    assert {"DiskRejected", "DiskFailed"} <= set(session.told())
    assert_same(got, {"y": np.sin(X).reshape(3, -1)})


class Bomb:
    def __reduce__(self) -> Any:
        return (open, (os.environ["BOMB"], "w"))


def test_a_file_that_would_run_code_runs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    target = tmp_path / "ran"
    monkeypatch.setenv("BOMB", str(target))
    folder = tmp_path / "cache"
    want, _ = call(folder, reshaped(3), {"x": X})
    [path] = files(folder)
    record, arrays, _ = _decode(path.read_bytes(), path.stem)
    path.write_bytes(_encode(record, list(arrays), pickle.dumps(Bomb(), protocol=4), path.stem))
    got, session = call(folder, reshaped(3), {"x": X})
    assert outcomes(session) == ["rejected"] and not target.exists()
    assert_same(got, want)


@pytest.mark.parametrize(
    "payload",
    [
        pickle.dumps(os.system, protocol=4),
        pickle.dumps(os.system, protocol=0),
        pickle.dumps(os.system, protocol=2),
        # `os` and `system` by way of the memo, with items of the list between them
        b"\x80\x04\x8c\x02os\x94\x8c\x06system\x942h\x00h\x01\x93.",
        b"\x80\x04\x8c\x02os\x94\x8c\x06system\x940\x8c\x05numpy\x8c\x05dtype0h\x01\x93.",
        b"\x80\x04(\x8c\x05numpy\x8c\x05dtype1\x8c\x02os\x8c\x06system\x93.",
        b"garbage",
        b"",
    ],
)
def test_the_scan_of_a_pickle_is_not_fooled(payload: bytes):
    with pytest.raises(PickleRefused):
        scan(payload)


def test_a_write_that_fails_costs_the_cache_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    got, session = call(tmp_path, reshaped(3), {"x": X})
    assert_same(got, {"y": np.sin(X).reshape(3, -1)})
    [failed] = [fact for fact in session.facts if type(fact).__name__ == "DiskFailed"]
    assert "No space left" in failed.reason  # type: ignore[union-attr]
    assert not list(tmp_path.iterdir()), "no temporary file is left"


def test_a_folder_that_cannot_be_made(tmp_path: Path):
    (tmp_path / "file").write_text("")
    got, session = call(tmp_path / "file" / "cache", reshaped(3), {"x": X})
    assert_same(got, {"y": np.sin(X).reshape(3, -1)})
    assert "DiskFailed" in session.told()


def test_the_least_recently_used_file_leaves_for_room(tmp_path: Path):
    cache = DiskCache(tmp_path, limit=6000)
    for number in range(3):
        assert cache.store(str(number), {"n": number}, [np.zeros(200)]) == ()
        os.utime(tmp_path / f"{number}.segment", (number, number))
    assert cache.load("0", jax.devices()[0]) is not None  # now the most recent one
    removed = cache.store("3", {}, [np.zeros(200)])
    assert len(removed) >= 1
    left = {path.stem for path in files(tmp_path)}
    assert "1" not in left and {"0", "3"} <= left
    # One that is larger than the limit by itself stays: it can't wedge the cache.
    cache.store("4", {}, [np.zeros(2000)])
    assert {path.stem for path in files(tmp_path)} == {"4"}


def test_a_record_that_does_not_fit_is_rejected(tmp_path: Path):
    call(tmp_path, reshaped(3), {"x": X})
    [path] = files(tmp_path)
    record, arrays, payload = _decode(path.read_bytes(), path.stem)
    record["arguments"] = ["nobody"]
    path.write_bytes(_encode(record, list(arrays), payload, path.stem))
    _, session = call(tmp_path, reshaped(3), {"x": X})
    assert outcomes(session) == ["rejected"]


def test_nothing_is_loaded_under_another_name(tmp_path: Path):
    cache = DiskCache(tmp_path, limit=1 << 20)
    cache.store("a", {}, [])
    (tmp_path / "a.segment").rename(tmp_path / "b.segment")
    with pytest.raises(Rejected, match="another name"):
        cache.load("b", jax.devices()[0])


CHILD = """
import json, sys
import numpy as np
from tests.compiler.test_disk import X, call, outcomes, reshaped
from pathlib import Path
got, session = call(Path(sys.argv[1]), reshaped(3), {"x": X})
np.testing.assert_allclose(got["y"], np.sin(X).reshape(3, -1), rtol=1e-6)
print(json.dumps(outcomes(session)))
"""


def test_processes_share_a_folder(tmp_path: Path):
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    root = Path(__file__).parents[2]

    def start() -> subprocess.Popen[str]:
        command = [sys.executable, "-c", CHILD, str(tmp_path)]
        return subprocess.Popen(command, cwd=root, env=environment, stdout=subprocess.PIPE, text=True)

    def finish(child: subprocess.Popen[str]) -> list[str | None]:
        out, _ = child.communicate(timeout=100)
        assert child.returncode == 0
        told: list[str | None] = json.loads(out)
        return told

    together = [start() for _ in range(3)]
    assert all(told in (["miss"], ["hit"]) for told in map(finish, together))
    assert finish(start()) == ["hit"]
