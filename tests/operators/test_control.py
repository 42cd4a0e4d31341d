"""If, Loop and Scan in whole models: on the host, compiled, and in onnxruntime.

`programs` and `breaks` say which form was taken: a break means that the node ran on the host.
"""

from __future__ import annotations

import jax
import numpy as np
import onnx
import onnx.parser
import onnxruntime
import pytest

from tests.conformance.suite import evaluate
from transmuter_async.compiler import pinned
from transmuter_async.errors import IndexOutOfRange, TransmuterError
from transmuter_async.graph import read_model
from transmuter_async.operators import known


def f(*shape):
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


def model(text, opset=16):
    proto = onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["" : {opset}]> {text}')
    onnx.checker.check_model(proto)
    return proto


def run(proto, given, *, breaks=0, oracle=True, expected=None):
    """Host form, compiled form and onnxruntime agree, and compiling broke the graph `breaks` times."""
    ours = read_model(proto, known=known)
    if oracle:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        session = onnxruntime.InferenceSession(proto.SerializeToString(), options)
        expected = session.run(None, given)
    for way in ("host", "compiled"):
        with pinned():
            outputs, programs, broke = evaluate(ours, dict(given), way)
        for value, want in zip(ours.graph.outputs, expected, strict=True):
            got = outputs[value.name]
            assert got.dtype == want.dtype and got.shape == want.shape, f"{way}: {value.name}"
            np.testing.assert_allclose(got, want, rtol=1e-6, err_msg=f"{way}: {value.name}")
        if way == "compiled":
            assert broke == breaks, f"{broke} breaks"
            assert breaks or programs == 1
    return outputs


# --- If ---

IF_TWO_SHAPES = """
g (float[N] x, bool c) => (float[M] y) {
  y = If (c) <then_branch = t () => (float[A] a) { a = Concat <axis = 0> (x, x) },
              else_branch = e () => (float[B] b) { b = Identity (x) }>
}"""
IF_ONE_SHAPE = """
g (float[N] x, bool c) => (float[N] y, int64[1] n) {
  y, n = If (c) <then_branch = t () => (float[A] a, int64[1] s) { a = Add (x, x) s = Shape (x) },
                 else_branch = e () => (float[B] b, int64[1] r) { b = Neg (x) r = Shape (b) }>
}"""


@pytest.mark.parametrize("condition", [True, False])
def test_branches_of_one_shape_become_one_program(condition):
    run(model(IF_ONE_SHAPE), {"x": f(3), "c": np.array(condition)})


@pytest.mark.parametrize("condition", [True, False])
def test_branches_of_two_shapes_need_the_condition(condition):
    """The condition is a graph input, so it becomes static rather than a break."""
    run(model(IF_TWO_SHAPES), {"x": f(3), "c": np.array(condition)})


def test_an_empty_branch_and_a_full_one():
    """RetinaNet's exports: no detections give [0], some give [n]."""
    text = """
g (float[N] x) => (float[M] y) <float[1] zero = {0}, float[0] none = {}> {
  total = ReduceSum <keepdims = 0> (x)
  axis0 = Constant <value_ints = [0]> ()
  z = Squeeze (zero, axis0)
  c = Greater (total, z)
  y = If (c) <then_branch = t () => (float[A] a) { a = Concat <axis = 0> (x, x) },
              else_branch = e () => (float[B] b) { b = Identity (none) }>
}"""
    for x in (f(3), -f(3)):
        run(model(text), {"x": x}, breaks=1)


def test_the_branch_not_taken_may_make_no_sense():
    text = """
g (float[N] x, bool c) => (float[M] y) {
  y = If (c) <then_branch = t () => (float[A] a) { s = Constant <value_ints = [7, 7]> () a0 = Reshape (x, s)
                                                   m = Constant <value_ints = [-1]> () a = Reshape (a0, m) },
              else_branch = e () => (float[B] b) { b = Identity (x) }>
}"""
    run(model(text), {"x": f(3), "c": np.array(False)})
    with pytest.raises(TransmuterError, match="cannot take the shape"):
        evaluate(read_model(model(text), known=known), {"x": f(3), "c": np.array(True)}, "compiled")


def test_what_both_branches_know_stays_known():
    """Both give the shape [3, -1]: the Reshape after the If needs no break."""
    text = """
g (float[N] x, float z) => (float[A, B] y) <float zero = {0.0}> {
  c = Greater (z, zero)
  v, s = If (c) <then_branch = t () => (float[K] a, int64[2] p) { a = Add (x, x) p = Constant <value_ints = [3, -1]> () },
                 else_branch = e () => (float[L] b, int64[2] q) { b = Neg (x) q = Constant <value_ints = [3, -1]> () }>
  y = Reshape (v, s)
}"""
    run(model(text), {"x": f(6), "z": np.array(1, np.float32)})


