"""The batch worker: many callers, one queue for each bucket, full batches, and each gets what it would get alone.

`scheduler.py` decides which rows run together and when, as plain code on values (`decisions.py`, `queues.py`), with the line in
front of the queues (`line.py`) and the order in which they are due (`order.py`). `rows.py` joins requests along the axis that the
compiler proved to be rows, and cuts the outputs; `trial.py` and `warming.py` try that once. `actor.py` is the worker in front of a
model actor, `computing.py` what it does with a batch, `handle.py` its address, `mapped.py` what a source of many requests goes
through.

The layer is handed a compiled model and the runtime's bus; it knows no files, no Hub and no tasks.
"""

from __future__ import annotations

from transmuter_async.serving.actor import ServingActor
from transmuter_async.serving.handle import GRACE, Serving, Starting, check_compiled, close_servings, start_serving
from transmuter_async.serving.mapped import Mapped
from transmuter_async.serving.records import ServingOptions, ServingStatistics

__all__ = [
    "GRACE",
    "Mapped",
    "Serving",
    "ServingActor",
    "ServingOptions",
    "ServingStatistics",
    "Starting",
    "check_compiled",
    "close_servings",
    "start_serving",
]
