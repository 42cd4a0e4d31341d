"""What the Hub says about one commit of a repository: its files with sizes and content hashes.

Source: `GET /api/models/{repo}/revision/{revision}?blobs=true` and `GET /api/models/{repo}/tree/{commit}` of the Hub's API. Unknown
fields are ignored, unusable names leave only their file out, an unusable hash counts as none.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from transmuter_async.hub.errors import HubConsistencyError, InvalidReferenceError
from transmuter_async.hub.names import check_file, is_commit, normalize_etag

__all__ = ["FileInfo", "Listing", "parse_info", "parse_official_tree", "parse_saved", "parse_tree_page"]

_FORMAT = 1
_SIBLINGS_LIMIT = 50_000  # above, the Hub's first answer may be cut


@dataclass(frozen=True, slots=True)
class FileInfo:
    """One file of a commit.

    Attributes:
        size: Bytes of the content (also for LFS), None when the Hub does not say.
        etag: sha256 of the content (LFS, Xet), or sha1 of its git blob; None when the Hub does not say.
        lfs: Whether it is stored in LFS or Xet.
    """

    size: int | None = None
    etag: str | None = None
    lfs: bool = False


@dataclass(frozen=True, slots=True)
class Listing:
    """All files of one commit. It is complete: what is not in it does not exist.

    Attributes:
        repo: Repository, as asked for.
        commit: 40 hex digits.
        files: Path → facts, in the Hub's order.
        checked: False for what was found in a snapshot folder while offline: maybe not all, and without hashes.
    """

    repo: str
    commit: str
    files: Mapping[str, FileInfo] = field(default_factory=dict)
    checked: bool = True

    @property
    def needs_tree(self) -> bool:
        """Whether the tree request may know more: a hash or size is missing, or the list may be cut."""
        if len(self.files) > _SIBLINGS_LIMIT:
            return True
        return any(info.etag is None or info.size is None for info in self.files.values())

    def with_files(self, files: Mapping[str, FileInfo]) -> Listing:
        """The same commit, with what the tree request said about its files."""
        merged = {path: _richer(info, files.get(path)) for path, info in self.files.items()}
        return Listing(self.repo, self.commit, MappingProxyType({**files, **merged}))

    def dump(self, fetched_at: float) -> bytes:
        """JSON of our own record (HUB layout, `.transmuter/v1/info`)."""
        record = {
            "format": _FORMAT,
            "repo": self.repo,
            "commit": self.commit,
            "fetched_at": fetched_at,
            "files": {
                path: {"size": info.size, "etag": info.etag, "lfs": info.lfs} for path, info in self.files.items()
            },
        }
        return json.dumps(record).encode()


def parse_info(body: bytes, repo: str, *, pinned: str | None) -> Listing:
    """Reads the answer of the metadata request.

    Args:
        body: JSON.
        repo: Repository, as asked for.
        pinned: The commit that was asked for, None for a branch or tag.

    Raises:
        HubConsistencyError: It is not the Hub's JSON, or tells about another commit.
    """
    data = _load(body)
    commit = data.get("sha") if isinstance(data, dict) else None
    if not isinstance(data, dict) or not isinstance(commit, str) or not is_commit(commit):
        raise HubConsistencyError(
            f"The answer about {repo} is not the Hub's: it names no commit. A proxy or a login page may be in the way; check HF_ENDPOINT."
        )
    if pinned is not None and commit != pinned:
        raise HubConsistencyError(
            f"{repo}: commit {pinned} was asked for, and the Hub answered about {commit}. Nothing was kept."
        )
    files: dict[str, FileInfo] = {}
    siblings = data.get("siblings")
    for entry in siblings if isinstance(siblings, list) else ():
        if isinstance(entry, dict):
            _add(files, entry.get("rfilename"), entry.get("size"), entry.get("blobId"), entry.get("lfs"), "sha256")
    return Listing(repo, commit, MappingProxyType(files))


def parse_tree_page(body: bytes, repo: str) -> dict[str, FileInfo]:
    """Reads one page of the tree request.

    Raises:
        HubConsistencyError: It is not the Hub's JSON.
    """
    data = _load(body)
    if not isinstance(data, list):
        raise HubConsistencyError(f"The tree of {repo} is not the Hub's: a JSON array was expected.")
    files: dict[str, FileInfo] = {}
    for entry in data:
        if isinstance(entry, dict) and entry.get("type") == "file":
            _add(files, entry.get("path"), entry.get("size"), entry.get("oid"), entry.get("lfs"), "oid")
    return files


def parse_saved(body: bytes, repo: str, commit: str) -> Listing | None:
    """Reads our own record. Returns None when it is not usable: then it is as if there were none."""
    try:
        data = json.loads(body)
        if data["format"] != _FORMAT or data["commit"] != commit or data["repo"] != repo:
            return None
        files = {
            check_file(path): FileInfo(_size(item["size"]), normalize_etag(item["etag"]), item["lfs"] is True)
            for path, item in data["files"].items()
        }
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return Listing(repo, commit, MappingProxyType(files))


def parse_official_tree(body: bytes, repo: str, commit: str) -> Listing | None:
    """Reads `trees/{commit}.json` of huggingface_hub (format version 1). Returns None when it is not usable."""
    try:
        data = json.loads(body)
        if data["format_version"] != 1:
            return None
        files: dict[str, FileInfo] = {}
        for path, item in data["files"].items():
            sha256 = item.get("lfs_sha256")
            lfs = {"oid": sha256, "size": item.get("lfs_size")} if sha256 is not None else None
            _add(files, path, item.get("size"), item.get("blob_id"), lfs, "oid")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return Listing(repo, commit, MappingProxyType(files))


def _load(body: bytes) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return None


def _add(files: dict[str, FileInfo], path: object, size: object, blob: object, lfs: object, sha256_key: str) -> None:
    if not isinstance(path, str):
        return
    try:
        check_file(path)
    except InvalidReferenceError:
        return  # one bad name leaves out that file, not the repository; asking for it is refused by its name
    if isinstance(lfs, Mapping):
        etag = normalize_etag(lfs.get(sha256_key))
        # blobId of an LFS file is the hash of its pointer text: never the hash of the file.
        files[path] = FileInfo(
            _size(size) if _size(size) is not None else _size(lfs.get("size")), _of_length(etag, 64), True
        )
    else:
        files[path] = FileInfo(_size(size), _of_length(normalize_etag(blob), 40), False)


def _of_length(etag: str | None, length: int) -> str | None:
    return etag if etag is not None and len(etag) == length else None


def _size(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _richer(info: FileInfo, other: FileInfo | None) -> FileInfo:
    if other is None or info.etag is not None:
        return info
    return other if other.etag is not None or info.size is None else info
