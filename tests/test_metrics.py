"""Metrics through the real exporters, and OpenTelemetry spans under the caller's own."""

from __future__ import annotations

import logging

import anyio
import numpy as np
import prometheus_client
import pytest
from opentelemetry import trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import transmuter_async as tm
from tests.test_runtime import affine, breaking, rows
from transmuter_async import metrics
from transmuter_async.metrics import (
    TAG_VALUES,
    OpenTelemetryMetrics,
    OpenTelemetrySpans,
    PrometheusMetrics,
    counter,
    distribution,
    last_value,
    sum_,
    summary,
)
from transmuter_async.telemetry import Telemetry

DEFINITIONS = [
    summary("transmuter.call.stop.duration", unit="millisecond"),
    counter("transmuter.cache.miss.count", tags=["position"]),
    sum_("transmuter.hub.download.stop.bytes", unit="megabyte"),
    last_value("transmuter.memory.stats.active_memory", unit="byte", tags=["device"]),
    distribution("transmuter.batch.stop.size", buckets=(1, 8, 64)),
]


def emit_all(bus: Telemetry) -> None:
    bus.emit("transmuter.call.stop", {"duration": 3_000_000}, {})
    bus.emit("transmuter.call.stop", {"duration": 5_000_000}, {})
    bus.emit("transmuter.cache.miss", {"count": 1}, {"position": 7})
    bus.emit("transmuter.hub.download.stop", {"bytes": 2_500_000}, {})
    bus.emit("transmuter.memory.stats", {"active_memory": 10}, {"device": "cpu:0"})
    bus.emit("transmuter.memory.stats", {"active_memory": 20}, {"device": "cpu:0"})
    bus.emit("transmuter.batch.stop", {"size": 9}, {})
    bus.emit("transmuter.batch.stop", {}, {})  # without the measurement: skipped


async def test_prometheus() -> None:
    bus, registry = Telemetry(), prometheus_client.CollectorRegistry()
    async with PrometheusMetrics(bus, DEFINITIONS, registry=registry) as exporter:
        emit_all(bus)
    assert exporter.dropped == 0
    value = registry.get_sample_value
    assert value("transmuter_call_stop_duration_seconds_count") == 2
    assert value("transmuter_call_stop_duration_seconds_sum") == pytest.approx(0.008)
    assert value("transmuter_call_stop_duration_seconds_bucket", {"le": "0.005"}) == 2
    assert value("transmuter_cache_miss_count_total", {"position": "7"}) == 1
    assert value("transmuter_hub_download_stop_bytes_total") == 2_500_000
    assert value("transmuter_memory_stats_active_memory_bytes", {"device": "cpu:0"}) == 20
    assert value("transmuter_batch_stop_size_bucket", {"le": "8.0"}) == 0
    assert value("transmuter_batch_stop_size_bucket", {"le": "64.0"}) == 1


async def test_opentelemetry_metrics() -> None:
    bus, reader = Telemetry(), InMemoryMetricReader()
    provider = MeterProvider(metric_readers=[reader])
    async with OpenTelemetryMetrics(bus, DEFINITIONS, meter=provider.get_meter("test")):
        emit_all(bus)
    data = reader.get_metrics_data()
    assert data is not None
    found = {each.name: each for each in data.resource_metrics[0].scope_metrics[0].metrics}
    call = found["transmuter.call.stop.duration"]
    assert call.unit == "ms"
    assert (call.data.data_points[0].count, call.data.data_points[0].sum) == (2, 8.0)
    assert found["transmuter.cache.miss.count"].data.data_points[0].attributes == {"position": "7"}
    assert found["transmuter.hub.download.stop.bytes"].data.data_points[0].value == 2.5
    assert found["transmuter.memory.stats.active_memory"].data.data_points[0].value == 20
    assert found["transmuter.batch.stop.size"].data.data_points[0].bucket_counts == (0, 0, 1, 0)
    provider.shutdown()


async def test_a_tag_is_bounded_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    bus, registry = Telemetry(), prometheus_client.CollectorRegistry()
    definitions = [counter("n.count", tags=["source"])]
    with caplog.at_level(logging.WARNING, "transmuter_async"):
        async with PrometheusMetrics(bus, definitions, registry=registry):
            for number in range(TAG_VALUES + 20):
                bus.emit("n", {"count": 1}, {"source": ("hf", f"org/{number}", "model.onnx")})
            bus.emit("n", {"count": 1}, {"source": None})
    assert registry.get_sample_value("n_count_total", {"source": "hf/org/0/model.onnx"}) == 1
    assert registry.get_sample_value("n_count_total", {"source": "other"}) == 21
    assert len(caplog.records) == 1
    assert "more than 100 values" in caplog.text


