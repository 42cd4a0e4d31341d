"""A file for each compiled segment: the next process answers without tracing or compiling.

A file's name is a digest of everything that decides the program: the graph with the values of its weights, the place and
the signature, static and known values, the options, the versions of this library, jax and jaxlib, the device and the
CPU's features, XLA's flags. Where the trace found that it needs arguments by value, the file of that name only tells
which ones, and the program lies under the digest that holds their values too.

The folder is a trust boundary: it is the one place where something is unpickled. Folder and file must be ours, writable
by nobody else, and no links; the content must match its digest; and the pickle inside may name only what a serialized
program names. Whatever does not fit is *rejected*: told, compiled again, and replaced. A write that fails costs the cache
and nothing else. Many processes may share a folder: files appear by rename, whole or not at all.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import platform
import stat
import tempfile
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import serialize_executable

from transmuter_async.compiler.cores import cores, pool_size
from transmuter_async.compiler.pickles import PickleRefused, scan
from transmuter_async.graph import Graph, Node, SparseTensor, onnx_name, parse_dtype

__all__ = ["DiskCache", "Entry", "Rejected", "device_facts", "graph_digest"]

_MAGIC = b"transmuter_async segment 2\n"
_SUFFIX = ".segment"


class Rejected(Exception):
    """A file that must not be used; the text says why."""


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """What a file holds.

    Attributes:
        record: Plain values: the plan of the segment, or the names whose values decide which file is meant.
        arrays: Arrays that the record refers to by number.
        program: The loaded program, None where the record needs none.
    """

    record: dict[str, Any]
    arrays: tuple[np.ndarray, ...]
    program: Any


class DiskCache:
    """A folder of segments, bounded in size, least recently used out first.

    Args:
        folder: Made with mode 0700 where it is missing.
        limit: Bytes that the files may take in all.
    """

    def __init__(self, folder: str | os.PathLike[str], *, limit: int) -> None:
        self.folder = Path(folder)
        self.limit = limit

    def load(self, name: str, device: jax.Device) -> Entry | None:
        """The content of a file, None where there is none.

        Raises:
            Rejected: There is one, but it must not be used.
        """
        path = self.folder / (name + _SUFFIX)
        try:
            _trust(self.folder, directory=True)
            descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0))
        except FileNotFoundError:
            return None
        except OSError as error:
            raise Rejected(f"{path}: {error.strerror or error}") from error
        with open(descriptor, "rb") as file:
            _trust_status(os.fstat(file.fileno()), path, directory=False)
            content = file.read()
        try:
            record, arrays, payload = _decode(content, name)
            program = None if not payload else _load_program(payload, record, device)
        except Rejected as error:
            raise Rejected(f"{path}: {error}") from error
        with contextlib.suppress(OSError):
            os.utime(path)  # its turn in the order of removal
        return Entry(record, arrays, program)

    def store(
        self, name: str, record: Mapping[str, Any], arrays: Iterable[np.ndarray], program: Any = None
    ) -> tuple[int, ...]:
        """Write a file, whole or not at all, and remove the least recently used ones above the limit.

        Returns:
            Sizes, in bytes, of the files that were removed.

        Raises:
            OSError: It could not be written.
            Rejected: The program could not be loaded again: its pickle names what `load` would refuse.
        """
        payload = b""
        if program is not None:
            payload, _, _ = serialize_executable.serialize(program)
            try:
                scan(payload)
            except PickleRefused as refused:
                raise Rejected(
                    f"this version of jax serializes programs in a way that is not known here: {refused}"
                ) from None
        content = _encode(record, list(arrays), payload, name)
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _trust(self.folder, directory=True)
        descriptor, temporary = tempfile.mkstemp(prefix=".write-", dir=self.folder)  # mode 0600
        try:
            with open(descriptor, "wb") as file:
                file.write(content)
            os.replace(temporary, self.folder / (name + _SUFFIX))
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
        return self._shrink(keep=name + _SUFFIX)

    def _shrink(self, *, keep: str) -> tuple[int, ...]:
        """Remove what is above the limit. Another process may do the same: a file that is gone is no error."""
        found = []
        for path in self.folder.iterdir():
            with contextlib.suppress(OSError):
                status = path.lstat()
                if path.name.endswith(_SUFFIX) and stat.S_ISREG(status.st_mode):
                    found.append((status.st_mtime_ns, status.st_size, path))
        total = sum(size for _, size, _ in found)
        removed = []
        for _, size, path in sorted(found, key=lambda item: item[0]):
            if total <= self.limit:
                break
            if path.name == keep:
                continue
            try:
                path.unlink()
            except FileNotFoundError:
                total -= size
            except OSError:
                continue
            else:
                total -= size
                removed.append(size)
        return tuple(removed)


def _trust(path: Path, *, directory: bool) -> None:
    _trust_status(path.lstat(), path, directory=directory)


def _trust_status(status: os.stat_result, path: Path, *, directory: bool) -> None:
    fits = stat.S_ISDIR(status.st_mode) if directory else stat.S_ISREG(status.st_mode)
    if not fits:
        raise Rejected(f"{path} is not a plain {'folder' if directory else 'file'}")
    if hasattr(os, "getuid"):
        if status.st_uid != os.getuid():
            raise Rejected(f"{path} belongs to another user")
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise Rejected(f"{path} is writable by others (mode {stat.S_IMODE(status.st_mode):04o}); chmod go-w it")


# --- the file's content -----------------------------------------------------------------------------------------------
#
# magic, sha256 of all that follows, then three parts, each with its length in 8 bytes: the record as JSON (with the
# dtypes and shapes of the arrays), the arrays' bytes one after the other, the program's pickle.


def _encode(record: Mapping[str, Any], arrays: list[np.ndarray], payload: bytes, name: str) -> bytes:
    kinds = [[onnx_name(array.dtype), list(array.shape)] for array in arrays]
    head = json.dumps({"name": name, "record": dict(record), "arrays": kinds}).encode()
    body = b"".join(np.ascontiguousarray(array).tobytes() for array in arrays)
    rest = b"".join(len(part).to_bytes(8, "little") + part for part in (head, body, payload))
    return _MAGIC + hashlib.sha256(rest).digest() + rest


def _decode(content: bytes, name: str) -> tuple[dict[str, Any], tuple[np.ndarray, ...], bytes]:
    start = len(_MAGIC) + 32
    if not content.startswith(_MAGIC):
        raise Rejected("it is of another version, or no segment file at all")
    rest = content[start:]
    if hashlib.sha256(rest).digest() != content[len(_MAGIC) : start]:
        raise Rejected("its content does not match its digest: it is damaged or cut short")
    parts = []
    at = 0
    try:
        for _ in range(3):
            length = int.from_bytes(rest[at : at + 8], "little")
            part = rest[at + 8 : at + 8 + length]
            if len(part) != length:
                raise ValueError("a part is shorter than it says")
            parts.append(part)
            at += 8 + length
        head = json.loads(parts[0])
        if head["name"] != name:
            raise ValueError("it was written under another name")
        arrays = []
        at = 0
        for kind, shape in head["arrays"]:
            dtype = parse_dtype(kind)
            size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
            array = np.frombuffer(parts[1][at : at + size], dtype).reshape(shape)
            array.flags.writeable = False
            arrays.append(array)
            at += size
        return dict(head["record"]), tuple(arrays), parts[2]
    except (ValueError, KeyError, TypeError) as error:
        raise Rejected(f"it is damaged: {error}") from error


def _load_program(payload: bytes, record: Mapping[str, Any], device: jax.Device) -> Any:
    try:
        scan(payload)
    except PickleRefused as error:
        raise Rejected(f"its program is refused: {error}") from None
    weights = (0,) * int(record["weight_count"])
    arguments = tuple(_tree(item) for item in record["argument_trees"])
    outputs = tuple(_tree(item) for item in record["output_trees"])
    alarm = 0 if record["alarms"] else None
    donated = ((0,) * len(record["donated"]),) if record["donated"] else ()
    try:
        return serialize_executable.deserialize_and_load(
            payload,
            jax.tree.structure(((weights, arguments, 0 if record["uses_seed"] else None, *donated), {})),
            jax.tree.structure((outputs, alarm)),
            backend=device.client,
            execution_devices=[device],
        )
    except Exception as error:  # native loading fails in as many ways as there are versions
        raise Rejected(f"its program can't be loaded: {error}") from error


def _tree(length: int | None) -> Any:
    return 0 if length is None else [0] * length


# --- names ------------------------------------------------------------------------------------------------------------


def graph_digest(graph: Graph) -> str:
    """Digest of a graph's nodes, types and the values of its weights, subgraphs included. Several threads read these."""
    sink = _Sink()
    _feed_graph(sink, graph)
    return sink.hexdigest()


