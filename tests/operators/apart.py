"""onnxruntime in a process of its own, for what may end it: sizes of zero make some of its kernels divide by them."""

from __future__ import annotations

import pickle
import subprocess
import sys
from typing import Any

_WORKER = """
import pickle, sys
import ml_dtypes, numpy, onnxruntime
onnxruntime.set_default_logger_severity(4)
source, sink = sys.stdin.buffer, sys.stdout.buffer
while True:
    try:
        model, feeds = pickle.load(source)
    except EOFError:
        break
    try:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        answer = list(session.run(None, feeds))
    except Exception as error:
        answer = None
    pickle.dump(answer, sink)
    sink.flush()
"""


class Apart:
    """Runs models, one after the other, in a process that is started anew when it ended."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def run(self, model: bytes, feeds: dict[str, Any]) -> list[Any] | None:
        """The outputs; None where onnxruntime refuses, or ends."""
        if self._process is None or self._process.poll() is not None:
            self.close()
            self._process = subprocess.Popen(
                [sys.executable, "-c", _WORKER],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            pickle.dump((model, feeds), self._process.stdin)
            self._process.stdin.flush()
            answer: list[Any] | None = pickle.load(self._process.stdout)
        except (EOFError, BrokenPipeError, pickle.UnpicklingError):
            self.close()
            return None
        return answer

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            with self._process:
                self._process = None
