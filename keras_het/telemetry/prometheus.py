"""The latest steps as Prometheus metrics, served over HTTP while a model trains."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from keras_het.planning.diagnosis.recording import HARDWARE, PHASES, Recording
from keras_het.planning.diagnosis.steps import throughput

if TYPE_CHECKING:
    from prometheus_client.core import Metric

_LATEST_STEPS = 50
_UNITS = {"1": "ratio", "By": "bytes", "By/s": "bytes_per_second", "W": "watts", "Hz": "hertz"}
_UNITS |= {"Cel": "celsius", "{cpu}": "cpus"}


class PrometheusEndpoint:
    """An HTTP server on which Prometheus finds `/metrics`.

    Times are means over the latest 50 steps. Names of sampled quantities are OpenTelemetry's, as
    its exporter for Prometheus writes them.
    """

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
        rows = (
            recording.between(int(recording.steps[-1]) - _LATEST_STEPS + 1, 2**62)
            if len(recording.steps)
            else recording
        )
        names = [device.name for device in recording.devices]
        steps = CounterMetricFamily("keras_het_steps", "Steps of the training.")
        steps.add_metric([], float(recording.steps[-1] + 1) if len(recording.steps) else 0.0)
        yield steps
        phases = GaugeMetricFamily(
            "keras_het_step_seconds", "Parts of a step.", labels=["device", "phase"]
        )
        shares = GaugeMetricFamily("keras_het_share_samples", "Samples a step.", labels=["device"])
        rate = GaugeMetricFamily("keras_het_samples_per_second", "Samples a second of all devices.")
        if len(rows.steps):
            for phase in PHASES:
                for name, value in zip(names, getattr(rows, phase).mean(axis=0), strict=True):
                    phases.add_metric([name, phase], float(value))
            for name, value in zip(names, rows.shares[-1], strict=True):
                shares.add_metric([name], float(value))
            speed = throughput(rows.wall, rows.samples).samples_per_second
            if not np.isnan(speed):
                rate.add_metric([], speed)
        yield from (phases, shares, rate)
        for quantity, (unit, _) in HARDWARE.items():
            values = recording.hardware.get(quantity)
            if values is None or not len(values):
                continue
            family = GaugeMetricFamily(
                "_".join(filter(None, [quantity.replace(".", "_"), _UNITS.get(unit, "")])),
                f"{quantity} of a device or its worker.",
                labels=["device"],
            )
            for name, value in zip(names, values[-1], strict=True):
                if not np.isnan(value):
                    family.add_metric([name], float(value))
            if family.samples:
                yield family
