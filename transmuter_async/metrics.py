"""Metrics from events, for real exporters: the Prometheus client and the OpenTelemetry SDK (extra `metrics`).

    metrics = [
        summary("transmuter.call.stop.duration", unit="millisecond"),
        counter("transmuter.cache.miss.count", tags=["position"]),
    ]
    async with PrometheusMetrics(runtime.telemetry, metrics): ...

A definition's last part names the measurement, the rest the event. An exporter is one more subscriber: it may lag or
lose events (counted), and never slows a model down. A tag keeps at most `TAG_VALUES` values, so that a stream of file
names can't fill the metrics' memory.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Self

import anyio
from anyio.abc import TaskGroup

from transmuter_async.errors import MisuseError
from transmuter_async.telemetry import Event, Subscription, Telemetry

__all__ = [
    "SERVING",
    "TAG_VALUES",
    "Metric",
    "OpenTelemetryMetrics",
    "OpenTelemetrySpans",
    "PrometheusMetrics",
    "counter",
    "distribution",
    "last_value",
    "sum_",
    "summary",
]

TAG_VALUES = 100
"""Values that a tag keeps apart; what comes later is `other`."""

BUFFER = 1 << 16

OPEN = 1 << 16
"""Spans that may be open at once; the one that began first is then ended as lost."""

Kind = Literal["counter", "sum", "last_value", "summary", "distribution"]

_TIME = {"nanosecond": 1, "microsecond": 1_000, "millisecond": 1_000_000, "second": 1_000_000_000}
_SIZE = {"byte": 1, "kilobyte": 1_000, "megabyte": 1_000_000, "gigabyte": 1_000_000_000}
_SHORT = {
    "nanosecond": "ns",
    "microsecond": "us",
    "millisecond": "ms",
    "second": "s",
    "byte": "By",
    "kilobyte": "kBy",
    "megabyte": "MBy",
    "gigabyte": "GBy",
}
_SECONDS = (0.0001, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_BYTES = tuple(float(10**power) for power in range(3, 12))

_log = logging.getLogger("transmuter_async")


@dataclass(frozen=True, slots=True)
class Metric:
    """What to make of one measurement of one event.

    Attributes:
        kind: "counter" counts events, "sum" adds the measurement up, "last_value" keeps the newest, "summary" and
            "distribution" spread it over buckets.
        name: As given, `transmuter.call.stop.duration`.
        event: `transmuter.call.stop`.
        measurement: `duration`.
        unit: Of the exported number. Measurements are nanoseconds and bytes; `megabyte` is 10**6 bytes.
        tags: Metadata that keep the numbers apart.
        description: For the exporter.
        buckets: Of "summary" and "distribution", in `unit`; None for the exporter's own.
    """

    kind: Kind
    name: str
    event: str
    measurement: str
    unit: str | None = None
    tags: tuple[str, ...] = ()
    description: str = ""
    buckets: tuple[float, ...] | None = None

    @property
    def divisor(self) -> int:
        """Base units (nanoseconds, bytes) in one `unit`."""
        return 1 if self.unit is None else _TIME.get(self.unit) or _SIZE[self.unit]


def _metric(
    kind: Kind,
    name: str,
    unit: str | None,
    tags: Iterable[str],
    description: str,
    buckets: Iterable[float] | None = None,
) -> Metric:
    event, _, measurement = name.rpartition(".")
    if not event:
        raise ValueError(f"{name!r} names no measurement: write the event, a dot, and the measurement")
    if unit is not None and unit not in _SHORT:
        raise ValueError(f"unit={unit!r} is not one of {', '.join(map(repr, _SHORT))}")
    return Metric(
        kind, name, event, measurement, unit, tuple(tags), description, None if buckets is None else tuple(buckets)
    )


def counter(name: str, *, tags: Iterable[str] = (), description: str = "") -> Metric:
    """How many events there were, whatever the measurement's value. See `Metric` for the arguments."""
    return _metric("counter", name, None, tags, description)


def sum_(name: str, *, unit: str | None = None, tags: Iterable[str] = (), description: str = "") -> Metric:
    """The measurement added up. See `Metric` for the arguments."""
    return _metric("sum", name, unit, tags, description)


