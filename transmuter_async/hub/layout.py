"""Where things lie in the cache: the official layout, shared with every other tool on the machine, plus a folder of ours per repository.

    <cache>/CACHEDIR.TAG
    <cache>/.locks/models--org--name/<etag>.lock
    <cache>/models--org--name/blobs/<etag>                     content, or a link into a store that tools share (we only read that)
                             /refs/<revision>                  commit, without a newline
                             /snapshots/<commit>/<path>        relative link to blobs/<etag>, or a regular file
                             /.no_exist/<commit>/<path>        of other tools; read only
                             /trees/<commit>.json              of other tools; read only
                             /.transmuter/v1/info/<commit>.json              what the Hub said about the commit
                                            /heads/<revision>                commit, as we last saw it
                                            /blobs/<etag>.json               we have hashed this blob, and it was right
                                            /etags/<commit>/<path>.json      the same for a regular file of a snapshot

Pure path arithmetic; names are checked before they come here.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from transmuter_async.hub.names import repo_folder

__all__ = ["RepoFolder"]


_LONGEST_NAME = 200  # bytes; with what is put around it, below the 255 of every common file system


@dataclass(frozen=True, slots=True)
class RepoFolder:
    """The folder of one repository.

    Attributes:
        cache: Root of the cache.
        repo: `namespace/name`.
    """

    cache: Path
    repo: str

    @property
    def root(self) -> Path:
        """`models--org--name`."""
        return self.cache / repo_folder(self.repo)

    @property
    def blobs(self) -> Path:
        """Folder of contents, named by hash."""
        return self.root / "blobs"

    @property
    def snapshots(self) -> Path:
        """Folder of commits."""
        return self.root / "snapshots"

    @property
    def records(self) -> Path:
        """Our own folder."""
        return self.root / ".transmuter" / "v1"

    def blob(self, etag: str) -> Path:
        """A content."""
        return self.blobs / etag

    def pointer(self, commit: str, file: str) -> Path:
        """A file of a commit."""
        return self.snapshots / commit / Path(*file.split("/"))

    def ref(self, revision: str) -> Path:
        """The commit of a branch or tag, as any tool last saw it."""
        return self.root / "refs" / Path(*revision.split("/"))

    def head(self, revision: str) -> Path:
        """The commit of a branch or tag, as we last saw it."""
        return self.records / "heads" / _one_name(revision)

    def info(self, commit: str) -> Path:
        """What the Hub said about a commit."""
        return self.records / "info" / f"{commit}.json"

    def tree(self, commit: str) -> Path:
        """What the official client keeps about a commit."""
        return self.root / "trees" / f"{commit}.json"

    def blob_record(self, etag: str) -> Path:
        """Our record that a blob was hashed."""
        return self.records / "blobs" / f"{etag}.json"

    def file_record(self, commit: str, file: str) -> Path:
        """Our record that a regular file of a snapshot was hashed."""
        return self.records / "etags" / commit / f"{_one_name(file)}.json"

    def no_exist(self, commit: str, file: str) -> Path:
        """Another tool's note that a commit has no such file."""
        return self.root / ".no_exist" / commit / Path(*file.split("/"))

    def lock(self, name: str) -> Path:
        """The lock of one content."""
        return self.cache / ".locks" / repo_folder(self.repo) / f"{name}.lock"

    def link_target(self, pointer: Path, etag: str) -> str:
        """Target of the relative link from a snapshot to a blob."""
        return os.path.relpath(self.blob(etag), pointer.parent)


def _one_name(path: str) -> str:
    """A path as the name of one file: quoted, or its hash where that is too long."""
    name = quote(path, safe="")
    return name if len(name) <= _LONGEST_NAME else hashlib.sha256(path.encode()).hexdigest()
