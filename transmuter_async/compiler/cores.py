"""Which threads compute on the CPU: those of XLA's client, ours that call it, and ours that compile.

XLA's CPU client is one for the process, and so is its pool of threads. It is made when jax is first used for anything, with
a thread for each core that the process may use, or as many as the environment variable `NPROC` says. Nothing changes it
later: not the options of a program (`xla_cpu_multi_thread_eigen` has no effect in jaxlib 0.10), not another `NPROC`.

Likewise decided when it is made is who runs a program: a thread of the client's own (as jax asks for by default, so that its
caller can go on), or the caller itself. Our callers are threads that have nothing else to do than to wait for the result, so a
client that is made for us is one of the second kind.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from pathlib import Path

import jax

from transmuter_async.compiler.settings import run_by_callers
from transmuter_async.errors import MisuseError

__all__ = ["cores", "pool_size", "start_client"]

_TASKS = Path("/proc/self/task")
_POOL = "tf_XLAEigen"
"""What XLA names the threads of the pool in which programs compute, the first 15 characters of it."""

_turn = threading.Lock()
_started = False


def cores() -> int:
    """Cores that this process may use: `NPROC` where it is set, as XLA takes it, else what the system allows."""
    with suppress(KeyError, ValueError):
        return max(1, int(os.environ["NPROC"]))
    # Those of the main thread: the one that asks may be bound to one of them.
    return len(os.sched_getaffinity(os.getpid())) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def pool_size() -> int:
    """Threads in which programs compute on the CPU, as far as the system tells: programs are cut into as many parts."""
    return (_count() if _TASKS.is_dir() else 0) or cores()


def start_client(threads: int | None = None) -> None:
    """Start jax's clients, if nothing has yet: for a thread.

    The one of the CPU then runs a program in the thread that calls it, unless `JAX_CPU_ENABLE_ASYNC_DISPATCH` is true in the
    environment. jax's configuration stays as it was.

    Args:
        threads: That compute on the CPU, at least 1; None for as many as XLA takes.

    Raises:
        MisuseError: The client runs already, with another number of threads; or how many there are can't be seen here.
    """
    global _started
    if threads is None:
        if not _started:
            with _turn, run_by_callers():
                jax.local_devices()
            _started = True
        return
    if not _TASKS.is_dir():
        raise MisuseError(
            f"threads={threads} can only be kept where /proc tells a process its threads, on Linux; leave it out, and start the "
            f"program with NPROC={threads} in its environment"
        )
    with _turn:
        found = _count()
        if found == 0:
            before = os.environ.get("NPROC")
            os.environ["NPROC"] = str(threads)
            try:
                with run_by_callers():
                    jax.local_devices(backend="cpu")
            except RuntimeError as error:
                raise MisuseError(
                    f"threads={threads} are those of programs on the CPU, and jax has none here: {error}; leave it out, or add cpu to "
                    "JAX_PLATFORMS"
                ) from error
            finally:
                if before is None:
                    del os.environ["NPROC"]
                else:
                    os.environ["NPROC"] = before
            found = _count()
            if found == 0:
                raise MisuseError(
                    f"threads={threads}: the threads of this version of XLA can't be counted, so nothing would be certain; leave "
                    f"it out, and start the program with NPROC={threads} in its environment"
                )
    if found != threads:
        raise MisuseError(
            f"threads={threads}: this process has one pool of threads that compute on the CPU, and it was made with {found}, before "
            "or for a larger number of CPU devices; start the program with "
            f"NPROC={threads} in its environment, or compile the first model of such a runtime before anything else uses jax"
        )


def _count() -> int:
    """Threads of the pool; 0 while there is no client."""
    count = 0
    for task in _TASKS.iterdir():
        try:
            count += (task / "comm").read_text("ascii", "replace").strip() == _POOL
        except OSError:  # it has ended meanwhile
            continue
    return count