def last_value(name: str, *, unit: str | None = None, tags: Iterable[str] = (), description: str = "") -> Metric:
    """The newest value of the measurement. See `Metric` for the arguments."""
    return _metric("last_value", name, unit, tags, description)


def summary(
    name: str,
    *,
    unit: str | None = None,
    tags: Iterable[str] = (),
    description: str = "",
    buckets: Iterable[float] | None = None,
) -> Metric:
    """How the measurement is spread. A Histogram in Prometheus, whose own summaries have no quantiles. See `Metric` for the arguments."""
    return _metric("summary", name, unit, tags, description, buckets)


def distribution(
    name: str,
    *,
    unit: str | None = None,
    tags: Iterable[str] = (),
    description: str = "",
    buckets: Iterable[float] | None = None,
) -> Metric:
    """How the measurement is spread, in buckets. See `Metric` for the arguments."""
    return _metric("distribution", name, unit, tags, description, buckets)


SERVING: tuple[Metric, ...] = (
    distribution(
        "transmuter.batch.stop.size",
        tags=["serving"],
        buckets=[1 << power for power in range(11)],
        description="Rows of data in a batch",
    ),
    distribution(
        "transmuter.batch.stop.padding",
        tags=["serving"],
        buckets=[step / 10 for step in range(1, 10)],
        description="Share of a batch's elements that is padding",
    ),
    distribution(
        "transmuter.batch.stop.oldest_wait",
        unit="second",
        tags=["serving", "bucket"],
        buckets=_SECONDS,
        description="How long the oldest row of a batch has waited",
    ),
    distribution(
        "transmuter.batch.stop.duration",
        unit="second",
        tags=["serving", "bucket"],
        buckets=_SECONDS,
        description="How long a batch took",
    ),
    last_value("transmuter.batch.stop.queue_depth", tags=["serving"], description="Rows left waiting behind a batch"),
    counter("transmuter.batch.exception.duration", tags=["serving"], description="Batches that failed"),
    counter("transmuter.queue.rejected.count", tags=["serving", "why"], description="Requests that were not computed"),
    counter("transmuter.breaker.opened.count", tags=["serving"], description="Times that everything failed"),
)
"""What to watch of a batch worker."""


class _Tags:
    """Values of a metric's tags as text, bounded."""

    def __init__(self, metric: Metric) -> None:
        self._metric = metric
        self._seen: dict[str, set[str]] = {tag: set() for tag in metric.tags}
        self._warned = False

    def of(self, event: Event) -> dict[str, str]:
        found = {}
        for tag, seen in self._seen.items():
            value = _text(event.metadata.get(tag))
            if value not in seen:
                if len(seen) < TAG_VALUES:
                    seen.add(value)
                else:
                    if not self._warned:
                        self._warned = True
                        _log.warning(
                            "the tag %r of %s has more than %d values; further ones are counted as 'other'",
                            tag,
                            self._metric.name,
                            TAG_VALUES,
                        )
                    value = "other"
            found[tag] = value
        return found


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, tuple):
        return "/".join(_text(each) for each in value)
    return str(value)


class _Exporter:
    """A subscriber with a task of its own, from entering `async with` until it is left; then it has seen everything."""

    def __init__(self, telemetry: Telemetry, prefixes: Sequence[str]) -> None:
        self._subscription = self._subscribe(telemetry, tuple(prefixes))
        self._group: TaskGroup | None = None

    @property
    def dropped(self) -> int:
        """Events that came faster than they were read."""
        return self._subscription.dropped

    def _subscribe(self, telemetry: Telemetry, prefixes: tuple[str, ...]) -> Subscription:
        return telemetry.subscribe(*prefixes, buffer=BUFFER)

    def _take(self, event: Event) -> None:
        raise NotImplementedError

    async def _serve(self) -> None:
        async for event in self._subscription:
            self._take(event)

    async def __aenter__(self) -> Self:
        self._subscription.open()
        self._group = anyio.create_task_group()
        await self._group.__aenter__()
        self._group.start_soon(self._serve)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._group is not None
        self._subscription.finish()
        try:
            await self._group.__aexit__(kind, error, trace)
        except BaseExceptionGroup as group:
            if list(group.exceptions) != [error]:  # else it goes on as it was
                raise


