"""What a run has to say of the machine that it was made on."""

from __future__ import annotations

import datetime as dt
import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

__all__ = ["load", "machine"]

PACKAGES = ("transmuter-async", "jax", "jaxlib", "numpy", "onnx", "onnxruntime")
FEATURES = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile")


def load() -> float | None:
    """Processes that ran or waited to run, on average over the last minute; None where the system does not tell."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


def machine() -> dict[str, Any]:
    """Processor, memory, versions, and the load right now."""
    return {
        "date": dt.datetime.now(dt.UTC).date().isoformat(),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": _memory(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in PACKAGES},
        "load_at_end": load(),
    }


def _version(package: str) -> str:
    if package == "transmuter-async":
        import transmuter_async  # it need not be installed

        return str(transmuter_async.__version__)
    return version(package)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    facts = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    features = [each for each in FEATURES if each in facts.get("flags", "").split()]
    name = facts.get("model name") or platform.machine()
    family = f"family {facts['cpu family']} model {facts['model']}" if {"cpu family", "model"} <= facts.keys() else ""
    return ", ".join(filter(None, (name, family, " ".join(features))))


def _memory() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (AttributeError, ValueError, OSError):
        return None
