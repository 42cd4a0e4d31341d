"""Read JSON lines, compute a vector for each, write JSON lines: in full batches, in bounded memory, and Ctrl-C loses nothing.

python examples/embed_lines.py                       a demonstration
python examples/embed_lines.py IN.jsonl OUT.jsonl    {"id": …, "pixels": [64 numbers]} a line

What was read when Ctrl-C comes is finished and written; started again, it goes on behind the last line of OUT.
"""

from __future__ import annotations

import json
import signal
import sys
import tempfile
from collections import deque
from collections.abc import AsyncIterator
from functools import partial
from itertools import islice
from pathlib import Path

import anyio
import numpy as np

import transmuter_async as tm
from transmuter_async.demo import digits_model, digits_test

IN_FLIGHT = 128
"""Lines between the two files, and"""
CHUNK = 64
"""lines that are read or written at once: all that is ever in memory."""


async def finished_lines(target: anyio.Path) -> int:
    """How many whole lines the last run has written; half a line, of one that was killed, is cut off."""
    if not await target.exists():
        return 0
    data = await target.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole < len(data):
        await target.write_bytes(data[:whole])
    return data.count(b"\n")


async def requests(
    source: anyio.Path, skip: int, ids: deque[object], stop: anyio.Event
) -> AsyncIterator[dict[str, np.ndarray]]:
    with await anyio.to_thread.run_sync(partial(Path(source).open, encoding="utf-8")) as file:
        lines = islice(file, skip, None)
        while not stop.is_set() and (chunk := await anyio.to_thread.run_sync(list, islice(lines, CHUNK))):
            for line in chunk:
                item = json.loads(line)
                ids.append(item["id"])
                yield {"image": np.asarray(item["pixels"], np.float32).reshape(1, 1, 8, 8) / 16}


async def interrupted(stop: anyio.Event) -> None:
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async for _ in signals:
            print("stopping: what was read is finished first", file=sys.stderr)
            stop.set()


async def written_out(out: anyio.AsyncFile[str], chunk: list[str]) -> int:
    count = len(chunk)
    await out.write("".join(chunk))
    await out.flush()
    chunk.clear()
    return count


async def work(source: anyio.Path, target: anyio.Path) -> None:
    skip = await finished_lines(target)
    stop, ids, written = anyio.Event(), deque[object](), 0
    chunk: list[str] = []
    async with anyio.create_task_group() as tasks, tm.Runtime() as runtime:
        tasks.start_soon(interrupted, stop)
        compiled = await runtime.compile(digits_model())
        async with runtime.serve(compiled, batch_size=32) as serving, await target.open("a", encoding="utf-8") as out:
            await serving.warm()
            async for outputs in serving.map(requests(source, skip, ids, stop), concurrency=IN_FLIGHT):
                vector = [round(float(each), 6) for each in outputs["probabilities"][0]]
                chunk.append(json.dumps({"id": ids.popleft(), "vector": vector}) + "\n")
                if len(chunk) == CHUNK:
                    written += await written_out(out, chunk)
                    print(f"{skip + written} lines", file=sys.stderr, flush=True)
            written += await written_out(out, chunk)
            counts = await serving.statistics()
        tasks.cancel_scope.cancel()
    how = "stopped after" if stop.is_set() else "done:"
    print(f"{how} {skip + written} lines, {skip} of them before; {counts.mean_batch:.1f} rows in a batch")


async def demonstrate() -> None:
    """Make up an input file, and work on it."""
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "digits.jsonl", Path(folder) / "vectors.jsonl"
        lines = [{"id": n, "pixels": image.reshape(-1).tolist()} for n, image in enumerate(digits_test()[0])]
        source.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
        await work(anyio.Path(source), anyio.Path(target))
        assert [json.loads(line)["id"] for line in target.read_text("utf-8").splitlines()] == list(range(len(lines)))


if __name__ == "__main__":
    if len(sys.argv) == 3:
        anyio.run(work, anyio.Path(sys.argv[1]), anyio.Path(sys.argv[2]))
    else:
        anyio.run(demonstrate)