class _Metrics(_Exporter):
    """Shared by both: which metric an event feeds."""

    def __init__(self, telemetry: Telemetry, metrics: Iterable[Metric]) -> None:
        self._by_event: dict[str, list[tuple[Metric, _Tags, Any]]] = {}
        for metric in metrics:
            entry = (metric, _Tags(metric), self._instrument(metric))
            self._by_event.setdefault(metric.event, []).append(entry)
        if not self._by_event:
            raise ValueError("no metrics were given; nothing would be exported")
        super().__init__(telemetry, tuple(self._by_event))

    def _instrument(self, metric: Metric) -> Any:
        raise NotImplementedError

    def _record(self, metric: Metric, instrument: Any, value: float, tags: Mapping[str, str]) -> None:
        raise NotImplementedError

    def _take(self, event: Event) -> None:
        for metric, tags, instrument in self._by_event.get(event.name, ()):
            if metric.kind == "counter":
                self._record(metric, instrument, 1, tags.of(event))
            elif metric.measurement in event.measurements:
                self._record(metric, instrument, event.measurements[metric.measurement], tags.of(event))


class PrometheusMetrics(_Metrics):
    """Feeds a `prometheus_client` registry. Names are in base units: `_seconds`, `_bytes`.

    Args:
        telemetry: The bus.
        metrics: Definitions.
        registry: `prometheus_client.REGISTRY` by default.

    Raises:
        MisuseError: `prometheus_client` is not installed.
    """

    def __init__(self, telemetry: Telemetry, metrics: Iterable[Metric], *, registry: Any = None) -> None:
        try:
            import prometheus_client
        except ImportError as error:
            raise _missing("prometheus-client") from error
        self._client: Any = prometheus_client
        self._registry = prometheus_client.REGISTRY if registry is None else registry
        self._made: list[Any] = []
        super().__init__(telemetry, metrics)

    def _instrument(self, metric: Metric) -> Any:
        name = metric.name.replace(".", "_")
        buckets: tuple[float, ...] | None = metric.buckets
        if metric.unit in _TIME:
            name += "_seconds"
            buckets = _SECONDS if buckets is None else tuple(each * metric.divisor / 1e9 for each in buckets)
        elif metric.unit in _SIZE:
            name += "" if name.endswith("_bytes") else "_bytes"
            buckets = _BYTES if buckets is None else tuple(each * metric.divisor for each in buckets)
        text = metric.description or f"{metric.measurement} of {metric.event}"
        options: dict[str, Any] = {"registry": self._registry}
        if metric.kind in ("counter", "sum"):
            made = self._client.Counter(name, text, metric.tags, **options)
        elif metric.kind == "last_value":
            made = self._client.Gauge(name, text, metric.tags, **options)
        else:
            if buckets is not None:
                options["buckets"] = buckets
            made = self._client.Histogram(name, text, metric.tags, **options)
        self._made.append(made)
        return made

    def _record(self, metric: Metric, instrument: Any, value: float, tags: Mapping[str, str]) -> None:
        child = instrument.labels(**tags) if tags else instrument
        if metric.unit in _TIME:
            value /= 1e9
        if metric.kind in ("counter", "sum"):
            child.inc(value)
        elif metric.kind == "last_value":
            child.set(value)
        else:
            child.observe(value)


class OpenTelemetryMetrics(_Metrics):
    """Feeds instruments of an OpenTelemetry meter, in the unit of each definition.

    Args:
        telemetry: The bus.
        metrics: Definitions.
        meter: From a `MeterProvider`; that of the global one by default.

    Raises:
        MisuseError: `opentelemetry` is not installed.
    """

    def __init__(self, telemetry: Telemetry, metrics: Iterable[Metric], *, meter: Any = None) -> None:
        if meter is None:
            try:
                from opentelemetry import metrics as api
            except ImportError as error:
                raise _missing("opentelemetry-sdk") from error
            meter = api.get_meter("transmuter_async")
        self._meter = meter
        super().__init__(telemetry, metrics)

    def _instrument(self, metric: Metric) -> Any:
        options: dict[str, Any] = {
            "unit": "1" if metric.unit is None else _SHORT[metric.unit],
            "description": metric.description,
        }
        if metric.kind in ("counter", "sum"):
            return self._meter.create_counter(metric.name, **options)
        if metric.kind == "last_value":
            return self._meter.create_gauge(metric.name, **options)
        if metric.buckets is not None:
            options["explicit_bucket_boundaries_advisory"] = list(metric.buckets)
        return self._meter.create_histogram(metric.name, **options)

    def _record(self, metric: Metric, instrument: Any, value: float, tags: Mapping[str, str]) -> None:
        if metric.unit is not None:
            value /= metric.divisor
        if metric.kind in ("counter", "sum"):
            instrument.add(value, dict(tags))
        elif metric.kind == "last_value":
            instrument.set(value, dict(tags))
        else:
            instrument.record(value, dict(tags))


