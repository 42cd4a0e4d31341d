"""Who may import whom: the arrows of docs/design.md, read from the sources."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "transmuter_async"
FILES = sorted(PACKAGE.rglob("*.py"))

BELOW: dict[str, set[str]] = {
    "version": set(),
    "errors": set(),
    "graph": {"errors"},
    "operators": {"errors", "graph"},
    "compiler": {"errors", "graph", "operators"},
    "bridge": {"errors"},
    "telemetry": {"errors", "bridge"},
    "metrics": {"errors", "bridge", "telemetry"},
    "hub": {"errors", "bridge", "telemetry"},
    "actors": {"errors", "graph", "operators", "compiler", "bridge", "telemetry"},
    "serving": {"errors", "graph", "operators", "compiler", "bridge", "telemetry", "actors"},
    "tasks": {"errors", "graph", "operators", "compiler", "bridge", "telemetry", "actors", "serving"},
}
BELOW["sources"] = {"errors", "graph", "operators", "hub"}
BELOW["logs"] = {"errors", "bridge", "telemetry", "actors", "hub"}
BELOW["runtime"] = {*BELOW}
BELOW["functions"] = {*BELOW}
BELOW["compare"] = {*BELOW}
BELOW["demo"] = set()
BELOW["cli"] = {*BELOW}
BELOW["server"] = {*BELOW}
BELOW["__init__"] = {*BELOW}
BELOW["__main__"] = {*BELOW}
BELOW["testing"] = {*BELOW}
"""Layer -> layers that it may import. A layer is a folder or a file of the package; `testing` is imported by nobody."""

SYNC = {"errors", "graph", "operators", "compiler", "version"}
LOOPS = {"anyio", "asyncio", "trio", "sniffio", "outcome"}
ONLY_IN: dict[str, set[str]] = {
    "onnx": {"graph/reader.py"},
    "google": {"graph/reader.py"},
    "aiofiles": {"hub/cache.py"},
    "aiohttp": {"hub/transport.py"},
    "asyncio": {"hub/transport.py", "bridge.py"},
    "trio": {"hub/transport.py", "bridge.py"},
    "onnxruntime": set(),
    "pytest": {"testing.py"},
}
SERVER_MAY = {"aiohttp"}
"""The aiohttp *server*; the client is the Hub's alone."""


def relative(file: Path) -> str:
    return file.relative_to(PACKAGE).as_posix()


def layer(file: Path) -> str:
    parts = file.relative_to(PACKAGE).parts
    return parts[0] if len(parts) > 1 else file.stem


