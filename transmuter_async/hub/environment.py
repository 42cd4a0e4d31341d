"""The environment variables that the Hugging Face tools share, read when a client is made and never again."""

from __future__ import annotations

import logging
import os
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from transmuter_async.hub.errors import InvalidReferenceError

__all__ = ["DEFAULT_ENDPOINT", "Environment", "TokenArgument"]

DEFAULT_ENDPOINT = "https://huggingface.co"
TokenArgument = str | bool | None

_DEFAULT_TIMEOUT = 10.0
_TRUE = frozenset({"1", "ON", "YES", "TRUE"})
_logger = logging.getLogger("transmuter_async.hub")


@dataclass(frozen=True, slots=True)
class Environment:
    """Everything about the outside that decides what a client does.

    Attributes:
        cache: Root of the file cache.
        endpoint: Base URL of the Hub, without a trailing slash.
        offline: Never open a socket.
        token: The user's token, None when there is none or it must not be sent unasked. Never shown.
        metadata_timeout: Seconds without a byte after which a metadata request has failed.
        download_timeout: The same for a file.
        symlinks: False forces copies instead of links in the cache.
        user_agent: What we call ourselves.
        proxies: Proxy URL by scheme, and under `"no"` the hosts without one. Never shown (may hold a password).
    """

    cache: Path
    endpoint: str = DEFAULT_ENDPOINT
    offline: bool = False
    token: str | None = field(default=None, repr=False)
    metadata_timeout: float = _DEFAULT_TIMEOUT
    download_timeout: float = _DEFAULT_TIMEOUT
    symlinks: bool = True
    user_agent: str = "transmuter_async"
    proxies: Mapping[str, str] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        problem = _endpoint_problem(self.endpoint)
        if problem is not None:
            # Without its text: a password may be in it.
            raise InvalidReferenceError(f"HF_ENDPOINT must be a URL like 'https://huggingface.co': {problem}.")

    @classmethod
    def read(cls, variables: Mapping[str, str] | None = None, *, version: str = "0") -> Environment:
        """Reads the variables (and the token file).

        Args:
            variables: Where to read, `os.environ` by default.
            version: Version of this library, for the `User-Agent`.

        Raises:
            InvalidReferenceError: `HF_ENDPOINT` is not a URL.
        """
        env = os.environ if variables is None else variables
        home = _path(env.get("HF_HOME") or f"{env.get('XDG_CACHE_HOME') or '~/.cache'}/huggingface")
        cache = env.get("HF_HUB_CACHE") or env.get("HUGGINGFACE_HUB_CACHE")
        return cls(
            cache=_path(cache) if cache else home / "hub",
            endpoint=(env.get("HF_ENDPOINT") or DEFAULT_ENDPOINT).rstrip("/"),
            offline=_true(env.get("HF_HUB_OFFLINE") or env.get("TRANSFORMERS_OFFLINE")),
            token=None if _true(env.get("HF_HUB_DISABLE_IMPLICIT_TOKEN")) else _token(env, home),
            metadata_timeout=_seconds(env, "HF_HUB_ETAG_TIMEOUT"),
            download_timeout=_seconds(env, "HF_HUB_DOWNLOAD_TIMEOUT"),
            symlinks=not _true(env.get("HF_HUB_DISABLE_SYMLINKS")),
            user_agent=_user_agent(env, version),
            proxies=_proxies(env),
        )

    def choose_token(self, argument: TokenArgument) -> str | None:
        """The token to send, by the caller's `token=`: a text is used, False is none, True insists, None takes the user's.

        Raises:
            InvalidReferenceError: `token=True` and the user has none, or the text can't be sent in a header.
        """
        if argument is None:
            return self.token
        if argument is False:
            return None
        if argument is True:
            if self.token is None:
                raise InvalidReferenceError(
                    "token=True, but there is no token. Set HF_TOKEN, log in with the `hf` tool, or pass it."
                )
            return self.token
        token = argument.strip()
        if not token or not token.isascii() or not token.isprintable():
            raise InvalidReferenceError(
                "The text given as token= can't be a token: it is empty or holds control or non-ASCII characters."
            )
        return token


def _endpoint_problem(endpoint: str) -> str | None:
    try:
        parts = urlsplit(endpoint)
        port = parts.port
    except ValueError:
        return "its host or port can't be read"
    if parts.scheme not in ("http", "https") or not parts.hostname:
        return "it has no http(s) scheme or no host"
    if port == 0 or any(character <= " " or not character.isprintable() for character in endpoint):
        return "it has the port 0, or a space or control character in it"
    if "@" in parts.netloc:
        return "a user and password in it would be shown in errors; set HF_TOKEN instead"
    if parts.query or parts.fragment:
        return "it has a '?' or '#' part, and paths are put behind it"
    return None


def _path(text: str) -> Path:
    # Not Path.expanduser, which raises where nobody knows a home folder, also when it is not needed.
    return Path(os.path.expanduser(os.path.expandvars(text))).absolute()


def _true(text: str | None) -> bool:
    return text is not None and text.upper() in _TRUE


def _token(env: Mapping[str, str], home: Path) -> str | None:
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        token = _clean(env.get(name, ""))
        if token is not None:
            return _sendable(token, name)
    path = _path(env["HF_TOKEN_PATH"]) if env.get("HF_TOKEN_PATH") else home / "token"
    try:
        token = _clean(path.read_text(encoding="utf-8"))
        return None if token is None else _sendable(token, f"the token file {path}")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeError) as error:
        _logger.warning("the token file %s can't be read (%s): going on without a token", path, type(error).__name__)
        return None


def _clean(text: str) -> str | None:
    return text.replace("\r", "").replace("\n", "").strip() or None


def _sendable(token: str, where: str) -> str | None:
    if token.isascii() and token.isprintable():
        return token
    _logger.warning("%s holds control or non-ASCII characters, so no token: going on without one", where)
    return None


def _seconds(env: Mapping[str, str], name: str) -> float:
    text = env.get(name, "")
    if not text:
        return _DEFAULT_TIMEOUT
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        _logger.warning("%s=%r is not a number of seconds: using %g", name, text, _DEFAULT_TIMEOUT)
        return _DEFAULT_TIMEOUT
    return seconds or _DEFAULT_TIMEOUT


def _user_agent(env: Mapping[str, str], version: str) -> str:
    import platform

    agent = f"transmuter_async/{version}; python/{platform.python_version()}"
    if any(_true(env.get(name)) for name in ("HF_HUB_DISABLE_TELEMETRY", "DISABLE_TELEMETRY", "DO_NOT_TRACK")):
        return agent
    origin = "".join(character for character in env.get("HF_HUB_USER_AGENT_ORIGIN", "") if " " <= character <= "~")
    return f"{agent}; origin/{origin}" if origin else agent


def _proxies(env: Mapping[str, str]) -> dict[str, str]:
    """Proxies by scheme, as curl and the standard library read them: lower case wins over upper case."""
    found: dict[str, str] = {}
    for scheme in ("http", "https", "all", "no"):
        value = env.get(f"{scheme}_proxy")
        # A CGI server puts the request's `Proxy:` header into HTTP_PROXY.
        if value is None and not (scheme == "http" and "REQUEST_METHOD" in env):
            value = env.get(f"{scheme}_proxy".upper())
        if value:
            found[scheme] = value
    for name in () if found else ("getproxies_macosx_sysconf", "getproxies_registry"):
        settings = getattr(urllib.request, name, None)  # of the system, where it has some
        if settings is not None:
            found = dict(settings())
    return found
