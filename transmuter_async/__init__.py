"""An async-first, actor-based runtime for ONNX models on JAX.

async with Runtime() as runtime:
    compiled = await runtime.compile("model.onnx")
    outputs = await compiled.run({"x": array})
"""

from __future__ import annotations

from transmuter_async.actors import ActorStatistics, Compiled
from transmuter_async.compare import Comparison, Difference, compare
from transmuter_async.compiler import Batching, Break, Explanation, Spec, Why
from transmuter_async.errors import (
    ActorStopped,
    BatchingRefused,
    BreakRefused,
    CircuitOpen,
    CompileError,
    DeadlineExceeded,
    HubError,
    IndexOutOfRange,
    InputError,
    InvalidModel,
    MisuseError,
    NeedsValue,
    NonFiniteError,
    NonFiniteWarning,
    OperatorError,
    Overloaded,
    TransmuterError,
    UnsupportedModel,
)
from transmuter_async.functions import device_put, run_sync, supported_operators, to_jax
from transmuter_async.graph import Model
from transmuter_async.runtime import DeviceMemory, Runtime, RuntimeStatistics
from transmuter_async.serving import Serving, ServingStatistics
from transmuter_async.telemetry import Event, Telemetry
from transmuter_async.version import __version__

__all__ = [
    "ActorStatistics",
    "ActorStopped",
    "Batching",
    "BatchingRefused",
    "Break",
    "BreakRefused",
    "CircuitOpen",
    "Comparison",
    "CompileError",
    "Compiled",
    "DeadlineExceeded",
    "DeviceMemory",
    "Difference",
    "Event",
    "Explanation",
    "HubError",
    "IndexOutOfRange",
    "InputError",
    "InvalidModel",
    "MisuseError",
    "Model",
    "NeedsValue",
    "NonFiniteError",
    "NonFiniteWarning",
    "OperatorError",
    "Overloaded",
    "Runtime",
    "RuntimeStatistics",
    "Serving",
    "ServingStatistics",
    "Spec",
    "Telemetry",
    "TransmuterError",
    "UnsupportedModel",
    "Why",
    "__version__",
    "compare",
    "device_put",
    "run_sync",
    "supported_operators",
    "to_jax",
]