def listed(file: Path) -> list[str]:
    """`__all__` of a file: a function may have the name of the module that defines it."""
    if not file.exists() or file.parent == PACKAGE:
        return []
    for node in ast.parse(file.read_text("utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            names: list[str] = ast.literal_eval(node.value)
            return names
    return []


def imports(tree: ast.AST, file: Path) -> Iterator[tuple[str, int, bool]]:
    """Absolute dotted name, line, and whether it is only for types, of every import anywhere in a file."""
    typing_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
        for statement in node.body
        for inner in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno, id(node) in typing_only
        elif isinstance(node, ast.ImportFrom):
            module = str(node.module or "")
            if node.level:
                around = ["transmuter_async", *file.relative_to(PACKAGE).parts][: -node.level]
                module = ".".join([*around, module] if module else around)
            for alias in node.names:
                name = f"{module}.{alias.name}"
                inside = name.split(".")
                target = PACKAGE.joinpath(*inside[1:])
                is_module = (
                    inside[0] == "transmuter_async"
                    and (target.with_suffix(".py").exists() or target.is_dir())
                    and alias.name not in listed(target.parent / "__init__.py")
                )
                yield name if is_module else module, node.lineno, id(node) in typing_only


def wrong_imports(file: Path) -> list[str]:
    here, own = relative(file), layer(file)
    assert own in BELOW, f"{here}: the layer {own!r} has no place yet; give it one in BELOW and in docs/design.md"
    wrong = []
    for name, line, typing_only in imports(ast.parse(file.read_text("utf-8")), file):
        at = f"{here}:{line}: imports {name}"
        parts = name.split(".")
        if parts[0] == "transmuter_async" and len(parts) > 1:
            other = parts[1]
            if other not in BELOW:
                wrong.append(f"{at}, which is no layer")
            elif other == "testing" and own != "testing":
                wrong.append(f"{at}: nothing imports testing")
            elif other != own and other not in BELOW[own] | {"version"}:
                wrong.append(f"{at}, against the arrows")
            elif other != own and len(parts) > 2:
                wrong.append(f"{at}: a deep import; take it from transmuter_async.{other}, which lists what it gives")
        elif parts[0] == "transmuter_async" and own not in {"cli", "testing", "__main__"}:
            wrong.append(f"{at}: inside, import from the layer that defines it")
        if name.startswith("jax._src"):
            wrong.append(f"{at}, private to jax")
        if own in SYNC and parts[0] in LOOPS:
            wrong.append(f"{at}, but {own} is plain synchronous code")
        allowed = ONLY_IN.get(parts[0])
        if allowed is not None and not typing_only and here not in allowed and not (own == "server" and parts[0] in SERVER_MAY):
            wrong.append(f"{at}, allowed only in {sorted(allowed) or 'tests'}")
        if own == "graph" and parts[0] in {"jax", "jaxlib"}:
            wrong.append(f"{at}: graph is values only")
    return wrong


@pytest.mark.parametrize("file", FILES, ids=relative)
def test_imports_follow_the_arrows(file: Path) -> None:
    assert not wrong_imports(file), "\n".join(wrong_imports(file))


@pytest.mark.parametrize(
    ("where", "text", "complaint"),
    [
        ("graph/x.py", "from transmuter_async.compiler import y", "against the arrows"),
        ("operators/x.py", "import anyio", "plain synchronous"),
        ("compiler/x.py", "import onnx.helper", "allowed only in"),
        ("runtime.py", "import asyncio", "allowed only in"),
        ("operators/x.py", "from jax._src import core", "private to jax"),
        ("hub/x.py", "import aiohttp", "allowed only in"),
        ("actors/x.py", "from transmuter_async import testing", "nothing imports testing"),
        ("actors/x.py", "from transmuter_async import Runtime", "from the layer that defines it"),
        ("actors/x.py", "from transmuter_async.graph.model import Node", "a deep import"),
        ("graph/x.py", "from ..compiler import y", "against the arrows"),
        ("actors/x.py", "from transmuter_async.serving import Serving", "against the arrows"),
        ("serving/x.py", "from transmuter_async.hub import HubClient", "against the arrows"),
        ("serving/x.py", "from transmuter_async.actors.model import ModelActor", "a deep import"),
        ("graph/x.py", "def f():\n    import jax", "values only"),
    ],
)
def test_a_wrong_arrow_is_found(tmp_path: Path, monkeypatch, where: str, text: str, complaint: str) -> None:
    (tmp_path / where).parent.mkdir(exist_ok=True)
    (tmp_path / where).write_text(text)
    (tmp_path / "compiler").mkdir(exist_ok=True)
    (tmp_path / "testing.py").touch()
    (tmp_path / "graph").mkdir(exist_ok=True)
    (tmp_path / "graph" / "model.py").touch()
    monkeypatch.setattr(f"{__name__}.PACKAGE", tmp_path)
    assert complaint in "\n".join(wrong_imports(tmp_path / where))


SETTING = {
    *("jax.config.update", "configuration.update", "jax.enable_x64", "enable_x64"),
    *("jax.default_matmul_precision", "jax.transfer_guard"),
}


def test_settings_of_jax_are_touched_in_one_file() -> None:
    """`jax.config.update` reaches into the application: what is updated is put back, there. So do the context managers."""
    for file in FILES:
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                if called in SETTING:
                    assert relative(file) == "compiler/settings.py", f"{relative(file)}:{node.lineno}: {called}"
                assert called != "jax.clear_caches", f"{relative(file)}:{node.lineno}: the cache owns its programs"
