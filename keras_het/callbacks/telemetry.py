"""Measure where the time of every step goes, and write it where people look."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import MutableMapping
from pathlib import Path
from typing import TYPE_CHECKING

import keras
import numpy as np

from keras_het.asynchronous.exchange.pace import Pace
from keras_het.asynchronous.exchange.participant import first_async_participant
from keras_het.callbacks.async_workers import AsyncWorkers
from keras_het.fit.model_strategy import heterogeneous_strategy
from keras_het.fit.session import FitSession, Rank
from keras_het.ignored_errors import ignore_errors
from keras_het.planning.argument_checks import (
    check_flag,
    check_folder,
    check_number,
    check_verbose,
    expect,
)
from keras_het.planning.diagnosis.recording import HARDWARE, Recording
from keras_het.planning.diagnosis.statistics import throughput
from keras_het.planning.diagnosis.verdict import Verdict, diagnose
from keras_het.strategy.keras_calls import SessionCallback
from keras_het.telemetry.event_log import EventLog, PipelineLog
from keras_het.telemetry.hardware import HardwareSampler
from keras_het.telemetry.prometheus import PrometheusEndpoint
from keras_het.telemetry.step_recorder import Background, StepRecorder, devices_of

if TYPE_CHECKING:
    from keras_het.strategy.heterogeneous_strategy import HeterogeneousStrategy

_logger = logging.getLogger(__name__)
_INTERVAL_SECONDS = 0.5
# Writing takes longer than sampling, and steps wait for the interpreter meanwhile.
_SAMPLES_PER_WRITE = 2
_LATEST_STEPS = 50
# With less, a step would be shown long after it was made.
_LEAST_KEPT = 100
_SHOWN_SECONDS = 0.1
_FOLDER = "telemetry"

Logs = MutableMapping[str, float]


class Telemetry(SessionCallback):
    r"""Callback that shows which device is slow, which one starves, and what that costs.

    Of every step and replica it measures four times that add up to the step's wall time: compute
    time, input wait, sync wait (in the collective: for other replicas, and for the transfer), and
    the rest (update, callbacks, Python). They travel in the collective that each step has anyway;
    only the chief writes. Another thread samples the hardware of all workers (GPUs by NVML, hosts
    and processes) twice a second, and writes the log once.

    Under a `keras_het.PipelineStrategy` a "replica" is a device of the plan: its compute time is
    that of its forward and backward passes, its sync wait the rest of the step's passes (the
    bubble, and transfers), its share the samples of the micro-batches it takes.

    The log also has the plan, the predicted passes of a step, and about every 10 s the measured
    passes of one step.

    The log is for TensorBoard's tab "Heterogeneous" and for `keras-het report`. Keras's logs get
    four numbers, so `History`, `CSVLogger` and other loggers have them: "samples_per_second", by
    the wall clock with stalls; with several replicas "slowest_replica", the number of the one that
    the others wait for, and "slowest_replica_wait_seconds", the seconds that the fastest one waits
    for it in each step, a median; and "input_wait_seconds", the seconds that
    the worker which waits longest for its data waits in each step.

    Every worker needs it, as one of the callbacks of `fit`. A log that cannot be written causes
    one warning; training continues.

    Args:
        log_dir: directory of the log, the one that is given to TensorBoard; None writes none.
        keep_steps: steps that the log has one by one, the first of them. Of later ones it has the
            lowest, the median and the highest value of each 4, and of twice as many whenever the
            number of steps has doubled. Values below 100 count as 100.
        progress: whether Keras's progress bar shows the four numbers, too.
        prometheus_port: port on which the chief serves the metrics for Prometheus; None for none.
            Needs the extra "prometheus".
        prometheus_address: address that it listens on.
        verbose: 1 prints the verdict on the chief at the end of `fit`, or why there is none;
            nothing if `fit` raised an error.

    Attributes:
        verdict: who is slow, why, and what to do, after `fit`; None before. It prints as text; its
            `causes`, worst first, have `kind`, `devices`, `workers`, `share_of_step` (a fraction)
            and `advice`.

    Raises:
        ValueError: if an argument is out of range; by `fit`, if the model does not train under a
            `keras_het.HeterogeneousStrategy`, or there are two of these callbacks.
    """

    _writing = threading.Lock()  # of the class: tuners copy callbacks

    def __init__(
        self,
        log_dir: str | os.PathLike[str] | None = None,
        *,
        keep_steps: int = 20_000,
        progress: bool = False,
        prometheus_port: int | None = None,
        prometheus_address: str = "127.0.0.1",
        verbose: int = 0,
    ) -> None:
        super().__init__()
        check_folder("log_dir", log_dir, or_none=True)
        check_number("keep_steps", keep_steps, least=1, whole=True)
        check_flag("progress", progress)
        # 0 is for any free port
        port = prometheus_port
        check_number("prometheus_port", port, least=0, most=65535, whole=True, or_none=True)
        is_address = isinstance(prometheus_address, str) and prometheus_address != ""
        expected = 'an address such as "127.0.0.1"'
        expect(is_address, expected, prometheus_address=prometheus_address)
        check_verbose(verbose)
        self._log_dir = None if log_dir is None else Path(log_dir) / _FOLDER
        self._keep_steps = max(keep_steps, _LEAST_KEPT)
        self._prometheus = (prometheus_port, prometheus_address)
        self._verbose = verbose
        self._recorder: StepRecorder | None = None
        self._log = EventLog(None, ())
        self._endpoint: PrometheusEndpoint | None = None
        self._pipeline: PipelineLog | None = None
        self._background: Background | None = None
        self._paces: np.ndarray | None = None
        self._samples = 0
        self._shown: dict[str, float] = {}
        self._shown_at = 0.0
        self.verdict: Verdict | None = None
        if progress:
            # Keras calls batch hooks only if there is one, and each call costs it 20 microseconds.
            self.on_train_batch_end = self._show_progress

    def on_train_begin(self, logs: Logs | None = None) -> None:
        strategy = heterogeneous_strategy(self.model, self)
        fit = self._required_session()
        if sum(isinstance(each, Telemetry) for each in fit.callbacks) > 1:
            raise ValueError(
                "One Telemetry records a fit. Received: two among its callbacks. Leave one out."
            )
        strategy._measure_phases(self.model, len(HARDWARE))
        strategy._sample_steps(fit)
        phases = strategy.extended.compute_times.phases
        local = list(phases.devices)
        sampler = HardwareSampler(local)
        fit.on_end(sampler.close)
        devices = devices_of(strategy, local, sampler.products)
        recorder = self._recorder = StepRecorder(strategy, devices)

        def tick() -> None:
            phases.send_samples(np.asarray(sampler.sample()))
            self._write_new(strategy, recorder)

        def begin(*_: object) -> None:
            if self._background is None:
                self._begin(strategy, recorder, fit)
                self._background = Background(tick, _INTERVAL_SECONDS)

        def end_epoch(epoch: int, logs: Logs | None) -> None:
            if logs is not None:
                if fit.has_layer(Rank.REDUCE_LOCALLY):
                    recorder.complete(strategy)
                self._write_steps(recorder)
                logs.update(recorder.logs())  # which all callbacks get

        phases.send_samples(np.asarray(sampler.sample()))
        fit.before_callbacks("on_epoch_begin", begin)
        fit.before_callbacks("on_epoch_end", end_epoch)

    def _begin(
        self, strategy: HeterogeneousStrategy, recorder: StepRecorder, fit: FitSession
    ) -> None:
        """Begin with the step that comes next: only now a backup's is known."""
        recorder.begin(int(keras.ops.convert_to_numpy(self.model.optimizer.iterations)))
        folder = self._log_dir if strategy.is_chief else None
        first, names = recorder.first_step, tuple(HARDWARE)
        self._log = EventLog(folder, recorder.devices, names, self._keep_steps, first_step=first)
        fit.on_end(self._log.close)
        port, address = self._prometheus
        if port is not None and strategy.is_chief:
            self._endpoint = PrometheusEndpoint(recorder.recording, port, address)
            fit.on_end(self._endpoint.close)
        if hasattr(strategy, "measured_timeline"):  # importing PipelineStrategy might fail
            self._pipeline = PipelineLog(strategy, recorder, self._log)
        fit.on_change(lambda kind, text: self._log.write_change(recorder.note_change(kind, text)))
        # before the log is closed
        fit.on_end(lambda: self._end(recorder, strategy.is_chief, fit.error))

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Exclude the time between epochs from the steps."""
        if self._recorder is not None:
            pause = self._recorder.begin_epoch()
            if pause is not None:
                self._log.write_pause(*pause)

    def recording(self) -> Recording:
        """Return the latest steps of the present or latest `fit`.

        Raises:
            RuntimeError: before the first `fit`.
        """
        if self._recorder is None:
            raise RuntimeError("Nothing is recorded yet. Give this callback to model.fit first.")
        return self._recorder.recording()

    def _show_progress(self, batch: int, logs: Logs | None = None) -> None:
        if self._recorder is None or logs is None:
            return
        now = time.monotonic()
        if now - self._shown_at > _SHOWN_SECONDS or not self._shown:
            self._recorder.read()
            self._shown_at, self._shown = now, self._recorder.logs(latest=_LATEST_STEPS)
        logs.update(self._shown)

    def _watch_async_workers(self, strategy: HeterogeneousStrategy, step: int) -> None:
        """Ask tasks of a hybrid training for their paces, and write the paces of async workers."""
        fit = FitSession.of(self.model)
        callbacks = [] if fit is None else fit.callbacks
        found = [each._participant for each in callbacks if isinstance(each, AsyncWorkers)]
        participant = found[0] if found else None
        if participant is None:
            return
        participant.shows_paces = True
        paces = participant.paces
        if paces is None or paces is self._paces:
            return
        self._paces = paces
        for number, row in enumerate(paces[first_async_participant(strategy) :]):
            pace = Pace(*row)
            if pace.samples_per_second > 0:
                self._log.write_async(
                    step,
                    number,
                    staleness=pace.staleness,
                    exchange_seconds=pace.answer_seconds,
                    samples_per_second=pace.samples_per_second,
                )

    def _write_new(self, strategy: HeterogeneousStrategy, recorder: StepRecorder) -> None:
        sampled = recorder.sample()
        if sampled is not None:
            self._log.write_hardware(*sampled)
        self._samples += 1
        if self._samples % _SAMPLES_PER_WRITE:
            return
        self._write_steps(recorder)
        if self._pipeline is not None:
            self._pipeline.write()
        self._watch_async_workers(strategy, recorder.next_step)
        self._log.flush()

    def _write_steps(self, recorder: StepRecorder) -> None:
        # two threads come here, and what is written later counts where blocks overlap
        with self._writing:
            blocks = recorder.take_new()
            for first, rows, measured in blocks:
                self._log.write_steps(first, rows, measured)
        if not blocks:
            return
        numbers = recorder.logs(latest=len(rows))
        curves = {
            "step_seconds": throughput(rows[:, :4].sum(axis=1), rows[:, 4, 0]).step_seconds,
            "samples_per_second": numbers.get("samples_per_second"),
            "slowest_replica_wait_seconds": numbers.get("slowest_replica_wait_seconds"),
            "input_wait_seconds": numbers.get("input_wait_seconds"),
        }
        known = {
            f"heterogeneous/{name}": value
            for name, value in curves.items()
            if value is not None and value == value
        }
        self._log.write_scalars(first + len(rows) - 1, known)

    def _end(self, recorder: StepRecorder, is_chief: bool, error: BaseException | None) -> None:
        """Stop the thread and give the verdict, however the `fit` ended."""
        if self._background is not None:
            self._background.stop()
        with ignore_errors("writing the last steps"):  # after an error there may be none
            self._write_steps(recorder)
        with ignore_errors("writing the last passes"):
            if self._pipeline is not None:
                self._pipeline.write(is_last=True)
        try:
            self.verdict = diagnose(recorder.recording())
        except Exception as problem:  # a verdict is not worth the end of a training
            _logger.warning("Telemetry: the diagnosis failed.", exc_info=problem)
            self.verdict = Verdict((), (), (f"the diagnosis failed: {problem!r}",))
        # below an error "nothing to do" would be wrong; a signal is no error of the training
        if self._verbose and is_chief and not isinstance(error, Exception):
            sys.stdout.write(f"\n{self.verdict}\n")
        self._background = self._endpoint = self._pipeline = None
