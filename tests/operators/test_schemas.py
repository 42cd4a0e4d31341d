"""Every definition has the signature of the standard, at every version, and no version is without one.

The facts come from the installed `onnx`; those of com.microsoft from `microsoft.json`, read from onnxruntime 1.32's
registered schemas: `?` marks an optional input, `*` a variadic one, `!` a required attribute.
"""

from __future__ import annotations

import inspect
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import onnx.defs
import onnx.helper
import pytest

import transmuter_async as tm
from tests.compiler.support import node, proto
from transmuter_async.errors import UnsupportedModel
from transmuter_async.graph import Model, read_model
from transmuter_async.operators import Operator, known, resolve, supported
from transmuter_async.operators.registry import COVERED

MICROSOFT = "com.microsoft"
REQUIRED = inspect.Parameter.empty

DEPRECATED = {
    ("", "GroupNormalization", 18): "withdrawn by the schema, runs as it was published: scale and bias by group",
    ("", "Scatter", 11): "renamed ScatterElements; a model that still says Scatter means version 9",
    ("", "Upsample", 10): "replaced by Resize; a model that still says Upsample means version 9",
    ("ai.onnx.ml", "TreeEnsembleClassifier", 5): "replaced by TreeEnsemble; a model that still says it means version 3",
    ("ai.onnx.ml", "TreeEnsembleRegressor", 5): "replaced by TreeEnsemble; a model that still says it means version 3",
}
"""Versions whose schema says no more than that the operator is withdrawn."""

OUTSIDE = {("", "SimplifiedLayerNormalization", 1): "written by onnxruntime's exporters into the standard's domain"}
"""Definitions of the standard's domains that the standard does not have."""


def history() -> dict[tuple[str, str], dict[int, Any]]:
    """Every schema of the installed onnx: by domain and name, then by version."""
    found: dict[tuple[str, str], dict[int, Any]] = defaultdict(dict)
    for schema in onnx.defs.get_all_schemas_with_history():
        found[schema.domain, schema.name][schema.since_version] = schema
    return dict(sorted(found.items()))


SCHEMAS = history()


def text(value: Any) -> Any:
    """Strings of protobuf as text, lists as tuples."""
    if isinstance(value, list):
        return tuple(map(text, value))
    return value.decode() if isinstance(value, bytes) else value


def default(attribute: Any) -> Any:
    """An attribute's default as a definition writes it."""
    if attribute.default_value.name:
        return text(onnx.helper.get_attribute_value(attribute.default_value))
    return REQUIRED if attribute.required else None


def equal(ours: Any, theirs: Any) -> bool:
    """Whether two defaults are the same; floats are what float32 makes of them, which is what a file can hold."""
    if ours is theirs:
        return True
    if isinstance(ours, (tuple, list)) and isinstance(theirs, (tuple, list)):
        return len(ours) == len(theirs) and all(map(equal, ours, theirs))
    if isinstance(ours, float) and isinstance(theirs, float):
        return bool(np.float32(ours) == np.float32(theirs))
    return type(ours) is type(theirs) and bool(ours == theirs)


def differences(definition: Operator, schema: Any) -> list[str]:
    """What a definition says otherwise than a schema."""
    options = [item.option.name for item in schema.inputs]
    found = []
    names = tuple(item.name for item in schema.inputs)
    if definition.inputs != names:
        found.append(f"inputs {definition.inputs}, the schema has {names}")
    if definition.variadic != (options[-1:] == ["Variadic"]):
        found.append(f"variadic {definition.variadic}, the schema has {options}")
    if definition.required != options.count("Single"):
        found.append(f"{definition.required} required inputs, the schema has {options.count('Single')}")
    if set(definition.attributes) != set(schema.attributes):
        found.append(f"attributes {sorted(definition.attributes)}, the schema has {sorted(schema.attributes)}")
    found.extend(
        f"{name}={definition.attributes[name]!r}, the schema has {default(attribute)!r}"
        for name, attribute in schema.attributes.items()
        if name in definition.attributes and not equal(definition.attributes[name], default(attribute))
    )
    return found


@pytest.mark.parametrize("key", SCHEMAS, ids=lambda key: ":".join(filter(None, key)))
def test_every_version_has_a_definition_with_its_signature(key: tuple[str, str]) -> None:
    """So a later version with another signature must have a definition of its own."""
    domain, name = key
    problems = []
    for version, schema in SCHEMAS[key].items():
        definition = resolve(domain, name, version)
        if definition is None:
            problems.append(f"version {version} resolves to nothing")
        elif (domain, name, version) in DEPRECATED:
            assert schema.deprecated, f"{name}-{version} is no longer deprecated: take it out of the table"
        else:
            problems.extend(f"version {version}: {each}" for each in differences(definition, schema))
    assert not problems, "\n".join(problems)