def test_an_index_alarm_inside_a_branch_comes_out():
    text = """
g (float[N] x, int64[K] i, float z) => (float[M] y) <float zero = {0.0}> {
  c = Greater (z, zero)
  y = If (c) <then_branch = t () => (float[A] a) { a = Gather (x, i) },
              else_branch = e () => (float[B] b) { j = Sub (i, i) b = Gather (x, j) }>
}"""
    ours = read_model(model(text), known=known)
    bad = {"x": f(3), "i": np.array([1, 9]), "z": np.array(-1, np.float32)}
    evaluate(ours, bad, "compiled")
    with pytest.raises(IndexOutOfRange, match="Gather"):
        evaluate(ours, bad | {"z": np.array(1, np.float32)}, "compiled")


# --- Loop ---

LOOP = """
g (int64 m, bool go, float[N] x) => (float[N] last, float[T, N] all, int64[T] numbers) <float one = {{1.0}}, float[1] limit = {{{limit}}}> {{
  start = Neg (x)
  last, all, numbers = Loop (m, go, start) <body = b (int64 i, bool c, float[N] v) => (bool again, float[N] w, float[N] seen, int64 n) {{
    seen = Identity (v)
    n = Identity (i)
    w = Add (v, one)
    {condition}
  }}>
}}"""
ALWAYS = "again = Identity (c)"
EARLY = """zero = Constant <value_ints = [0]> ()
    top = ReduceMax <keepdims = 0> (w)
    l0 = Squeeze (limit, zero)
    again = Less (top, l0)"""


@pytest.mark.parametrize("trips", [0, 1, 5])
@pytest.mark.parametrize("go", [True, False])
def test_counted_loop_emits_what_each_trip_saw(trips, go):
    """The numbers are those before the update; zero trips give (0, N), not a scalar."""
    proto = model(LOOP.format(limit=3, condition=ALWAYS))
    given = {"m": np.array(trips, np.int64), "go": np.array(go), "x": f(2)}
    if trips and go:
        run(proto, given)
    else:  # onnxruntime takes the declared shape and makes an unknown N zero
        run(proto, given, oracle=False, expected=[-f(2), np.zeros((0, 2), np.float32), np.zeros(0, np.int64)])


@pytest.mark.parametrize("limit", [0, 3.5, 100])
def test_early_stop_cuts_the_emitted_rows(limit):
    proto = model(LOOP.format(limit=limit, condition=EARLY))
    given = {"m": np.array(6, np.int64), "go": np.array(True), "x": f(2)}
    run(proto, given, breaks=1)


WHILE = """
g (float[N] x, {m}float bound) => (float[N] y, int64 trips) <int64 zero = {{0}}, int64 one = {{1}}> {{
  top = ReduceMax <keepdims = 0> (x)
  go = Less (top, bound)
  y, trips = Loop ({name}, go, x, zero) <body = b (int64 i, bool c, float[N] v, int64 k) => (bool again, float[N] w, int64 k1) {{
    w = Add (v, v)
    k1 = Add (k, one)
    t = ReduceMax <keepdims = 0> (w)
    again = Less (t, bound)
  }}>
}}"""


@pytest.mark.parametrize("bound", [0.5, 40.0])
def test_a_loop_until_a_traced_condition_is_one_program(bound):
    run(model(WHILE.format(m="", name="")), {"x": f(3), "bound": np.array(bound, np.float32)})
    given = {"x": f(3), "bound": np.array(bound, np.float32), "m": np.array(3, np.int64)}
    proto = model(WHILE.format(m="int64 m, ", name="m"))
    for m in (0, 3, 2**63 - 1):
        run(proto, given | {"m": np.array(m, np.int64)})


GROWING = """
g (int64 m, float[N] x) => (float[M] y) <bool yes = {1}> {
  start = Neg (x)
  y = Loop (m, yes, start) <body = b (int64 i, bool c, float[K] v) => (bool again, float[L] w) {
    w = Concat <axis = 0> (v, x)
    again = Identity (c)
  }>
}"""


def test_growing_values_are_unrolled_while_the_trips_are_few():
    proto = model(GROWING)
    run(proto, {"m": np.array(4, np.int64), "x": f(2)})
    run(proto, {"m": np.array(30, np.int64), "x": f(2)}, breaks=1)


