"""Compiles that no call waits for: of the signatures given to `compile`, and of `warm`. On the loop of the actor that they are for."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio

from transmuter_async.actors import work
from transmuter_async.actors.compiles import Rank
from transmuter_async.actors.events import Observer
from transmuter_async.actors.messages import Warm
from transmuter_async.actors.reply import Reply
from transmuter_async.compiler import CompileJob, Segment, Spec
from transmuter_async.errors import InputError

if TYPE_CHECKING:
    from transmuter_async.actors.model import ModelActor

__all__ = ["compile_signature", "warm"]


async def warm(actor: ModelActor, message: Warm) -> None:
    """Compile signatures that no call has asked for yet, and wait until they are ready and tuned."""
    async with anyio.create_task_group() as group:
        for specs in message.signatures:
            group.start_soon(compile_signature, actor, specs)
    await actor._tuner.wait(actor.loop, actor._asks)


async def compile_signature(actor: ModelActor, specs: Mapping[str, Spec], *, keep: bool = False) -> None:
    """Compile a signature that no call has asked for yet, unless it is cached; wait until it is ready."""
    jobs = await actor._ask_thread(actor._compile_threads, work.spec_jobs, actor.prepared, specs)
    if jobs is None:
        if keep:
            return
        raise InputError(
            f"{actor.name!r} reads the value of an input on the host, and a Spec has only its shape: give that input as an "
            "array among the specs"
        )
    if len(jobs) == 1 or (keep and jobs):
        await _compile(actor, *jobs[0], keep=keep)
        return
    async with anyio.create_task_group() as group:
        for job, values in jobs:
            group.start_soon(partial(_compile, actor, job, values, keep=keep))


async def _compile(actor: ModelActor, job: CompileJob, values: Mapping[str, Any], *, keep: bool) -> None:
    """Compile a program that no call waits for, unless it is cached; wait until it is ready."""
    installed = actor._book.installed
    if await actor._ask_thread(actor._run_threads, work.holds, actor._cache, job, values):
        return
    if actor._book.came(job.key, installed):  # just after the run thread looked
        return
    observer = Observer(
        actor.telemetry,
        actor.metadata,
        parent=actor._span if keep else None,
        extra=None if keep else {"background": True},
    )
    reply: Reply[Segment] = Reply(actor.loop)
    compile = actor._compile(job, observer, Rank.CALL if keep else Rank.WARM, keep=keep)
    compile.replies.append(reply)
    actor._asks.add(reply)
    try:
        await reply.wait()
    finally:
        actor._asks.discard(reply)
        compile.replies.remove(reply)
        if actor._book.current.get(compile.job.key) is compile:
            actor._book.drop_unwanted(compile)
