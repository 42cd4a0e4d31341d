"""What `load` takes, and how it is read: paths, bytes, folders, and names of repositories of the Hub. Blocking, no events."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from transmuter_async.graph import Model, Source, read_model
from transmuter_async.hub import FetchedModel, HubFile, is_local_folder
from transmuter_async.operators import known

__all__ = ["folder", "is_repository", "kept_small", "read_fetched", "read_local", "stem", "told"]

_BARE_REPO = re.compile(r"[A-Za-z0-9][\w.\-]*/[\w.\-]+")
_MODEL_FILE = re.compile(r"\.(onnx|ort|pb|bin)$", re.IGNORECASE)


def is_repository(source: str) -> bool:
    """Whether a text means a repository of the Hub, not a path. Nothing on the disk is asked."""
    if source.startswith("hf://"):
        return True
    return not is_local_folder(source) and not _MODEL_FILE.search(source) and bool(_BARE_REPO.fullmatch(source))


def folder(source: str | os.PathLike[str]) -> Path | None:
    """The path, where it is a folder."""
    path = Path(source).expanduser()
    return path if path.is_dir() else None


def told(source: Any, reference: HubFile | os.PathLike[str] | None) -> Any:
    """A source as events carry it."""
    if isinstance(reference, HubFile):
        return ("hf", reference.repo, reference.file)
    return str(source) if isinstance(source, (str, os.PathLike)) else None


def stem(source: Source) -> str:
    """What a model is called after where it came from."""
    if source is None:
        return "model"
    return Path(source).stem if isinstance(source, str) else source[1].rpartition("/")[2]


def read_local(source: Any) -> Model:
    """Read a model from this disk, or from memory."""
    model = read_model(source, known=known)
    return replace(model, source=str(source)) if isinstance(source, (str, os.PathLike)) else model


def read_fetched(fetched: FetchedModel) -> Model:
    """Read a model that the Hub client has brought."""
    model = read_model(fetched.path, known=known, allowed_links=[str(path) for path in fetched.links])
    return replace(model, source=fetched.source)


def kept_small(model: Model) -> dict[str, Any]:
    """The options of a model that was loaded with `prepare="memory"`: folding lets weights grow by nothing."""
    return {"fold_bytes": 0} if model.prepare == "memory" else {}
