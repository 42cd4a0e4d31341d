"""`Serving.warm`: everything is compiled, and a batch of each bucket is computed against its rows, before traffic comes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from anyio.lowlevel import checkpoint

from transmuter_async.actors import again
from transmuter_async.errors import BatchingRefused
from transmuter_async.serving import trial
from transmuter_async.serving.actor import ServingActor
from transmuter_async.serving.rows import Item, Piece

__all__ = ["warm"]


async def warm(actor: ServingActor, samples: Sequence[Mapping[str, Any]]) -> None:
    """Compile all programs of a serving, try a batch of each bucket, and have the serving ready then.

    One that is ready stays so meanwhile, and where this is cancelled.

    Args:
        actor: Of the serving.
        samples: Examples of all inputs; none where they can be made up.

    Raises:
        InputError: Inputs can't be made up; a sample is needed.
        BatchingRefused: The trial found an output that depends on its batch. Nothing is answered from then on.
        CompileError: XLA refused a program.
        ActorStopped: The serving has ended.
    """
    actor.check_place()
    _check_running(actor)
    if actor.refusal is not None:
        await checkpoint()
        raise again(actor.refusal)
    compiled, rows, limits = actor.compiled, actor.rows, actor.limits

    def buckets(sample: Mapping[str, Any] | None) -> list[trial.Bucket]:
        return list(trial.buckets(compiled._prepared, rows, limits, sample))

    try:
        found = [bucket for sample in samples or (None,) for bucket in await actor.in_thread(True, buckets, sample)]
        if compiled._prepared.options.compiler != "eager":
            await compiled.warm([trial.specs(bucket, rows, size) for bucket in found for size in bucket.sizes])
        if not rows.plan.batching.allow_mixing:
            for bucket in found:
                _check_running(actor)
                await _try(actor, bucket)
        _check_running(actor)
        actor.known.update((bucket.items[0].key, size) for bucket in found for size in bucket.sizes)
    except Exception as error:
        actor.is_ready, actor.warm_failure = False, f"{type(error).__name__}: {error}"
        raise
    except BaseException:  # cancelled: nothing is wrong with what was warm before
        if not actor.is_ready:
            actor.warm_failure = "it was cancelled"
        raise
    actor.is_ready, actor.warm_failure = True, None


def _check_running(actor: ServingActor) -> None:
    if actor.state != "running":
        raise actor.stopped_error()


async def _try(actor: ServingActor, bucket: trial.Bucket) -> None:
    items = bucket.items
    alone = [(await _once(actor, [item]))[0] for item in items]
    try:
        if len(items) > 1:
            trial.compare(alone, await _once(actor, items), f"of a batch of {len(items)}")
        if bucket.longer is not None:
            sizes = dict(bucket.longer.targets)
            trial.compare(alone[:1], await _once(actor, [bucket.longer]), f"padded to {sizes}")
    except BatchingRefused as error:
        actor.refusal = error
        raise


async def _once(actor: ServingActor, items: Sequence[Item]) -> list[dict[str, Any]]:
    pieces = [Piece(item, 0, 1) for item in items]
    program = actor.limits.program(len(items))
    inputs = await actor.in_thread(True, actor.rows.build, pieces, program)
    outputs = await actor.compiled.run(inputs, copy=False, seed=0)
    found: list[dict[str, Any]] = await actor.in_thread(True, actor.rows.cut, outputs, pieces, program)
    return found
