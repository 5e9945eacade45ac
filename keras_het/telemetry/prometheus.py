"""The latest steps as Prometheus metrics, served over HTTP while a model trains."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from keras_het.planning.diagnosis.recording import HARDWARE, PHASES, Recording
from keras_het.planning.diagnosis.statistics import throughput

if TYPE_CHECKING:
    from prometheus_client.core import Metric

_LATEST_STEPS = 50
_UNITS = {"1": "ratio", "By": "bytes", "By/s": "bytes_per_second", "W": "watts", "Hz": "hertz"}
_UNITS |= {"Cel": "celsius", "{cpu}": "cpus"}


class PrometheusEndpoint:
    """An HTTP server on which Prometheus finds `/metrics`, with means over the latest steps."""

    def __init__(self, recording: Callable[[], Recording], port: int, address: str) -> None:
        try:
            import prometheus_client
        except ImportError as error:
            raise ImportError(
                "prometheus_port needs the package prometheus-client, which is not installed. "
                'Install the extra, in the checkout: pip install ".[prometheus]".'
            ) from error
        self._recording = recording
        registry = prometheus_client.CollectorRegistry(auto_describe=False)
        registry.register(self)
        try:
            self._server, self._thread = prometheus_client.start_http_server(
                port, address, registry
            )
        except OSError as error:
            raise OSError(
                error.errno,
                f"Prometheus's metrics cannot be served on {address}:{port}: {error.strerror}. "
                "Give Telemetry a free prometheus_port, and an address of this machine",
            ) from error
        self.port = int(self._server.server_port)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def collect(self) -> Iterator[Metric]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        recording = self._recording()
        last = int(recording.steps[-1]) if len(recording.steps) else -1
        rows = recording.between(last - _LATEST_STEPS + 1, 2**62)
        names = [device.name for device in recording.devices]

        def gauge(name: str, text: str, labels: Sequence[str], values: Mapping[Any, Any]) -> Any:
            family = GaugeMetricFamily(name, text, labels=labels)
            for of_labels, value in values.items():
                if not np.isnan(value):
                    family.add_metric(of_labels, float(value))
            return family

        def by_device(values: Any, *more: str) -> dict[tuple[str, ...], Any]:
            return {(name, *more): value for name, value in zip(names, values, strict=True)}

        steps = CounterMetricFamily("keras_het_steps", "Steps of the training.")
        steps.add_metric([], float(last + 1))
        yield steps
        if len(rows.steps):
            of_phases = [by_device(getattr(rows, phase).mean(axis=0), phase) for phase in PHASES]
            seconds = {key: value for each in of_phases for key, value in each.items()}
            text, labels = "Parts of a step.", ["device", "phase"]
            yield gauge("keras_het_step_seconds", text, labels, seconds)
            shares = by_device(rows.shares[-1])
            yield gauge("keras_het_share_samples", "Samples a step.", ["device"], shares)
            speed = {(): throughput(rows.wall, rows.samples).samples_per_second}
            yield gauge("keras_het_samples_per_second", "Samples of all devices.", [], speed)
        for quantity, (unit, _) in HARDWARE.items():
            values = recording.hardware.get(quantity)
            if values is not None and np.isfinite(values[-1:]).any():
                # OpenTelemetry's name, as its exporter for Prometheus writes it
                name = "_".join(filter(None, [quantity.replace(".", "_"), _UNITS.get(unit, "")]))
                text = f"{quantity} of a device or its worker."
                yield gauge(name, text, ["device"], by_device(values[-1]))
