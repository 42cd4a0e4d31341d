"""What an answer of the Hub means: which error, whether to try again, how long to wait, which facts its headers state.

Pure functions on status and headers; nothing here waits or reads.
"""

from __future__ import annotations

import email.utils
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from transmuter_async.hub.errors import (
    DisabledRepoError,
    EntryNotFoundError,
    GatedRepoError,
    HubAuthError,
    HubConsistencyError,
    HubError,
    HubHTTPError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from transmuter_async.hub.listing import FileInfo
from transmuter_async.hub.names import is_commit, normalize_etag

__all__ = [
    "Asked",
    "Facts",
    "content_start",
    "error_of",
    "hub_warnings",
    "next_page",
    "read_facts",
    "server_wait",
    "without_token",
]

_SHORTEST_TOKEN = 8
LONGEST_WAIT = 301.0  # the Hub's rate limits are per 300 s
_RETRYABLE = frozenset({408, 429, 500, 502, 503, 504})
_REQUEST_IDS = ("X-Request-Id", "X-Amzn-Trace-Id", "X-Amz-Cf-Id")
_DISABLED = "Access to this resource is disabled."
_REFUSED = "Invalid credentials in Authorization header"
# No more digits than a number of bytes or seconds can have: Python refuses to read thousands of them.
_RATE_LIMIT = re.compile(r"""(?:^|;)\s*t\s*=\s*([0-9]{1,18})""")
_REMAINING = re.compile(r"""(?:^|;)\s*r\s*=\s*([0-9]{1,18})""")
_NEXT_LINK = re.compile(r"""<([^>]+)>\s*;[^,]*\brel="?next"?""")
_CONTENT_RANGE = re.compile(r"bytes ([0-9]{1,18})-([0-9]{1,18})/([0-9]{1,18}|\*)")
_NUMBER = re.compile(r"[0-9]{1,18}")


@dataclass(frozen=True, slots=True)
class Asked:
    """What a request was for, for the text of its error."""

    endpoint: str
    repo: str
    revision: str
    file: str | None = None
    token: str | None = field(default=None, repr=False)  # to keep it out of what the server says

    def __str__(self) -> str:
        return f"{self.repo}@{self.revision}" + ("" if self.file is None else f"/{self.file}")


@dataclass(frozen=True, slots=True)
class Facts:
    """What the headers of an answer of the Hub's own origin state about a file. None: not stated."""

    commit: str | None = None
    etag: str | None = None
    size: int | None = None

    def check(self, asked: Asked, commit: str, info: FileInfo) -> None:
        """Compares with the metadata.

        Raises:
            HubConsistencyError: Something stated differs from the metadata.
        """
        for what, stated, known in (
            ("commit", self.commit, commit),
            ("ETag", self.etag, info.etag),
            ("size", self.size, info.size),
        ):
            if stated is not None and known is not None and stated != known:
                raise HubConsistencyError(
                    f"{asked}: the Hub's answer states the {what} {stated}, its metadata {known}. Nothing was kept; "
                    "try again, and check for a proxy that rewrites answers."
                )


def read_facts(status: int, headers: Mapping[str, str]) -> Facts:
    """Facts in an answer of the Hub's own origin. A redirect's own ETag and length are those of the redirect."""
    final = status in (200, 206)
    commit = headers.get("X-Repo-Commit", "")
    etag = headers.get("X-Linked-ETag") or (headers.get("ETag") if final else None)
    size = headers.get("X-Linked-Size")
    if size is None and status == 200 and headers.get("Content-Encoding", "identity").lower() == "identity":
        size = headers.get("Content-Length")
    return Facts(
        commit if is_commit(commit) else None,
        normalize_etag(etag),
        int(size) if size is not None and _NUMBER.fullmatch(size) else None,
    )


def content_start(status: int, headers: Mapping[str, str], wanted: int, size: int | None) -> int | None:
    """The position in the file at which the body of an answer starts.

    Args:
        status: 200 or 206.
        headers: Headers of the answer.
        wanted: Start of the range that was asked for, 0 for the whole file.
        size: Size of the file by the metadata, if known.

    Returns:
        `wanted`, or 0 when the server ignored the range; None when the body is of no use: a coded part, or another range.
    """
    coded = headers.get("Content-Encoding", "identity").lower() not in ("identity", "")
    if status == 200:
        return None if coded and wanted else 0
    if coded:
        return None
    found = _CONTENT_RANGE.fullmatch(headers.get("Content-Range", "").strip())
    if found is None or int(found[1]) != wanted or found[3] == "*" or (size is not None and int(found[3]) != size):
        return None
    return wanted


def server_wait(status: int, headers: Mapping[str, str], now: float) -> float | None:
    """Seconds that the server asks us to wait, plus one; None when it does not say.

    Args:
        status: Status of the answer.
        headers: Headers of the answer.
        now: Seconds since the epoch, for a `Retry-After` that is a date.
    """
    seconds: float | None = None
    limit = headers.get("RateLimit", "")
    reset, remaining = _RATE_LIMIT.search(limit), _REMAINING.search(limit)
    if status == 429 and reset is not None and (remaining is None or int(remaining[1]) == 0):
        seconds = float(reset[1])
    elif status in _RETRYABLE:
        text = headers.get("Retry-After", "").strip()
        if _NUMBER.fullmatch(text):
            seconds = float(text)
        elif text:
            try:
                seconds = email.utils.parsedate_to_datetime(text).timestamp() - now
            except (ValueError, OverflowError):
                seconds = None
    return None if seconds is None else min(max(seconds, 0.0) + 1.0, LONGEST_WAIT)


def next_page(headers: Mapping[str, str]) -> str | None:
    """URL of the next page of a list, from the `Link` header."""
    found = _NEXT_LINK.search(headers.get("Link", ""))
    return found[1] if found else None


def error_of(
    status: int, headers: Mapping[str, str], body: bytes, asked: Asked, *, from_hub: bool, now: float
) -> HubError:
    """The error that an answer means: by `X-Error-Code`, then by status.

    Args:
        status: A status that is not a success.
        headers: Headers of the answer.
        body: The beginning of its body.
        asked: What the request was for.
        from_hub: Whether the Hub's own origin answered, not a CDN.
        now: Seconds since the epoch.
    """
    code = headers.get("X-Error-Code", "")
    message = headers.get("X-Error-Message", "")
    said = _server_text(headers, body, asked.token)
    if not from_hub:
        return HubHTTPError(
            f"{asked}: the storage behind the Hub answered {status}.{said}",
            status=status,
            retryable=status in _RETRYABLE,
            wait=server_wait(status, headers, now),
            expired=status == 403,
        )
    page = f"{asked.endpoint}/{asked.repo}"
    if code == "RevisionNotFound":
        return RevisionNotFoundError(
            f"{asked.repo} has no revision {asked.revision!r}: see {page}/tree/main.{said}", status=status
        )
    if code == "EntryNotFound":
        return EntryNotFoundError(
            f"{asked.repo}@{asked.revision} has no file {asked.file!r}: see {page}/tree/main.{said}",
            repo=asked.repo,
            file=asked.file or "",
        )
    if code == "GatedRepo":
        how = "and pass a token" if asked.token is None else "with a token that has access"
        return GatedRepoError(f"{asked.repo} is gated: request access at {page} {how}.{said}", status=status)
    if message == _DISABLED:
        return DisabledRepoError(
            f"{asked.repo} has been disabled by the Hub: {page} may tell why.{said}", status=status
        )
    if status == 401 and code != "RepoNotFound" and _REFUSED in (message or said):
        return HubAuthError(
            f"The Hub refuses the token (asking for {asked}): it is wrong or has expired. Renew it.{said}",
            status=status,
        )
    if code == "RepoNotFound" or (status == 401 and not code):
        what = "the token gives no access to it" if asked.token is not None else "it needs a token (HF_TOKEN or token=)"
        return RepositoryNotFoundError(
            f"{asked.repo} does not exist on {asked.endpoint}, or is private and {what}.{said}", status=status
        )
    return HubHTTPError(
        f"{asked}: the Hub answered {status}.{said}",
        status=status,
        retryable=status in _RETRYABLE,
        wait=server_wait(status, headers, now),
    )


def without_token(text: str, token: str | None) -> str:
    """A text of a server, which may say the token back. What is shorter than any real token is no secret, and may be in any word."""
    return text if token is None or len(token) < _SHORTEST_TOKEN else text.replace(token, "***")


def hub_warnings(headers: Mapping[str, str], token: str | None = None) -> tuple[str, str] | None:
    """`(topic, text)` of the `X-HF-Warning` header, without the token."""
    text = without_token(headers.get("X-HF-Warning", "").strip(), token)
    if not text:
        return None
    topic, semicolon, rest = text.partition(";")
    return (topic.strip(), _printable(rest.strip())) if semicolon else ("", _printable(text))


def _server_text(headers: Mapping[str, str], body: bytes, token: str | None) -> str:
    said = without_token(headers.get("X-Error-Message") or _body_text(body), token)
    identity = next((f"{name}: {headers[name]}" for name in _REQUEST_IDS if name in headers), "")
    identity = without_token(identity, token)
    parts = ([f'It says: "{_printable(said)}".'] if said else []) + ([f"({_printable(identity)})"] if identity else [])
    return "" if not parts else " " + " ".join(parts)


def _body_text(body: bytes) -> str:
    """`error` or `errors[].message` of a JSON body; nothing of an HTML page."""
    try:
        data = json.loads(body)
    except (ValueError, RecursionError):
        return ""
    if not isinstance(data, dict):
        return ""
    if isinstance(data.get("error"), str):
        return str(data["error"])
    errors = data.get("errors")
    items = errors if isinstance(errors, list) else []
    return "; ".join(str(item["message"]) for item in items if isinstance(item, dict) and "message" in item)


def _printable(text: str) -> str:
    return "".join(character if character.isprintable() else " " for character in text)[:500]