async def test_spans_have_the_callers_span_as_parent() -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = provider.get_tracer("test")
    async with tm.Runtime() as runtime, OpenTelemetrySpans(runtime.telemetry, tracer=tracer):
        compiled = await runtime.compile(breaking())
        parents: dict[int, int] = {}

        async def one(number: int) -> None:
            with tracer.start_as_current_span(f"request {number}") as span:
                await compiled.run({"x": np.array([1, -1, number], np.float32)})
                parents[number] = span.get_span_context().span_id

        async with anyio.create_task_group() as group:
            for number in range(3):
                group.start_soon(one, number)
        with pytest.raises(tm.InputError):
            await compiled.run({})
    spans = exporter.get_finished_spans()
    calls = [span for span in spans if span.name == "transmuter.call"]
    answered = [span for span in calls if span.parent is not None]
    assert {span.parent.span_id for span in answered if span.parent} == set(parents.values())
    (failed,) = [span for span in calls if span.parent is None]
    assert failed.status.status_code is trace.StatusCode.ERROR
    assert "InputError" in (failed.status.description or "")
    breaks = [span for span in spans if span.name == "transmuter.break"]
    assert len(breaks) == 3
    ids = {span.context.span_id for span in calls if span.context}
    assert all(span.parent is not None and span.parent.span_id in ids for span in breaks)
    assert breaks[0].attributes is not None
    assert breaks[0].attributes["transmuter.op_type"] == "NonZero"
    for span in spans:
        assert span.end_time is not None
        assert span.start_time is not None
        assert span.end_time >= span.start_time
    provider.shutdown()


async def test_a_call_inside_of_a_span_that_is_not_exported_keeps_the_callers_context() -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = provider.get_tracer("test")
    bus = Telemetry()
    async with OpenTelemetrySpans(bus, tracer=tracer):
        with (
            tracer.start_as_current_span("request") as request,
            bus.span("transmuter.batch", {}),
            bus.span("transmuter.call", {}),
        ):
            pass
    (call,) = [span for span in exporter.get_finished_spans() if span.name == "transmuter.call"]
    assert call.parent is not None
    assert call.parent.span_id == request.get_span_context().span_id
    provider.shutdown()


async def test_spans_whose_end_was_dropped_do_not_stand_in_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "OPEN", 4)
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = provider.get_tracer("test")
    bus = Telemetry()
    async with OpenTelemetrySpans(bus, tracer=tracer) as spans:
        for _ in range(10):
            bus.span("transmuter.call", {"actor": "never ends"}).start()
        with tracer.start_as_current_span("request") as request, bus.span("transmuter.call", {"actor": "ends"}):
            pass
    found = [span for span in exporter.get_finished_spans() if span.name == "transmuter.call"]
    assert [span.attributes.get("transmuter.lost") for span in found if span.attributes] == [True] * 7 + [None]
    assert found[-1].parent is not None
    assert found[-1].parent.span_id == request.get_span_context().span_id
    assert len(spans._open) == 3
    provider.shutdown()


async def test_real_calls_are_counted() -> None:
    registry = prometheus_client.CollectorRegistry()
    async with (
        tm.Runtime() as runtime,
        PrometheusMetrics(
            runtime.telemetry,
            [
                summary("transmuter.call.stop.duration", unit="second", tags=["actor"]),
                counter("transmuter.cache.hit.count"),
            ],
            registry=registry,
        ),
    ):
        compiled = await runtime.compile(affine(), name="affine")
        for _ in range(3):
            await compiled.run({"x": rows(2)})
    assert registry.get_sample_value("transmuter_call_stop_duration_seconds_count", {"actor": "affine"}) == 3
    assert registry.get_sample_value("transmuter_cache_hit_count_total") == 2


async def test_a_serving_through_both_exporters() -> None:
    bus, registry, reader = Telemetry(), prometheus_client.CollectorRegistry(), InMemoryMetricReader()
    facts = {"serving": "s", "bucket": "sequence=16"}
    meters = MeterProvider([reader])
    async with (
        PrometheusMetrics(bus, metrics.SERVING, registry=registry),
        OpenTelemetryMetrics(bus, metrics.SERVING, meter=meters.get_meter("test")),
    ):
        stop = {"duration": 2_000_000, "size": 3, "padding": 0.25, "oldest_wait": 7_000_000, "queue_depth": 9}
        bus.emit("transmuter.batch.stop", stop, facts)
        bus.emit("transmuter.queue.rejected", {"count": 1}, {**facts, "why": "deadline"})
        bus.emit("transmuter.breaker.opened", {"count": 1, "retry_after": 1}, {**facts, "reason": "RuntimeError"})
    value = registry.get_sample_value
    assert value("transmuter_batch_stop_size_bucket", {"serving": "s", "le": "2.0"}) == 0
    assert value("transmuter_batch_stop_size_bucket", {"serving": "s", "le": "4.0"}) == 1
    assert value("transmuter_batch_stop_padding_sum", {"serving": "s"}) == 0.25
    assert value("transmuter_batch_stop_oldest_wait_seconds_sum", facts) == pytest.approx(0.007)
    assert value("transmuter_batch_stop_queue_depth", {"serving": "s"}) == 9
    assert value("transmuter_queue_rejected_count_total", {"serving": "s", "why": "deadline"}) == 1
    assert value("transmuter_breaker_opened_count_total", {"serving": "s"}) == 1
    meters.shutdown()


def test_definitions_are_checked() -> None:
    with pytest.raises(ValueError, match="names no measurement"):
        counter("duration")
    with pytest.raises(ValueError, match="unit='hour'"):
        summary("a.b", unit="hour")
    with pytest.raises(ValueError, match="no metrics"):
        PrometheusMetrics(Telemetry(), [], registry=prometheus_client.CollectorRegistry())
    assert sum_("a.b.c", unit="megabyte").divisor == 10**6


async def test_an_error_of_the_block_goes_on_as_it_is() -> None:
    with pytest.raises(KeyError, match="mine"):
        async with PrometheusMetrics(Telemetry(), [counter("a.b")], registry=prometheus_client.CollectorRegistry()):
            raise KeyError("mine")
