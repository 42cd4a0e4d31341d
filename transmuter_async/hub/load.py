"""What everything that happens in one load stands on: one repository, one revision, one set of connections."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from transmuter_async.hub.answers import Asked
from transmuter_async.hub.cache import RepoCache
from transmuter_async.hub.environment import Environment
from transmuter_async.hub.events import Events
from transmuter_async.hub.locks import Locks
from transmuter_async.hub.retry import Sleep
from transmuter_async.hub.transport import Transport
from transmuter_async.hub.workers import Workers

__all__ = ["Load", "Verify"]

Verify = Literal["once", "always", "never"]


@dataclass(frozen=True, slots=True)
class Load:
    """The surroundings of one load.

    Attributes:
        asked: Repository and revision, as asked for.
        cache: Where its files lie.
        events: What is told about it.
        transport: Its connections.
        workers: The client's threads.
        locks: The client's locks.
        environment: What the environment variables say.
        verify: When content is hashed.
        sleep: Waits between attempts.
    """

    asked: Asked
    cache: RepoCache
    events: Events
    transport: Transport
    workers: Workers
    locks: Locks
    environment: Environment
    verify: Verify
    sleep: Sleep
