"""The `transmuter` command: what it prints, into a pipe and as JSON, and how it exits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import resources
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from transmuter_async.cli import main
from transmuter_async.cli.app import EXIT_CODES, parser

DIGITS = str(resources.files("transmuter_async.demo") / "digits.onnx")


def saved(path: Path, nodes: list, inputs: list, outputs: list, opset: int = 17) -> str:
    graph = helper.make_graph(nodes, "g", inputs, outputs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    path.write_bytes(model.SerializeToString())
    return str(path)


@pytest.fixture
def add(tmp_path: Path) -> str:
    """sum = a + b, int64 (n,)."""
    info = [helper.make_tensor_value_info(name, TensorProto.INT64, ["n"]) for name in ("a", "b", "sum")]
    return saved(tmp_path / "add.onnx", [helper.make_node("Add", ["a", "b"], ["sum"], "add")], info[:2], info[2:])


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_demo_is_right_and_tells_what_telemetry_saw(backend: str, capsys) -> None:
    assert main(["demo", "--json", "--backend", backend]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["accuracy"] >= 0.98
    assert told["callers"] == 100
    assert told["telemetry"]["calls"] == 200
    assert told["telemetry"]["programs"] == 2
    assert told["telemetry"]["cache_misses"] >= 1
    assert told["telemetry"]["cache_hits"] >= 41
    assert told["telemetry"]["compile_ns"] > 0


def test_demo_draws_digits_in_plain_text(capsys) -> None:
    assert main(["demo", "--callers", "4"]) == 0
    out = capsys.readouterr().out
    assert "##" in out
    assert "accuracy" in out
    assert "\x1b" not in out


def test_run_prints_and_writes(add: str, tmp_path: Path, capsys) -> None:
    np.save(tmp_path / "a.npy", np.array([1, 2, 2**40]))
    target = tmp_path / "out"
    code = main(["run", add, "-i", f"a={tmp_path / 'a.npy'}", "-i", "b=ones:3", "-o", str(target), "--json"])
    told = json.loads(capsys.readouterr().out)
    assert code == 0
    assert told["outputs"][0]["first"] == [2, 3, 2**40 + 1]
    assert np.array_equal(np.load(target / "sum.npy"), [2, 3, 2**40 + 1])


def test_numbers_are_never_changed_to_fit(add: str, tmp_path: Path, capsys) -> None:
    for text in ("3.7", "nan", "inf", str(2**70)):
        assert main(["run", add, "-i", f"a={text}", "-i", "b=1"]) == 4
        assert "whole numbers from -9223372036854775808" in capsys.readouterr().err
    info = [helper.make_tensor_value_info(name, TensorProto.UINT8, []) for name in "xy"]
    small = saved(tmp_path / "u8.onnx", [helper.make_node("Identity", ["x"], ["y"])], info[:1], info[1:])
    assert main(["run", small, "-i", "x=300"]) == 4
    assert "from 0 to 255" in capsys.readouterr().err
    assert main(["run", small, "-i", "x=2e2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["outputs"][0]["first"] == [200]


def test_a_file_without_plain_arrays_is_told(add: str, tmp_path: Path, capsys) -> None:
    np.save(tmp_path / "objects.npy", np.array([{}, 1], dtype=object), allow_pickle=True)
    (tmp_path / "text.npy").write_text("hello")
    (tmp_path / "cut.npz").write_bytes(b"PK\x03\x04zz")
    (tmp_path / "empty.npy").write_bytes(b"")
    for name in ("objects.npy", "text.npy", "cut.npz", "empty.npy"):
        assert main(["run", add, "-i", f"a={tmp_path / name}", "--fill", "ones", "--dim", "n=1"]) == 4
        assert "not a file of plain numpy arrays" in capsys.readouterr().err


def test_values_of_the_file_can_be_replaced(tmp_path: Path, capsys) -> None:
    info = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2]) for name in ("x", "w", "y")]
    node = helper.make_node("Add", ["x", "w"], ["y"])
    graph = helper.make_graph([node], "g", info[:2], info[2:], [numpy_helper.from_array(np.float32([1, 2]), "w")])
    path = tmp_path / "default.onnx"
    path.write_bytes(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8).SerializeToString())
    np.save(tmp_path / "w.npy", np.float32([5, 6]))
    for extra, first in (([], [2, 3]), (["-i", f"w={tmp_path / 'w.npy'}"], [6, 7])):
        assert main(["run", str(path), "-i", "x=ones", "--json", *extra]) == 0
        assert json.loads(capsys.readouterr().out)["outputs"][0]["first"] == first


def test_outputs_that_numpy_files_do_not_know(tmp_path: Path, capsys) -> None:
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [3])
    outputs = [
        helper.make_tensor_value_info("half", TensorProto.BFLOAT16, [3]),
        helper.make_tensor_value_info("nibble", TensorProto.UINT4, [3]),
        helper.make_tensor_sequence_value_info("parts", TensorProto.FLOAT, None),
    ]
    sizes = helper.make_node("Constant", [], ["sizes"], value=numpy_helper.from_array(np.array([1, 2])))
    nodes = [
        helper.make_node("Cast", ["x"], ["half"], to=TensorProto.BFLOAT16),
        helper.make_node("Cast", ["x"], ["nibble"], to=TensorProto.UINT4),
        sizes,
        helper.make_node("SplitToSequence", ["x", "sizes"], ["parts"], axis=0),
    ]
    path = saved(tmp_path / "odd.onnx", nodes, [x], outputs, opset=21)
    np.save(tmp_path / "x.npy", np.float32([1, 2.5, 3]))
    assert main(["run", path, "-i", f"x={tmp_path / 'x.npy'}", "-o", str(tmp_path / "out")]) == 0
    assert "parts.npz" in capsys.readouterr().out
    half, nibble = (np.load(tmp_path / "out" / f"{name}.npy") for name in ("half", "nibble"))
    assert (half.dtype, half.tolist()) == (np.float32, [1, 2.5, 3])
    assert (nibble.dtype, nibble.tolist()) == (np.uint8, [1, 2, 3])
    with np.load(tmp_path / "out" / "parts.npz") as parts:
        assert [parts["0"].tolist(), parts["1"].tolist()] == [[1], [2.5, 3]]


def test_run_in_plain_text(add: str, capsys) -> None:
    assert main(["run", add, "--fill", "ones", "--dim", "n=2", "--repeat", "3"]) == 0
    out = capsys.readouterr().out
    assert "sum  int64 (2,)" in out
    assert "(median)" in out


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--fill", "zeros"], 4, "--dim n=SIZE"),
        ([], 4, "--input a="),
        (["-i", "c=1"], 4, "a: int64 (n)"),
        (["-i", "a=nowhere.npy"], 4, "no such file"),
        (["-i", "a=zeros:2", "-i", "b=zeros:2x2x"], 4, "write a shape as"),
        (["--dim", "n"], 4, "NAME=SIZE"),
        (["-i", "a=zeros:2", "-i", "b=0.5"], 4, "b"),
    ],
)
def test_wrong_inputs_are_told_without_a_traceback(add: str, arguments: list, code: int, words: str, capsys) -> None:
    assert main(["run", add, *arguments]) == code
    told = capsys.readouterr()
    assert words in told.err
    assert "Traceback" not in told.err
    assert not told.out


def test_a_file_that_is_no_model(tmp_path: Path, capsys) -> None:
    (tmp_path / "page.onnx").write_text("<!DOCTYPE html><html></html>")
    assert main(["run", str(tmp_path / "page.onnx")]) == 3
    assert "HTML" in capsys.readouterr().err
    assert main(["run", str(tmp_path / "page.onnx"), "-v"]) == 3
    assert "Traceback" in capsys.readouterr().err
    assert main(["inspect", str(tmp_path / "page.onnx"), "--json"]) == 3
    assert json.loads(capsys.readouterr().out)["kind"] == "InvalidModel"
    assert main(["run", str(tmp_path / "missing.onnx")]) in {3, 4}


def test_inspect(capsys) -> None:
    assert main(["inspect", DIGITS]) == 0
    out = capsys.readouterr().out
    assert "image\tfloat32 (batch, 1, 8, 8)" in out
    assert "ai.onnx:Conv\t2" in out
    assert main(["inspect", DIGITS, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["node_count"] == 10
    assert told["operators"]["ai.onnx:Relu"] == 3
    assert told["ok"] is True


def test_inspect_lists_every_missing_operator(tmp_path: Path, capsys) -> None:
    info = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in "xz"]
    nodes = [
        helper.make_node("Nonsense", ["x"], ["y"], domain="our.own"),
        helper.make_node("Absurd", ["y"], ["z"], domain="our.own"),
    ]
    graph = helper.make_graph(nodes, "g", info[:1], info[1:])
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("our.own", 1)]
    path = tmp_path / "odd.onnx"
    path.write_bytes(helper.make_model(graph, opset_imports=imports, ir_version=8).SerializeToString())
    assert main(["inspect", str(path)]) == 1
    out = capsys.readouterr().out
    assert "Nonsense" in out
    assert "Absurd" in out
    assert main(["run", str(path), "--fill", "ones"]) == 3


def test_explain(tmp_path: Path, capsys) -> None:
    assert main(["explain", DIGITS, "--dim", "batch=1"]) == 0
    assert "No breaks" in capsys.readouterr().out
    assert main(["explain", DIGITS]) == 0
    assert "--fill random --dim batch=SIZE" in capsys.readouterr().out
    info = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, [4]),
        helper.make_tensor_value_info("y", TensorProto.INT64, [1, "k"]),
    ]
    nodes = [helper.make_node("Abs", ["x"], ["a"], "abs"), helper.make_node("NonZero", ["a"], ["y"], "nz")]
    path = saved(tmp_path / "nz.onnx", nodes, info[:1], info[1:])
    for arguments in ([], ["--fill", "random"], ["--input", "x=ones:4"]):
        assert main(["explain", path, "--json", *arguments]) == 1
        [found] = json.loads(capsys.readouterr().out)["breaks"]
        assert (found["node"], found["op_type"]) == ("nz", "NonZero")


@pytest.mark.compiles_itself
@pytest.mark.parametrize("oracle", ["host", "onnxruntime", "reference"])
def test_compare(oracle: str, capsys) -> None:
    arguments = ["compare", DIGITS, "--fill", "random", "--dim", "batch=3", "--oracle", oracle, "--json"]
    assert main(arguments) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["same"] is True
    assert told["outputs"][0]["name"] == "probabilities"
    assert 0 < told["outputs"][0]["largest"] < 1e-4
    assert main([*arguments, "--atol", "0", "--rtol", "0"]) == 1
    assert "elements" in json.loads(capsys.readouterr().out)["first"]["why"]


def test_profile(capsys, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)  # a trace is written there
    arguments = ["profile", DIGITS, "--fill", "ones", "--dim", "batch=2", "--repeat", "5", "--callers", "3"]
    assert main([*arguments, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["spans"]["call"]["count"] == 15
    assert told["spans"]["call, compiling"]["count"] == 1
    assert told["spans"]["segment.compile at 0"]["count"] == 1
    assert told["lost_events"] == 0
    assert main(arguments) == 0
    assert "15 calls after the first" in capsys.readouterr().out


def test_cache_of_an_empty_folder(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert main(["cache", "ls", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"cache": str(tmp_path), "repositories": []}
    assert main(["cache", "path"]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path)
    assert main(["cache", "verify"]) == 0
    capsys.readouterr()
    assert main(["cache", "rm", "some/model"]) == 5
    assert "some/model is not in the cache" in capsys.readouterr().err
    assert main(["cache", "rm"]) == 2


def test_download_from_a_local_folder_and_offline(tmp_path: Path, monkeypatch, capsys) -> None:
    (tmp_path / "model.onnx").write_bytes(Path(DIGITS).read_bytes())
    (tmp_path / "config.json").write_text("{}")
    assert main(["download", str(tmp_path), "*.json", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["files"] == {"config.json": str(tmp_path / "config.json")}
    assert main(["download", str(tmp_path), "--list"]) == 0
    assert "model.onnx\tfp32" in capsys.readouterr().out
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    assert main(["download", "some/model"]) == 5
    assert "some/model" in capsys.readouterr().err


def test_ops_can_be_filtered(capsys) -> None:
    assert main(["ops", "conv", "--json"]) == 0
    names = {each["name"] for each in json.loads(capsys.readouterr().out)["operators"]}
    assert "Conv" in names
    assert all("conv" in name.lower() for name in names)
    assert main(["ops", "no such operator"]) == 1


def test_every_exit_code_is_in_the_help() -> None:
    text = parser().format_help()
    for code, words in EXIT_CODES.items():
        assert str(code) in text
        assert words in text


def test_a_closed_pipe_is_no_error() -> None:
    done = subprocess.run(
        f'"{sys.executable}" -m transmuter_async ops | head -n 1',
        shell=True,
        capture_output=True,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        check=False,
    )
    assert done.stdout.startswith("domain")
    assert not done.stderr