_CONTEXT = "opentelemetry.context"


class _ContextSubscription(Subscription):
    """Adds the OpenTelemetry context of who starts a span to its start: an event is offered in the emitter's own context."""

    def offer(self, event: Event) -> None:
        """As ever, with one fact more."""
        if event.name.endswith(".start"):
            from opentelemetry import context

            metadata = {**event.metadata, _CONTEXT: context.get_current()}
            event = Event(event.name, event.measurements, metadata)
        super().offer(event)


class OpenTelemetrySpans(_Exporter):
    """Makes OpenTelemetry spans of ours: calls under the span that is current in the caller's task, and within each call
    its compiles and breaks.

    Args:
        telemetry: The bus.
        tracer: From a `TracerProvider`; that of the global one by default.
        prefixes: Which spans; `transmuter.call`, `transmuter.segment.compile` and `transmuter.break` by default.

    Raises:
        MisuseError: `opentelemetry` is not installed.
    """

    def __init__(
        self,
        telemetry: Telemetry,
        *,
        tracer: Any = None,
        prefixes: Sequence[str] = ("transmuter.call", "transmuter.segment.compile", "transmuter.break"),
    ) -> None:
        try:
            from opentelemetry import trace
        except ImportError as error:
            raise _missing("opentelemetry-sdk") from error
        self._trace: Any = trace
        self._tracer = trace.get_tracer("transmuter_async") if tracer is None else tracer
        self._open: dict[int, tuple[Any, int]] = {}
        super().__init__(telemetry, prefixes)

    def _subscribe(self, telemetry: Telemetry, prefixes: tuple[str, ...]) -> Subscription:
        return _ContextSubscription(telemetry, prefixes, BUFFER)

    def _take(self, event: Event) -> None:
        name, _, part = event.name.rpartition(".")
        number = event.metadata.get("span")
        if not isinstance(number, int):
            return
        if part == "start":
            context = event.metadata[_CONTEXT]
            parent = event.metadata.get("parent")
            if parent in self._open:
                context = self._trace.set_span_in_context(self._open[parent][0], context)
            began = int(event.measurements["system_time"])
            span = self._tracer.start_span(name, context=context, start_time=began, attributes=_attributes(event))
            self._open[number] = (span, began)
            if len(self._open) > OPEN:  # ends that were dropped never come
                lost, began = self._open.pop(next(iter(self._open)))
                lost.set_attribute("transmuter.lost", True)
                lost.end(end_time=began)
        elif number in self._open:
            span, began = self._open.pop(number)
            span.set_attributes(_attributes(event))
            if part == "exception":
                reason = event.metadata["reason"]
                status = self._trace.Status(self._trace.StatusCode.ERROR, f"{type(reason).__name__}: {reason}")
                span.set_status(status)
            span.end(end_time=began + int(event.measurements["duration"]))


def _attributes(event: Event) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in event.metadata.items():
        if name in ("span", "parent", "call", "shapes", "reason", "stacktrace", _CONTEXT):
            continue
        if value is not None:
            found[f"transmuter.{name}"] = value if isinstance(value, (bool, int, float)) else _text(value)
    for name in ("queued", "compiling"):
        if name in event.measurements:
            found[f"transmuter.{name}"] = event.measurements[name]
    return found


def _missing(package: str) -> MisuseError:
    return MisuseError(
        f"{package} is not installed; install it with the extra: pip install 'transmuter-async[metrics]'"
    )