def test_a_trip_number_that_must_be_known_is_unrolled():
    text = """
g (int64 m, float[N] x) => (float y) <bool yes = {1}, float zero = {0.0}> {
  y = Loop (m, yes, zero) <body = b (int64 i, bool c, float v) => (bool again, float w) {
    ax = Constant <value_ints = [0]> ()
    one = Constant <value_ints = [1]> ()
    from = Unsqueeze (i, ax)
    to = Add (from, one)
    part = Slice (x, from, to)
    s = Squeeze (part, ax)
    w = Sub (s, v)
    again = Identity (c)
  }>
}"""
    run(model(text), {"m": np.array(20, np.int64), "x": f(20)})


def test_a_loop_of_known_values_reads_traced_ones_around_it():
    """Nothing that is carried is traced at first; the body makes it so."""
    text = """
g (float[N] x) => (float[N] y, float[T, N] rows) <int64 m = {12}, bool yes = {1}, float zero = {0.0}> {
  shape = Shape (x)
  start = Expand (zero, shape)
  y, rows = Loop (m, yes, start) <body = b (int64 i, bool c, float[N] v) => (bool again, float[N] w, float[N] r) {
    w = Add (v, x)
    r = Mul (w, x)
    again = Identity (c)
  }>
}"""
    run(model(text), {"x": f(3)})


def test_a_counter_that_is_carried_beside_traced_values():
    text = """
g (float[N] x) => (float[N] y, int64 k) <int64 m = {70}, bool yes = {1}, int64 zero = {0}, int64 three = {3}> {
  y, k = Loop (m, yes, x, zero) <body = b (int64 i, bool c, float[N] v, int64 n) => (bool again, float[N] w, int64 n1) {
    n1 = Add (n, three)
    f = Cast <to = 1> (i)
    w = Add (v, f)
    again = Identity (c)
  }>
}"""
    run(model(text), {"x": f(3)})


def test_no_trips_when_one_trip_would_make_no_sense():
    """The body would gather from an empty axis: only its shape is asked for."""
    text = """
g (int64 m, float[N] x) => (float[T, K] rows, float[N] y) <bool yes = {1}> {
  y, rows = Loop (m, yes, x) <body = b (int64 i, bool c, float[N] v) => (bool again, float[N] w, float[K] r) {
    r0 = Gather (v, i)
    ax = Constant <value_ints = [0]> ()
    r = Unsqueeze (r0, ax)
    w = Identity (v)
    again = Identity (c)
  }>
}"""
    run(
        model(text),
        {"m": np.array(0, np.int64), "x": f(0)},
        oracle=False,
        expected=[np.zeros((0, 1), np.float32), f(0)],
    )


def test_a_sequence_grows_in_a_loop():
    """SequenceEmpty, SequenceInsert in a Loop, ConcatFromSequence (onnx-tensorrt#1044)."""
    text = """
g (float[N] x, int64 m) => (float[M] y) <bool yes = {1}> {
  start = SequenceEmpty <dtype = 1> ()
  filled = Loop (m, yes, start) <body = b (int64 i, bool c, seq(float[N]) s) => (bool again, seq(float[N]) t) {
    k = Cast <to = 1> (i)
    v = Add (x, k)
    t = SequenceInsert (s, v)
    again = Identity (c)
  }>
  y = ConcatFromSequence <axis = 0> (filled)
}"""
    for m in (1, 5):
        run(model(text), {"x": f(2), "m": np.array(m, np.int64)})


def test_a_loop_without_an_end_is_refused():
    text = """
g (float[N] x) => (float[N] y) <bool yes = {1}> {
  y = Loop (, yes, x) <body = b (int64 i, bool c, float[N] v) => (bool again, float[N] w) {
    w = Add (v, v)
    again = Identity (c)
  }>
}"""
    for way in ("host", "compiled"):
        with pytest.raises(TransmuterError, match="neither a trip count nor a condition"), pinned():
            evaluate(read_model(model(text), known=known), {"x": f(2)}, way)


def test_an_index_alarm_inside_a_loop_comes_out():
    text = """
g (float[N] x, int64[K] i) => (float[K] y) <int64 m = {9}, bool yes = {1}, int64 one = {1}, float zero = {0.0}> {
  shape = Shape (i)
  start = Expand (zero, shape)
  last, y = Loop (m, yes, i, start) <body = b (int64 t, bool c, int64[K] j, float[K] v) => (bool again, int64[K] k, float[K] w) {
    w = Gather (x, j)
    k = Add (j, one)
    again = Identity (c)
  }>
}"""
    ours = read_model(model(text), known=known)
    evaluate(ours, {"x": f(20), "i": np.array([0, 11])}, "compiled")
    with pytest.raises(IndexOutOfRange, match="Gather"):
        evaluate(ours, {"x": f(20), "i": np.array([0, 12])}, "compiled")


# --- Scan ---