def test_every_definition_is_a_version_of_the_standard() -> None:
    strangers = {
        (each.domain, each.name, each.since_version)
        for each in supported()
        if each.domain != MICROSOFT and each.since_version not in SCHEMAS.get((each.domain, each.name), ())
    }
    assert strangers == set(OUTSIDE)


def test_deprecated_versions_are_those_of_the_table() -> None:
    withdrawn = {
        (*key, version)
        for key, versions in SCHEMAS.items()
        for version, schema in versions.items()
        if schema.deprecated
    }
    assert withdrawn == set(DEPRECATED)


def test_a_wrong_signature_is_found() -> None:
    clip = resolve("", "Clip", 6)
    assert clip is not None
    assert differences(clip, SCHEMAS["", "Clip"][6]) == []
    wrong = "\n".join(differences(clip, SCHEMAS["", "Clip"][13]))
    assert "inputs" in wrong and "attributes" in wrong
    elu = resolve("", "Elu", 6)
    assert elu is not None
    assert "the schema has 1.67" in "\n".join(differences(elu, SCHEMAS["", "Selu"][6]))


# --- com.microsoft ----------------------------------------------------------------------------------------------------

CONTRIB: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("microsoft.json").read_text("utf-8"))
DEFINED = [each for each in supported() if each.domain == MICROSOFT]


@pytest.mark.parametrize("definition", DEFINED, ids=lambda each: each.name)
def test_contributed_operators_have_their_signature(definition: Operator) -> None:
    facts = CONTRIB[definition.name]
    assert definition.since_version == facts["since_version"]
    inputs = facts["inputs"].split()
    assert definition.inputs == tuple(each.rstrip("?*") for each in inputs)
    assert definition.variadic == (bool(inputs) and inputs[-1].endswith("*"))
    # A required input behind optional ones makes those positional too: they are given as None.
    single = [k for k, each in enumerate(inputs) if each[-1] not in "?*"]
    assert definition.required == max(single, default=-1) + 1
    attributes = {each.rstrip("!"): each.endswith("!") for each in facts["attributes"].split()}
    assert set(definition.attributes) == set(attributes)
    for name, required in attributes.items():
        assert (definition.attributes[name] is REQUIRED) == required, name


def test_contributed_operators_with_a_kernel_are_defined() -> None:
    with_kernel = {name for name, facts in CONTRIB.items() if facts["cpu_kernel"]}
    assert len(with_kernel) == 86
    assert with_kernel <= {each.name for each in DEFINED}


# --- opsets that came later than the definitions ----------------------------------------------------------------------


def older_definitions(domain: str, name: str, version: int) -> bool:
    """As if the definitions had been written for opset 24."""
    return version <= 24 and known(domain, name, version)


def chain(*ops: str, opset: int, known: Any = older_definitions) -> Model:
    names = ["x", *(f"t{k}" for k in range(1, len(ops))), "y"]
    nodes = [node(op, [names[k]], [names[k + 1]], name=f"the {op}") for k, op in enumerate(ops)]
    return read_model(proto(nodes, ["x:float[n]"], ["y:float[n]"], opset=opset), known=known)


def test_a_later_opset_runs_where_no_operator_changed() -> None:
    model = chain("Relu", "Neg", opset=28)
    assert model.check().ok
    assert tm.run_sync(model, {"x": np.float32([-1, 2])})["y"].tolist() == [0, -2]


def test_a_later_opset_is_refused_with_the_operators_that_changed() -> None:
    model = chain("Relu", "Unique", "Neg", opset=28)
    report = model.check()
    assert [use.op_type for use in report.missing] == ["Unique"]
    with pytest.raises(UnsupportedModel, match=r"Unique \(opset 28\)"):
        tm.run_sync(model, {"x": np.float32([1])})


def test_an_operator_that_changed_is_expanded_where_the_standard_has_a_body() -> None:
    def without(domain: str, name: str, version: int) -> bool:
        return name != "Celu" and known(domain, name, version)

    model = chain("Celu", opset=28, known=without)
    assert model.check().ok
    assert "Celu" not in {each.op_type for each in model.graph.walk()}
    y = tm.run_sync(model, {"x": np.float32([-1, 2])})["y"]
    np.testing.assert_allclose(y, [np.expm1(-1), 2], rtol=1e-6)


def test_an_opset_that_onnx_does_not_know_is_refused_with_all_its_operators() -> None:
    newest = onnx.defs.onnx_opset_version() + 1
    model = chain("Relu", "Celu", opset=newest, known=known)
    with pytest.raises(UnsupportedModel, match="may have changed") as caught:
        tm.run_sync(model, {"x": np.float32([1])})
    assert [each[1] for each in caught.value.missing] == ["Celu", "Relu"]


def test_every_version_of_the_installed_onnx_was_looked_at() -> None:
    assert {domain: max(max(v) for key, v in SCHEMAS.items() if key[0] == domain) for domain in COVERED} == COVERED
