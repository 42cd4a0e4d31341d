"""Files beside a model that hold its larger tensors (`TensorProto.external_data`).

`onnx` refuses links, which is all that the Hugging Face cache consists of; and a location is text from a stranger. So a
file is opened here component by component from the model's folder, never through a link, unless the whole path is one of
the links that the Hub client returned for this very load.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from ..errors import InvalidModel
from .storage import FileStorage

__all__ = ["ExternalFiles", "absolute", "links_of", "parse_entries"]

_KEYS = frozenset({"location", "offset", "length", "checksum"})


def parse_entries(tensor: str, entries: Iterable[tuple[str, str]], source: str | None) -> tuple[str, int, int | None]:
    """The location, offset and length (None where not said) of a tensor's external data.

    The checksum is SHA-1 of the whole file, optional, and no defence against anybody; it is accepted and not compared.
    onnxruntime adds keys that start with "prepacked_" for copies of its own, which do not change the tensor.

    Raises:
        InvalidModel: An unknown or repeated key, or a number that is none.
    """
    found: dict[str, str] = {}
    for key, value in entries:
        if key.startswith("prepacked_"):
            continue
        if key not in _KEYS or key in found:
            what = "repeats" if key in found else "has the unknown"
            raise InvalidModel(
                f"the external data of tensor {tensor!r} {what} key {key[:60]!r}; known are {', '.join(sorted(_KEYS))}",
                source=source,
            )
        found[key] = value
    numbers: dict[str, int] = {}
    for key in ("offset", "length"):
        text = found.get(key)
        if text is None:
            continue
        if not (text.isascii() and text.isdigit() and len(text) < 20):
            raise InvalidModel(
                f"the external data of tensor {tensor!r} has {key} {text[:40]!r}, which is no byte count", source=source
            )
        numbers[key] = int(text)
    if not found.get("location"):
        raise InvalidModel(f"the external data of tensor {tensor!r} names no file (no 'location')", source=source)
    return found["location"], numbers.get("offset", 0), numbers.get("length")


class ExternalFiles:
    """Opens the files that a model's tensors lie in, each once.

    Args:
        folder: The model's folder, None where the model came without one.
        allowed_links: Absolute paths that may be links.
        source: The model, as errors call it.
    """

    def __init__(self, folder: str | None, allowed_links: frozenset[str], source: str | None) -> None:
        self._folder = folder
        self._allowed = allowed_links
        self._source = source
        self._open: dict[str, tuple[int, FileStorage]] = {}

    def storage(self, tensor: str, location: str) -> FileStorage:
        """The file at `location`, a path relative to the model's folder with forward slashes.

        Raises:
            InvalidModel: It is missing, no regular file, a link that was not allowed, or outside of the folder.
        """
        found = self._open.get(location)
        if found is not None:
            return found[1]
        if self._folder is None:
            raise InvalidModel(
                f"tensor {tensor!r} lies in the file {location!r} beside the model, but the model was given as bytes. "
                "Load it from its path, or give the folder as base_dir.",
                source=self._source,
            )
        parts = self._parts(tensor, location)
        path = str(Path(absolute(self._folder), *parts))
        try:
            descriptor = self._descriptor(tensor, location, path, parts)
        except FileNotFoundError as error:
            raise InvalidModel(
                f"tensor {tensor!r} lies in the file {location!r}, and there is no {path}. "
                "Put the file beside the model; files of external data belong to the model.",
                source=self._source,
            ) from error
        except OSError as error:
            raise InvalidModel(
                f"tensor {tensor!r} lies in {location!r}, which can't be opened: {error}", source=self._source
            ) from error
        storage = FileStorage(descriptor, path)
        self._open[location] = (descriptor, storage)
        return storage

    def _parts(self, tensor: str, location: str) -> tuple[str, ...]:
        parts = tuple(part for part in location.replace("\\", "/").split("/") if part != ".")
        outside = location.startswith(("/", "\\")) or ":" in parts[0] if parts else True
        if outside or any(part in ("", "..") or "\0" in part for part in parts):
            raise InvalidModel(
                f"tensor {tensor!r} claims to lie in {location[:200]!r}, which is not a plain path inside of the "
                "model's folder. Such a model is refused.",
                source=self._source,
            )
        return parts

    def _descriptor(self, tensor: str, location: str, path: str, parts: tuple[str, ...]) -> int:
        flags = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
        if path in self._allowed:
            descriptor = os.open(path, flags)
        else:
            self._refuse_links(tensor, location, parts)
            descriptor = _open_beneath(absolute(self._folder or "."), parts, flags)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise InvalidModel(
                f"tensor {tensor!r} claims to lie in {location!r}, which is not a regular file", source=self._source
            )
        return descriptor

    def _refuse_links(self, tensor: str, location: str, parts: tuple[str, ...]) -> None:
        """A readable error for a link; opening without following is what really keeps it out."""
        step = Path(absolute(self._folder or "."))
        for part in parts:
            step /= part
            if step.is_symlink():
                raise InvalidModel(
                    f"tensor {tensor!r} lies in {location!r}, and {step} is a link. Only regular files inside of the "
                    "model's folder are read. Copy the file there, or load the model from the Hub by its hf:// name.",
                    source=self._source,
                )

    def check_unchanged(self) -> None:
        """Raises InvalidModel when one of the files changed since it was opened."""
        for _, storage in self._open.values():
            storage.check_unchanged()

    def close(self) -> None:
        """Closes all files."""
        for descriptor, _ in self._open.values():
            with suppress(OSError):
                os.close(descriptor)
        self._open.clear()


def _open_beneath(folder: str, parts: tuple[str, ...], flags: int) -> int:
    """Opens a file below `folder` without following a link on the way, where the system can do that."""
    no_follow = getattr(os, "O_NOFOLLOW", 0)
    if not no_follow or os.open not in os.supports_dir_fd:
        return os.open(Path(folder, *parts), flags)
    here = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for part in parts[:-1]:
            below = os.open(part, os.O_RDONLY | os.O_DIRECTORY | no_follow, dir_fd=here)
            os.close(here)
            here = below
        return os.open(parts[-1], flags | no_follow, dir_fd=here)
    finally:
        os.close(here)


def absolute(path: str) -> str:
    """An absolute spelling of a path. Links are not resolved: whether there are any is the question."""
    return os.path.abspath(path)


def links_of(paths: Iterable[str]) -> frozenset[str]:
    """Absolute spellings of the paths that may be links."""
    return frozenset(absolute(path) for path in paths)