SCAN = """
g (float[N] start, float[{shape}] xs, float[T, N] zs) => (float[N] last, float[{out}] ys) {{
  last, ys = Scan <num_scan_inputs = 2, scan_input_axes = [{axis}, 0], scan_input_directions = [{back}, 0],
                   scan_output_axes = [{out_axis}], scan_output_directions = [{out_back}],
                   body = b (float[N] s, float[N] x, float[N] z) => (float[N] s1, float[N] y) {{
    h = Mul (s, z)
    s1 = Add (h, x)
    y = Sub (s1, z)
  }}> (start, xs, zs)
}}"""


@pytest.mark.parametrize("back", [0, 1])
@pytest.mark.parametrize("out_back", [0, 1])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("steps", [1, 5])
def test_scan_axes_and_directions(back, out_back, turned, steps):
    fields = (
        {"shape": "N, T", "out": "N, T", "axis": -1, "out_axis": -1}
        if turned
        else {"shape": "T, N", "out": "T, N", "axis": 0, "out_axis": 0}
    )
    proto = model(SCAN.format(**fields, back=back, out_back=out_back))
    xs = f(3, steps) if turned else f(steps, 3)
    run(proto, {"start": f(3), "xs": xs, "zs": f(steps, 3) % 3})


def test_scan_over_nothing():
    proto = model(SCAN.format(shape="T, N", out="N, T", axis=0, back=0, out_axis=1, out_back=0))
    given = {"start": f(3), "xs": f(0, 3), "zs": f(0, 3)}
    run(proto, given, oracle=False, expected=[f(3), np.zeros((3, 0), np.float32)])


SCAN_8 = """
g (int64[B] lens, float[B, N] start, float[B, T, N] xs) => (float[B, N] last, float[B, T, N] ys) {{
  last, ys = Scan <num_scan_inputs = 1, directions = [{back}], body = b (float[N] s, float[N] x) => (float[N] s1, float[N] y) {{
    s1 = Add (s, x)
    y = Identity (s1)
  }}> (lens, start, xs)
}}"""


@pytest.mark.parametrize("back", [0, 1])
def test_scan_8_stops_at_each_sequence_s_own_length(back):
    xs, lens = f(2, 4, 3), [2, 4]
    last, ys = np.zeros((2, 3), np.float32), np.zeros((2, 4, 3), np.float32)
    for row, count in enumerate(lens):
        part = xs[row, :count][::-1] if back else xs[row, :count]
        ys[row, :count] = np.cumsum(part, 0)
        last[row] = ys[row, count - 1]
    proto = model(SCAN_8.format(back=back), opset=8)
    given = {"lens": np.array(lens, np.int64), "start": np.zeros((2, 3), np.float32), "xs": xs}
    run(proto, given, oracle=False, expected=[last, ys])


# --- together ---


def test_control_flow_nests():
    text = """
g (float[N] x, float z) => (float[T, N] rows) <int64 m = {3}, bool yes = {1}, int64 two = {2}, float one = {1.0}> {
  y, rows = Loop (m, yes, x) <body = b (int64 i, bool c, float[N] v) => (bool again, float[N] w, float[N] r) {
    k = Cast <to = 1> (i)
    big = Greater (k, z)
    w = If (big) <then_branch = t () => (float[N] a) { a = Add (v, k) },
                  else_branch = e () => (float[N] d) {
      inner = Loop (two, yes, v) <body = b2 (int64 j, bool c2, float[N] u) => (bool again2, float[N] u2) {
        u2 = Mul (u, z)
        again2 = Identity (c2)
      }>
      d = Add (inner, one)
    }>
    r = Identity (w)
    again = Identity (c)
  }>
}"""
    for z in (0.5, 1.5, 9.0):
        run(model(text), {"x": f(2), "z": np.array(z, np.float32)})


def test_gradients_flow_through_scan_and_if():
    import transmuter_async as tm

    text = """
g (float[N] x, float z) => (float y) <int64 m = {3}, bool yes = {1}, float zero = {0.0}> {
  v = Loop (m, yes, x) <body = b (int64 i, bool c, float[N] u) => (bool again, float[N] w) {
    w = Mul (u, z)
    again = Identity (c)
  }>
  big = Greater (z, zero)
  t = If (big) <then_branch = t () => (float[N] a) { a = Mul (v, v) }, else_branch = e () => (float[N] d) { d = Neg (v) }>
  y = ReduceSum <keepdims = 0> (t)
}"""
    ours = read_model(model(text), known=known)
    apply, params = tm.to_jax(ours)
    x = np.array([1, 2], np.float32)
    with pinned():
        gradient = jax.grad(lambda z: apply(params, {"x": x, "z": z})["y"])(np.float32(2))
    np.testing.assert_allclose(gradient, 6 * 2**5 * (x**2).sum(), rtol=1e-6)  # d/dz of z^6 sum x^2