class _Sink:
    """A digest of what is fed to it. Large arrays are cut into pieces, whose digests the threads of the end make."""

    PIECE = 512 << 10
    """Bytes that one thread digests at a time, some 0.3 ms."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()
        self._pieces: list[memoryview] = []

    def update(self, data: Any) -> None:
        if len(data) <= self.PIECE:
            self._digest.update(data)
        else:
            self._pieces += [data[start : start + self.PIECE] for start in range(0, len(data), self.PIECE)]

    def hexdigest(self) -> str:
        if self._pieces:
            with ThreadPoolExecutor(min(4, cores()), "transmuter-digest") as pool:
                for piece in pool.map(lambda piece: hashlib.sha256(piece).digest(), self._pieces):
                    self._digest.update(piece)
        return self._digest.hexdigest()


def _feed(sink: Any, *parts: Any) -> None:
    for part in parts:
        text = repr(part).encode()
        sink.update(len(text).to_bytes(8, "little"))
        sink.update(text)


def _feed_graph(sink: Any, graph: Graph) -> None:
    _feed(sink, "graph", graph.inputs, graph.outputs, sorted(graph.types.items()), len(graph.nodes))
    for name, array in graph.initializers.items():
        _feed(sink, name)
        _feed_array(sink, array)
    for node in graph.nodes:
        _feed_node(sink, node)


def _feed_node(sink: Any, node: Node) -> None:
    _feed(sink, node.domain, node.op_type, node.opset, node.name, node.path, node.inputs, node.outputs)
    for key in sorted(node.attributes):
        _feed(sink, key)
        _feed_attribute(sink, node.attributes[key])


def _feed_attribute(sink: Any, value: Any) -> None:
    if isinstance(value, Graph):
        _feed_graph(sink, value)
    elif isinstance(value, np.ndarray):
        _feed_array(sink, value)
    elif isinstance(value, SparseTensor):
        _feed_array(sink, value.values)
        _feed_array(sink, value.indices)
        _feed(sink, value.shape)
    elif isinstance(value, tuple):
        _feed(sink, "tuple", len(value))
        for item in value:
            _feed_attribute(sink, item)
    else:
        _feed(sink, type(value).__name__, value)


def _feed_array(sink: Any, array: np.ndarray) -> None:
    _feed(sink, array.shape, str(array.dtype))
    if array.dtype == object:
        _feed(sink, array.reshape(-1).tolist())
    else:
        sink.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


@functools.cache
def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return " ".join(sorted(line.partition(":")[2].split()))
    except OSError:
        pass
    return platform.processor()


def device_facts(device: jax.Device) -> tuple[str, ...]:
    """What of versions, device and machine decides a program."""
    versions = tuple(metadata.version(name) for name in ("jax", "jaxlib", "numpy", "ml_dtypes"))
    flags = tuple(os.environ.get(name, "") for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS"))
    kind = (device.platform, device.device_kind, str(device.id), platform.machine(), platform.python_version())
    parts = (str(pool_size()),) if device.platform == "cpu" else ()
    return (*versions, *flags, *kind, *parts, _processor())
