"""Who owns what at run time: actors, their threads, and the handles that tasks hold of them.

`actor.py` has the life cycle and the rule for failures, `model.py` the actor of one compiled model, `handle.py` its
address, `threads.py` the threads in which everything that takes time happens. The layer hands a graph to the compiler
and values back; it knows no operators, no Hub and no tasks.
"""

from __future__ import annotations

from transmuter_async.actors.actor import RESTARTS, WINDOW, Actor
from transmuter_async.actors.handle import Compiled
from transmuter_async.actors.memory import Budget, DeviceMemory, bytes_held, read_memory, tell_memory
from transmuter_async.actors.messages import ActorStatistics
from transmuter_async.actors.model import ModelActor
from transmuter_async.actors.replicas import Preparation, Replicas, ReplicaStatistics, replica_names
from transmuter_async.actors.reply import AnyReply, Reply, ThreadReply, again
from transmuter_async.actors.threads import Threads

__all__ = [
    "RESTARTS",
    "WINDOW",
    "Actor",
    "ActorStatistics",
    "AnyReply",
    "Budget",
    "Compiled",
    "DeviceMemory",
    "ModelActor",
    "Preparation",
    "ReplicaStatistics",
    "Replicas",
    "Reply",
    "ThreadReply",
    "Threads",
    "again",
    "bytes_held",
    "read_memory",
    "replica_names",
    "tell_memory",
]
