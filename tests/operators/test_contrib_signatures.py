"""com.microsoft's definitions say what onnxruntime's schemas say: inputs in order, attributes, defaults."""

from __future__ import annotations

import inspect
from typing import Any

import onnx
import pytest
from onnxruntime.capi.onnxruntime_pybind11_state import get_all_operator_schema, get_all_opkernel_def

from transmuter_async.operators import Operator, supported

SCHEMAS = {schema.name: schema for schema in get_all_operator_schema() if schema.domain == "com.microsoft"}
SIMPLIFIED = next(s for s in get_all_operator_schema() if s.name == "SimplifiedLayerNormalization" and not s.domain)
OURS = [o for o in supported() if o.domain == "com.microsoft"]


def _default(attribute: Any) -> Any:
    proto = onnx.AttributeProto()
    proto.ParseFromString(attribute._default_value)
    if not proto.name:
        return None
    value = onnx.helper.get_attribute_value(proto)
    return value.decode() if isinstance(value, bytes) else value


def _check(definition: Operator, schema: Any) -> None:
    names = tuple(value.name for value in schema.inputs)
    assert definition.inputs == names
    kinds = [str(value.option).rsplit(".", 1)[-1] for value in schema.inputs]
    assert definition.variadic == (bool(kinds) and kinds[-1] == "Variadic")
    single = [i for i, kind in enumerate(kinds) if kind == "Single"]
    # An optional input before a required one is given as None, so that it has no default.
    assert definition.required == (single[-1] + 1 if single else 0)
    attributes = dict(schema.attributes)
    assert set(definition.attributes) == set(attributes)
    for name, attribute in attributes.items():
        ours = definition.attributes[name]
        if attribute.required:
            assert ours is inspect.Parameter.empty, f"{name} is required"
        else:
            assert ours == _default(attribute), f"{name} is {ours!r} where it is left out, not {_default(attribute)!r}"


@pytest.mark.parametrize("definition", OURS, ids=lambda o: o.name)
def test_signature_is_the_schemas(definition: Operator) -> None:
    _check(definition, SCHEMAS[definition.name])


def test_simplified_layer_normalization_of_the_default_domain() -> None:
    _check(next(o for o in supported() if o.name == "SimplifiedLayerNormalization"), SIMPLIFIED)


def test_every_operator_with_a_cpu_kernel_is_defined() -> None:
    kernels = {k.op_name for k in get_all_opkernel_def() if k.domain == "com.microsoft" and "CPU" in k.provider}
    assert len(kernels) >= 80
    assert kernels - {o.name for o in OURS} == set()
