"""What is public: sorted, documented, typed, and nothing more."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
import types

import pytest

import transmuter_async as tm

LAYERS = ["graph", "operators", "compiler", "actors", "hub", "telemetry", "runtime", "functions", "errors", "bridge"]

DESIGNED = {
    "Event", "Model", "Runtime", "Spec", "compare", "device_put", "run_sync", "supported_operators", "to_jax",
    "TransmuterError", "InvalidModel", "UnsupportedModel", "InputError", "IndexOutOfRange", "NonFiniteError", "NeedsValue",
    "BreakRefused", "ActorStopped", "Overloaded", "CircuitOpen", "DeadlineExceeded", "MisuseError", "HubError",
}  # fmt: skip
"""Names that the design gives; more may be public, these must be."""


def isort_key(name: str) -> tuple[int, str]:
    """Constants, classes, the rest: as ruff sorts `__all__`."""
    return (0 if name.isupper() else 1 if name[0].isupper() else 2, name)


def test_every_designed_name_is_there() -> None:
    assert set(tm.__all__) >= DESIGNED, sorted(DESIGNED - set(tm.__all__))


def test_all_is_sorted_and_exists() -> None:
    names = [name for name in tm.__all__ if not name.startswith("__")]
    assert names == sorted(names)
    assert not [name for name in tm.__all__ if not hasattr(tm, name)]


def test_nothing_leaks() -> None:
    """Every name without an underscore is in `__all__` or is a module of the package."""
    leaked = [
        name
        for name, value in vars(tm).items()
        if not name.startswith("_")
        and name not in tm.__all__
        and name != "annotations"
        and not (isinstance(value, types.ModuleType) and value.__name__.startswith("transmuter_async."))
    ]
    assert not leaked


@pytest.mark.parametrize("name", [name for name in tm.__all__ if not name.startswith("__")])
def test_a_public_name_is_documented(name: str) -> None:
    value = getattr(tm, name)
    if not (inspect.isclass(value) or inspect.isroutine(value)):
        return
    assert inspect.getdoc(value), name
    if inspect.isclass(value):
        for member, function in inspect.getmembers(value, inspect.isroutine):
            if not member.startswith("_") and getattr(function, "__module__", "").startswith("transmuter_async"):
                assert inspect.getdoc(function), f"{name}.{member}"


@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_lists_what_it_gives(layer: str) -> None:
    module = importlib.import_module(f"transmuter_async.{layer}")
    listed = getattr(module, "__all__", None)
    assert listed is not None, f"transmuter_async.{layer} has no __all__"
    assert list(listed) in (sorted(listed), sorted(listed, key=isort_key))
    assert not [name for name in listed if not hasattr(module, name)]


def test_the_version_is_said_once() -> None:
    from transmuter_async.version import __version__

    assert tm.__version__ == __version__


def test_importing_starts_nothing() -> None:
    """No thread, no jax backend, no event loop, no optional package: an import only defines."""
    code = (
        "import threading, sys; before = threading.active_count(); import transmuter_async\n"
        "assert threading.active_count() == before, threading.enumerate()\n"
        "loaded = {'onnxruntime', 'PIL', 'sklearn', 'huggingface_hub'} & set(sys.modules)\n"
        "assert not loaded, loaded\n"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
