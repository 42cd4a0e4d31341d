"""The batch worker: many callers, one queue for each bucket, full batches, and each gets what it would get alone.

`scheduler.py` decides which rows run together and when, as plain code on values.
"""

from __future__ import annotations

from transmuter_async.serving.scheduler import Batch, Limits, Part, Request, Scheduler

__all__ = ["Batch", "Limits", "Part", "Request", "Scheduler"]
