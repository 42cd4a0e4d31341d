"""The file cache of one repository on the disk: what is there, what we know about it, and how something gets in.

Everything here blocks and runs in a worker thread. Nothing asks the network, and nothing decides: `files.py` does.

"We know" means a record of ours: this content was hashed, when it had this size and this date. The name of a blob is only a claim, whoever
wrote it; a claim becomes a record by hashing.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import shutil
import stat
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from transmuter_async.hub.content import hash_file
from transmuter_async.hub.errors import CacheError, InvalidReferenceError
from transmuter_async.hub.layout import RepoFolder
from transmuter_async.hub.names import check_file, is_commit, is_etag, normalize_etag
from transmuter_async.hub.partial import DEAD_AFTER, replace
from transmuter_async.hub.workers import Stop

__all__ = ["Look", "RepoDisk"]

_TEMPORARY = ".tmp"
_TAG = b"Signature: 8a477f597d28d172789f06886806bc55\n# This directory is a cache of files from the Hugging Face Hub.\n"
_logger = logging.getLogger("transmuter_async.hub")


@dataclass(frozen=True, slots=True)
class Look:
    """What lies at one place of the cache.

    Attributes:
        size: Bytes of the content; None when there is nothing usable (absent, dangling link, directory).
        recorded: Hash of the content by a record of ours that still fits, else None.
        named: Hash that the name of the linked blob claims, else None.
    """

    size: int | None = None
    recorded: str | None = None
    named: str | None = None

    def __bool__(self) -> bool:
        return self.size is not None


class RepoDisk:
    """The cache of one repository, as it lies on the disk.

    Attributes:
        folder: Where everything lies.
    """

    def __init__(self, folder: RepoFolder, *, symlinks: bool = True) -> None:
        self.folder = folder
        self._links_work: bool | None = None if symlinks else False

    # -- what is there --------------------------------------------------------------------------------------------

    def look(self, commit: str, file: str) -> Look:
        """What lies at a file of a snapshot.

        Raises:
            CacheError: A folder on the way there leads out of the repository's folder.
        """
        pointer = self.folder.pointer(commit, file)
        try:
            link = pointer.lstat()
            status = pointer.stat()
        except (OSError, ValueError):
            return Look()
        self._check_contained(pointer.parent)
        if not stat.S_ISREG(status.st_mode):
            return Look()
        if stat.S_ISLNK(link.st_mode):
            # Only the first hop counts: a blob may be a link itself, into a store that tools share, under a name of another kind.
            target = Path(os.path.normpath(pointer.parent / pointer.readlink()))
            if target.parent == Path(os.path.normpath(self.folder.blobs)) and is_etag(target.name):
                return Look(status.st_size, self._blob_recorded(target.name, status), target.name)
        recorded = self._recorded(self.folder.file_record(commit, file), status)
        return Look(status.st_size, recorded)

    def look_at_blob(self, etag: str) -> Look:
        """What lies at a blob."""
        try:
            status = self.folder.blob(etag).stat()
        except OSError:
            return Look()
        if not stat.S_ISREG(status.st_mode):
            return Look()
        return Look(status.st_size, self._blob_recorded(etag, status), etag)

    def verify_pointer(self, commit: str, file: str, etag: str, stop: Stop) -> bool:
        """Hashes a file of a snapshot; when it is right, records it."""
        pointer = self.folder.pointer(commit, file)
        status = self._hashed(pointer, etag, stop)
        if status is None:
            return False
        if self.look(commit, file).named == etag:
            self._record(self.folder.blob_record(etag), status, {})
        else:
            self._record(self.folder.file_record(commit, file), status, {"etag": etag, "file": file})
        return True

    def verify_blob(self, etag: str, stop: Stop) -> bool:
        """Hashes a blob; when it is right, records it."""
        status = self._hashed(self.folder.blob(etag), etag, stop)
        if status is None:
            return False
        self._record(self.folder.blob_record(etag), status, {})
        return True

    def verify_file(self, path: Path, etag: str, stop: Stop) -> bool:
        """Hashes a file of another commit; nothing is recorded."""
        return self._hashed(path, etag, stop) is not None

    def find_elsewhere(self, etag: str, size: int | None, commit: str) -> Path | None:
        """A regular file of another commit that our records say has this hash (caches without links)."""
        etags = self.folder.records / "etags"
        for path in etags.glob("*/*.json"):
            data = _load(path)
            if (
                path.parent.name == commit
                or data is None
                or data.get("etag") != etag
                or not is_commit(path.parent.name)
            ):
                continue
            with contextlib.suppress(OSError, InvalidReferenceError):
                found = self.folder.pointer(path.parent.name, check_file(str(data.get("file", unquote(path.stem)))))
                status = found.stat()
                if self._recorded(path, status) == etag and size in (None, status.st_size):
                    return found
        return None

    # -- how something gets in ------------------------------------------------------------------------------------

    def prepare_download(self, commit: str, file: str) -> None:
        """Makes the folders, and clears away what a killed process has left among our records.

        Raises:
            CacheError: They can't be made, or lead out of the repository's folder.
        """
        try:
            self._prepare()
            for left in self.folder.records.glob(f"*{_TEMPORARY}"):
                with contextlib.suppress(OSError):
                    if time.time() - left.lstat().st_mtime > DEAD_AFTER:
                        left.unlink()
            self._make_folder(self.folder.blobs)
            self._make_folder(self.folder.pointer(commit, file).parent)
        except OSError as error:
            raise _refused(self.folder, error) from error

    def link(self, commit: str, file: str, etag: str) -> None:
        """Points a file of a snapshot to a blob that is there (without links: copies it), replacing what is there at once.

        Raises:
            CacheError: The cache can't be written.
        """
        self._place(commit, file, etag, self.folder.blob(etag), move=False)

    def adopt(self, commit: str, file: str, etag: str, source: Path) -> None:
        """The same from a regular file of another commit."""
        self._place(commit, file, etag, source, move=False)

    def settle(self, commit: str, file: str, etag: str) -> None:
        """Records a blob that was hashed while it came in, and points the file of the snapshot to it (without links: moves it there)."""
        blob = self.folder.blob(etag)
        self._record(self.folder.blob_record(etag), blob.stat(), {})
        self._place(commit, file, etag, blob, move=True)

    def _place(self, commit: str, file: str, etag: str, source: Path, *, move: bool) -> None:
        pointer = self.folder.pointer(commit, file)
        temporary = self._temporary()
        try:
            self._prepare()
            self._make_folder(pointer.parent)
            if self._can_link() and source == self.folder.blob(etag):
                temporary.symlink_to(self.folder.link_target(pointer, etag))
                replace(temporary, pointer)
                return
            if move:
                replace(source, pointer)
                self.folder.blob_record(etag).unlink(missing_ok=True)
            else:
                _clone(source, temporary)
                replace(temporary, pointer)
            self._record(self.folder.file_record(commit, file), pointer.stat(), {"etag": etag, "file": file})
        except FileNotFoundError:
            raise  # another writer, where locks do nothing, has moved it: the caller tries again
        except OSError as error:
            raise _refused(self.folder, error) from error
        finally:
            # Also after a rename that worked: between two hard links of one file it does nothing and leaves both.
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)

    def _can_link(self) -> bool:
        if self._links_work is None:
            probe = self._temporary()
            try:
                probe.symlink_to("nowhere")
                probe.unlink()
            except (OSError, NotImplementedError):
                self._links_work = False
            else:
                self._links_work = True
        return self._links_work

    def _prepare(self) -> None:
        self.folder.cache.mkdir(parents=True, exist_ok=True)
        tag = self.folder.cache / "CACHEDIR.TAG"
        with contextlib.suppress(FileExistsError), tag.open("xb") as file:
            file.write(_TAG)
        self.folder.records.mkdir(parents=True, exist_ok=True)

    def _make_folder(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)
        self._check_contained(path)

    def _check_contained(self, path: Path) -> None:
        if not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(self.folder.root)):
            raise CacheError(f"{path} leads out of {self.folder.root}: something has put a link there. Remove it.")

    def _temporary(self) -> Path:
        # Not in a snapshot: what a crash leaves there would look like a file of the repository.
        return self.folder.records / f"{secrets.token_hex(8)}{_TEMPORARY}"

    # -- records --------------------------------------------------------------------------------------------------

    def _commit_at(self, path: Path) -> str | None:
        try:
            return path.read_text(encoding="ascii", errors="replace")
        except OSError:
            return None

    def _write(self, path: Path, body: bytes) -> None:
        self._make_folder(path.parent)
        temporary = self._temporary()
        try:
            temporary.write_bytes(body)
            replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise

    def _blob_recorded(self, etag: str, status: os.stat_result) -> str | None:
        data = _load(self.folder.blob_record(etag))
        return etag if data is not None and _fits(data, status) else None

    def _recorded(self, path: Path, status: os.stat_result) -> str | None:
        data = _load(path)
        return normalize_etag(data.get("etag")) if data is not None and _fits(data, status) else None

    def _record(self, path: Path, status: os.stat_result, more: dict[str, object]) -> None:
        record = {**more, "size": status.st_size, "mtime_ns": status.st_mtime_ns, "verified_at": time.time()}
        try:
            self.folder.records.mkdir(parents=True, exist_ok=True)
            self._write(path, json.dumps(record).encode())
        except (OSError, CacheError) as error:
            _logger.debug("no record of %s (%s): it will be hashed again next time", path.name, error)

    def _hashed(self, path: Path, etag: str, stop: Stop) -> os.stat_result | None:
        """The status of a file that has the hash, and did not change while it was read."""
        try:
            before = path.stat()
            right = hash_file(path, etag, stop) == etag
            after = path.stat()
        except OSError:
            return None
        same = (before.st_size, before.st_mtime_ns) == (after.st_size, after.st_mtime_ns)
        return after if right and same else None


def _fits(data: dict[str, Any], status: os.stat_result) -> bool:
    return data.get("size") == status.st_size and data.get("mtime_ns") == status.st_mtime_ns


def _load(path: Path) -> dict[str, Any] | None:
    try:
        data = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) else None


def _clone(source: Path, destination: Path) -> None:
    """A hard link where the file system has them, else a copy."""
    try:
        os.link(os.path.realpath(source), destination)
    except OSError:
        shutil.copyfile(source, destination)


def _refused(folder: RepoFolder, error: OSError) -> CacheError:
    return CacheError(f"{folder.root} can't be written ({error.strerror}). Check its permissions, or set HF_HUB_CACHE.")
