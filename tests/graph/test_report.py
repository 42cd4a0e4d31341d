"""The pre-flight report and what `print(model)` shows."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from tests.graph.build import everything, model, nothing, read, value
from transmuter_async.errors import UnsupportedModel
from transmuter_async.graph import DynamicDimension

NEWEST = onnx.defs.onnx_opset_version()


def many_missing() -> onnx.ModelProto:
    inner = helper.make_graph([helper.make_node("Beta", ["x"], ["b"], "inner", domain="own")], "branch", [], [value("b")])
    return model(
        [
            *(helper.make_node("Alpha", ["x"], [f"a{n}"], f"alpha{n}", domain="own") for n in range(7)),
            helper.make_node("If", ["x"], ["c"], then_branch=inner, else_branch=inner),
            helper.make_node("Sum", ["a0", "c", "w"], ["y"], "sum"),
        ],
        [value("x", ("batch", 3, None)), value("z", ("batch", 2)), value("free", None)],
        initializers=[numpy_helper.from_array(np.zeros(1000, np.float32), "w"), helper.make_tensor("q", TensorProto.INT4, [9], [1] * 9)],
        imports={"own": 4, "other": 9},
    )


def test_every_missing_operator_is_listed_at_once() -> None:
    report = read(many_missing(), lambda domain, name, opset: domain != "own").check()
    assert not report.ok
    assert [(use.domain, use.op_type, use.opset, use.count) for use in report.missing] == [("own", "Alpha", 4, 7), ("own", "Beta", 4, 2)]
    with pytest.raises(UnsupportedModel) as caught:
        report.raise_for_missing()
    for text in ("own:Alpha (opset 4), 7 nodes", "'alpha0'", "and 2 more", "own:Beta (opset 4), 2 nodes: 'inner'"):
        assert text in str(caught.value)
        assert text in str(report)
    assert caught.value.missing == (("own", "Alpha", 4, tuple(f"alpha{n}" for n in range(5))), ("own", "Beta", 4, ("inner", "inner")))


def test_what_else_it_tells() -> None:
    found = read(many_missing())
    report = found.check()
    assert report.ok
    report.raise_for_missing()
    assert report.dynamic == (DynamicDimension("x", 0, "batch"), DynamicDimension("x", 2, None), DynamicDimension("z", 0, "batch"))
    assert report.unranked == ("free",)
    assert (report.weight_bytes, report.prepared_bytes) == (4005, 4009)
    assert report.operators[0].op_type == "Alpha"
    assert {use.op_type: use.count for use in report.operators} == {"Alpha": 7, "Beta": 2, "If": 1, "Sum": 1}
    for text in ("batch: x[0], z[0]", "Alpha 7, Beta 2", "9 in the file, 11 with", "every operator has a definition"):
        assert text in str(report)
    shown = str(found)
    for text in ("9 nodes, 4.0 kB", "ai.onnx 17, own 4, other 9", "x: float[batch, 3, ?]", "free: float[...]", "y: float[N]"):
        assert text in shown


def test_an_opset_that_nobody_here_knows() -> None:
    proto = model([helper.make_node("Relu", ["x"], ["t"], "r"), helper.make_node("Neg", ["t"], ["y"], "n")], opset=NEWEST + 1)
    report = read(proto).check()
    assert not report.ok
    assert [use.op_type for use in report.unvouched] == ["Neg", "Relu"]
    with pytest.raises(UnsupportedModel, match=f"newer than the installed onnx package(.|\n)*Relu \\(opset {NEWEST + 1}\\)"):
        report.raise_for_missing()
    vouched = read(proto).check(unchanged=lambda domain, name, opset: name == "Relu")
    assert [use.op_type for use in vouched.unvouched] == ["Neg"]
    assert read(proto).check(unchanged=everything).ok
    unused = model([helper.make_node("Relu", ["x"], ["y"])], imports={"ai.onnx.ml": 99})
    assert read(unused).check().ok
    assert "ai.onnx.ml 99" in str(read(unused).check())


def test_weights_inside_of_subgraphs_and_constants_count_once() -> None:
    held = numpy_helper.from_array(np.zeros(100, np.float32), "k")
    branch = helper.make_graph([helper.make_node("Constant", [], ["c"], value=held)], "b", [], [value("c")], [held])
    report = read(model([helper.make_node("If", ["x"], ["y"], then_branch=branch, else_branch=branch)])).check()
    assert report.prepared_bytes == 4 * 400


def test_strings_count() -> None:
    report = read(model([helper.make_node("Neg", ["x"], ["y"])], initializers=[helper.make_tensor("s", 8, [2], [b"ab", b"c"])]), nothing).check()
    assert report.weight_bytes == 3
    assert report.prepared_bytes > 16
