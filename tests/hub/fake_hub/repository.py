"""Repositories of the fake Hub: commits, branches, and what the API tells about them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from tests.hub.fake_hub.content import Content, Lfs, Stored, store


class FakeRepo:
    """A model repository.

    Attributes:
        branches: Branch or tag → commit.
        commits: Commit → path → file.
        blobs: Whether `?blobs=true` is honoured; mirrors ignore it.
        masked: Hashes are told as `****`.
        tree: Whether there is a tree request; mirrors have none.
        page: Entries per page of the tree.
        sha: Told instead of the commit.
        direct: Ordinary files are answered with 200 at once, not by a redirect to the resolve cache.
        linked_headers: Whether the redirect of an ordinary file states its ETag and size.
        extra_names: Put into the listing besides the files.
        renamed_to: The repository's new name.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.branches: dict[str, str] = {}
        self.commits: dict[str, dict[str, Stored]] = {}
        self.blobs = True
        self.masked = False
        self.tree = True
        self.page = 1000
        self.sha: str | None = None
        self.direct = False
        self.linked_headers = False
        self.extra_names: list[str] = []
        self.renamed_to: str | None = None

    def commit(self, files: Mapping[str, bytes | Content | Lfs], branch: str | None = "main") -> str:
        """Makes a commit of exactly these files."""
        stored = {path: store(value) for path, value in files.items()}
        text = repr((self.name, len(self.commits), [(path, file.etag) for path, file in stored.items()]))
        commit = hashlib.sha1(text.encode()).hexdigest()
        self.commits[commit] = stored
        if branch is not None:
            self.branches[branch] = commit
        return commit

    def resolve(self, revision: str) -> str | None:
        """Commit of a revision; a unique beginning of a hash will do, in any case."""
        if revision in self.branches:
            return self.branches[revision]
        found = [commit for commit in self.commits if len(revision) >= 7 and commit.startswith(revision.lower())]
        return found[0] if len(found) == 1 else None

    def info(self, commit: str, *, blobs: bool) -> dict[str, Any]:
        """Answer of the metadata request."""
        siblings: list[dict[str, Any]] = [{"rfilename": name} for name in self.extra_names]
        for path, file in self.commits[commit].items():
            sibling: dict[str, Any] = {"rfilename": path}
            if blobs and self.blobs:
                sibling |= {"size": file.content.size, "blobId": self._told(file.blob_id)}
                if file.lfs:
                    lfs = {"sha256": self._told(file.etag), "size": file.content.size, "pointerSize": len(file.pointer)}
                    sibling["lfs"] = lfs
            siblings.append(sibling)
        return {
            "_id": "0" * 24,
            "id": self.name,
            "modelId": self.name,
            "sha": commit if self.sha is None else self.sha,
            "private": False,
            "gated": False,
            "disabled": False,
            "tags": [],
            "downloads": 0,
            "siblings": siblings,
        }

    def entries(self, commit: str) -> list[dict[str, Any]]:
        """Answer of the tree request, all pages."""
        found: list[dict[str, Any]] = []
        folders: set[str] = set()
        for path, file in self.commits[commit].items():
            parts = path.split("/")
            for depth in range(1, len(parts)):
                folder = "/".join(parts[:depth])
                if folder not in folders:
                    folders.add(folder)
                    found.append({"type": "directory", "oid": "0" * 40, "size": 0, "path": folder})
            entry: dict[str, Any] = {
                "type": "file",
                "oid": self._told(file.blob_id),
                "size": file.content.size,
                "path": path,
            }
            if file.lfs:
                entry["lfs"] = {
                    "oid": self._told(file.etag),
                    "size": file.content.size,
                    "pointerSize": len(file.pointer),
                }
            if file.xet:
                entry["xetHash"] = self._told(xet_hash(file))
            found.append(entry)
        return found

    def _told(self, value: str) -> str:
        return "*" * len(value) if self.masked else value


def xet_hash(file: Stored) -> str:
    """A hash of another kind: never equal to the file's own."""
    return hashlib.sha256(b"xet" + file.content.sha256.encode()).hexdigest()
