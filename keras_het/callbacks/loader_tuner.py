"""Tune the input pipeline while it runs, so that no device waits for data."""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

from keras_het.fit.model_strategy import local_replicas
from keras_het.fit.session import BatchEnds, Batches, FitSession, Rank, StepFunction
from keras_het.loader.host_budget import HostBudget
from keras_het.loader.host_threads import available_memory
from keras_het.loader.input.tuning_session import Move, TuningSession
from keras_het.loader.iterators.inspection import PipelineReport, show
from keras_het.loader.iterators.live_iterator import InputWaitMeter, LiveIterator
from keras_het.loader.iterators.tunable import Knobs
from keras_het.planning.argument_checks import check_flag, check_number, check_one_of, check_verbose
from keras_het.planning.loader import LoaderController, LoaderPlan, TunerController
from keras_het.strategy.keras_calls import SessionCallback

_logger = logging.getLogger(__name__)

_DEFAULT_MEMORY_FRACTION = 0.25


class LoaderTuner(SessionCallback):
    """Callback that changes an input pipeline's parallelism and buffers mid-epoch, exactly.

    With a dataset of `keras_het.loader.tunable_pipeline`, everything its builder reads is tuned;
    with an ordinary `tf.data.Dataset`, its thread pool, the priority of its threads and the
    `prefetch` at its end. A change hands over the running pipeline with its buffers: no element is
    lost, repeated or reordered. Under `HeterogeneousStrategy` each worker changes its own data
    path, in the common order. Pipelines that cannot be handed over, and those of TensorFlow's own
    strategies, are only observed; the log says why.

    Loaders are added only while the device waits and the host has the resources; each move is
    confirmed by measurement and reverted if it does not pay.

    With `steps_per_execution` above 1, input waits cover whole executions.

    Args:
        controller: "tuner", "fixed" (measures but changes nothing), or a function that takes the
            first plan and the number of CPUs and returns an object with the methods of
            `keras_het.planning.loader.LoaderController`.
        max_memory: largest total size in bytes of batches in preparation or waiting; by default a
            quarter of the memory available at the start of training, in the host and in its
            container.
        nice: nice value of the pipeline's own threads, which makes them yield to training steps
            while no other program keeps the host busy; 0 leaves them unchanged.
        cooperate_with_other_jobs: whether jobs of the same user on this host share its CPUs and
            `max_reader_threads`.
        max_reader_threads: total reading threads of all jobs on this host, for loaders that mostly
            wait for I/O; None for no bound. If several jobs set one, the smallest applies.
        verbose: whether to print the moves.

    Attributes:
        train_input_wait: input wait of every training step.
        test_input_wait: input wait of the steps of `evaluate`, including those within `fit`.
        predict_input_wait: input wait of the steps of `predict`.
        moves: the changes, with the measurements behind them.
        replicas: devices of this process's most recent replicas, by number.

    Raises:
        ValueError: if the controller is unknown, or a number is out of range.
        RuntimeError: by `fit`, if a callback of another `fit` calls it with the same instance.
    """

    def __init__(
        self,
        controller: str | Callable[[LoaderPlan, float], LoaderController] = "tuner",
        *,
        max_memory: int | None = None,
        nice: int = 10,
        cooperate_with_other_jobs: bool = True,
        max_reader_threads: int | None = None,
        verbose: int = 0,
    ) -> None:
        super().__init__()
        if not callable(controller):
            check_one_of("controller", controller, ("tuner", "fixed"), ", or a function")
        check_number("max_memory", max_memory, above=0, or_none=True)
        check_number("nice", nice, least=0, most=19, whole=True)
        check_number("max_reader_threads", max_reader_threads, least=1, whole=True, or_none=True)
        check_flag("cooperate_with_other_jobs", cooperate_with_other_jobs)
        check_verbose(verbose)
        if max_reader_threads is not None and not cooperate_with_other_jobs:
            raise ValueError(
                "max_reader_threads is divided among the jobs of the host. Received: "
                f"max_reader_threads={max_reader_threads}, cooperate_with_other_jobs=False. Leave "
                "one of them out."
            )
        self._controller = controller
        self._max_memory = max_memory
        self._nice = nice
        self._share_host = cooperate_with_other_jobs
        self._io_budget = max_reader_threads
        self._verbose = verbose
        self.train_input_wait = InputWaitMeter()
        self.test_input_wait, self.predict_input_wait = InputWaitMeter(), InputWaitMeter()
        self.moves: list[Move] = []
        self.replicas: dict[int, str] = {}
        self._session: TuningSession | None = None
        self._fit: FitSession | None = None
        self._ends: BatchEnds | None = None
        self._best: LoaderSettings | None = None
        self._last_reason: str | None = None
        self._last_report: PipelineReport | None = None
        self._last_start: float | None = None
        self._last = (0.0, 0)
        self._batch = 0
        self._asked = 0.0
        self._epoch_start = (0.0, 0.0)

    # --- fit

    def before_look(self, data: object) -> None:
        """Prepare a strategy's data before Keras looks at its first batch."""
        tuning = getattr(data, "tuning", None)
        if tuning is not None and self._controller != "fixed":
            tuning.begin()

    def on_train_begin(self, logs: Mapping[str, float] | None = None) -> None:
        if self._session is not None and self._fit is not None:
            raise RuntimeError(
                "A LoaderTuner tunes one pipeline at a time. Received: the same LoaderTuner in a "
                "fit and in one that a callback of that fit calls. Give the inner fit another "
                "one, or none."
            )
        self._release()
        self._session = session = self._make_session()
        self.moves = session.moves
        self._ends = BatchEnds(self.model)
        self.replicas = local_replicas(self.model)
        self._fit = fit = self._fit_session
        if fit is not None:
            fit.add_layer(Rank.TUNE_LOADER, functools.partial(self._train_step, fit, session))
            fit.before_inner(self._before_inner)
            fit.before_callbacks("on_epoch_end", self._end_epoch)
            fit.on_end(self._release)

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, float] | None = None) -> None:
        """Exclude the time between epochs from the steps."""
        self._last_start = None
        if self._ends is not None:
            self._ends.begin_epoch()
        if self._session is not None:
            self._session.begin_epoch()
        self._epoch_start = self.train_input_wait.seconds, self.train_input_wait.input_wait_seconds

    def on_train_batch_begin(self, batch: int, logs: Mapping[str, float] | None = None) -> None:
        self._batch = batch

    def _end_epoch(self, epoch: int, logs: dict[str, float] | None) -> None:
        """Add the input wait to the epoch logs, for all callbacks."""
        self._end_of_steps()
        seconds = self.train_input_wait.seconds - self._epoch_start[0]
        wait = self.train_input_wait.input_wait_seconds - self._epoch_start[1]
        if logs is not None:
            logs["input_wait_fraction"] = wait / seconds if seconds else 0.0

    def on_train_end(self, logs: Mapping[str, float] | None = None) -> None:
        self._release()
        if self._verbose:
            sys.stdout.write(f"\n{self.best_settings()}\n")

    def _release(self) -> None:
        """Release the host and restore Keras's state."""
        self._last_start = self._fit = None
        self._best = self._settings() or self._best
        if self._ends is not None:
            self._ends.release()
            self._ends = None
        if self._session is not None:
            self._last_reason = self._session.observe_only_reason
            session, self._session = self._session, None
            try:
                self._last_report = session.last_report()
            finally:
                session.close()

    def _train_step(
        self,
        fit: FitSession,
        session: TuningSession,
        step: StepFunction,
        iterator: Batches,
    ) -> object:
        if session is not self._session or isinstance(iterator, list):
            return step(iterator)  # read ahead: not from the epoch's pipeline
        self._account()
        live = session.live
        if live is None or live.given is not iterator:
            live = session.open(iterator)
        start = time.perf_counter()
        result, wait, steps = live.run(step, fit.model.steps_per_execution)
        self._last_start, self._last = start, (wait, steps)
        return result

    def _before_inner(self, inner: FitSession) -> None:
        if inner.loop == "fit":
            self._end_of_steps()

    def _end_of_steps(self) -> None:
        """Mark the end of steps: what follows, such as validation, is not part of the last step."""
        self._account(is_last=True)
        self._last_start = None

    def _account(self, is_last: bool = False) -> None:
        """Record the previous execution, whose time ends now."""
        if self._last_start is None or self._session is None:
            return
        end = self._ends.time_of(self._batch) if is_last and self._ends is not None else None
        seconds = (time.perf_counter() if end is None else end) - self._last_start
        wait, steps = self._last
        self._last = (0.0, 0)
        if steps:
            self.train_input_wait.add(seconds, wait, steps)
            moves = len(self._session.moves)
            self._session.after_step(seconds, wait, steps, is_last)
            for move in self._session.moves[moves:]:
                if self._fit is not None:
                    self._fit.note_change("loader", str(move.plan))
                if self._verbose:
                    sys.stdout.write(f"\nstep {move.step}: {move.plan}\n")
        elif is_last:
            self._session.end_epoch()

    # --- evaluate and predict

    def on_test_begin(self, logs: Mapping[str, float] | None = None) -> None:
        self._end_of_steps()
        self.replicas = local_replicas(self.model)
        session = FitSession.of(self.model)
        if session is not None:
            evaluation = _Evaluation(self)
            session.add_layer(Rank.TUNE_LOADER, evaluation.step)
            session.on_end(evaluation.end)

    def on_predict_begin(self, logs: Mapping[str, float] | None = None) -> None:
        self.replicas = local_replicas(self.model)
        session = FitSession.of(self.model)
        if session is not None:
            session.add_layer(Rank.TUNE_LOADER, self._predict_step)

    def on_predict_batch_begin(self, batch: int, logs: Mapping[str, float] | None = None) -> None:
        """Record the time from which `predict` waits for its batches."""
        self._asked = time.perf_counter()

    def _predict_step(self, step: StepFunction, batches: Batches) -> object:
        wait = time.perf_counter() - self._asked
        result = step(batches)
        steps = len(batches) if isinstance(batches, list) else 1
        self.predict_input_wait.add(time.perf_counter() - self._asked, wait, steps)
        return result

    # --- results

    @property
    def observe_only_reason(self) -> str | None:
        """Why the current or last training was only observed; None if it was tuned."""
        return self._session.observe_only_reason if self._session is not None else self._last_reason

    def inspect(self, file: IO[str] | None = None) -> PipelineReport:
        """Print the activity of the running pipeline; see `keras_het.loader.inspect`.

        After `fit`, and after a move (which TensorFlow does not record), this prints the last
        observed state: within the epoch, or to the end of training for a pipeline with a shuffle.
        An ordinary dataset with a seeded shuffle, or with a cache in memory, is moved before its
        first batch, so nothing is known about it.

        Args:
            file: where to print, the terminal by default.

        Raises:
            RuntimeError: if nothing has been trained, or under one of TensorFlow's own strategies.
        """
        session = self._session
        report = self._last_report if session is None else session.report()
        if report is None:
            raise RuntimeError(_why_nothing_to_inspect(session))
        show(report, file)
        return report

    def best_settings(self) -> LoaderSettings:
        """Return the settings in effect, as code to paste.

        A move that no measurement has confirmed yet does not count.

        Raises:
            RuntimeError: if nothing has been trained yet.
        """
        found = self._settings() or self._best
        if found is None:
            raise RuntimeError("There are no settings yet. Call fit with this callback first.")
        return found

    def _settings(self) -> LoaderSettings | None:
        session = self._session
        if session is None:
            return None
        return LoaderSettings(session.knobs, _code_of(session, self.train_input_wait))

    @property
    def replica_waits(self) -> dict[int, Any]:
        """Return the input waits of the latest training steps in seconds, by replica, oldest first.

        All replicas of a process have equal waits: they get their batches in one element, and none
        begins a step before all have theirs. A replica with an empty share waits with them.
        """
        return self._by_replica(self.train_input_wait)

    @property
    def test_replica_waits(self) -> dict[int, Any]:
        """Return the same for the steps of `evaluate`."""
        return self._by_replica(self.test_input_wait)

    @property
    def predict_replica_waits(self) -> dict[int, Any]:
        """Return the same for the steps of `predict`."""
        return self._by_replica(self.predict_input_wait)

    def _by_replica(self, meter: InputWaitMeter) -> dict[int, Any]:
        return {replica: meter.input_waits for replica in self.replicas}

    def to_dict(self) -> dict[str, Any]:
        """Return waits and moves as plain Python values, for JSON."""
        meters = {
            "train": self.train_input_wait,
            "test": self.test_input_wait,
            "predict": self.predict_input_wait,
        }
        waits = {name: meter.to_dict() for name, meter in meters.items()}
        sums = {
            name: {key: found[key] for key in ("input_wait_seconds", "idle_fraction")}
            for name, found in waits.items()
        }
        replicas = [
            {"replica": replica, "device": device, **sums}
            for replica, device in self.replicas.items()
        ]
        moves = [move.to_dict() for move in self.moves]
        return {**waits, "replicas": replicas, "moves": moves}

    def save(self, path: str | Path) -> None:
        """Write `to_dict()` to a JSON file.

        Args:
            path: the file.
        """
        Path(path).write_text(json.dumps(self.to_dict(), indent=1) + "\n")

    def _make_session(self) -> TuningSession:
        budget = self._make_budget()
        if self._controller == "fixed":
            # Not even their priority: threads stay unchanged.
            return TuningSession(self._make_controller, 0, budget, _FIXED)
        return TuningSession(self._make_controller, self._nice, budget)

    def _make_budget(self) -> HostBudget | None:
        try:
            return HostBudget(max_reader_threads=self._io_budget) if self._share_host else None
        except OSError as error:
            _logger.warning("Jobs on this host do not share it: %s.", error)
            return None

    def _make_controller(
        self, plan: LoaderPlan, cpus: float, max_prefetch: int | None
    ) -> LoaderController:
        if callable(self._controller):
            return self._controller(plan, cpus)
        memory = self._max_memory
        if memory is None:
            memory = max(int(available_memory() * _DEFAULT_MEMORY_FRACTION), 1)
        return TunerController(
            plan,
            cpus,
            max_loaders=max(128, plan.loaders),
            max_prefetch=max_prefetch or max(64, plan.prefetch),
            max_memory=memory,
        )


class _Evaluation:
    """Timing of the steps of one `evaluate`."""

    def __init__(self, tuner: LoaderTuner) -> None:
        self._tuner, self._model = tuner, tuner.model
        self._live: LiveIterator | None = None

    def step(self, step: StepFunction, iterator: Batches) -> object:
        if isinstance(iterator, list):
            return step(iterator)
        if self._tuner._session is not None:  # keeps its part of the host during long validations
            self._tuner._session.share.heartbeat()
        start = time.perf_counter()
        if self._live is None or self._live.given is not iterator:
            self._live = LiveIterator(iterator)
        result, wait, steps = self._live.run(step, self._model.steps_per_execution)
        self._tuner.test_input_wait.add(time.perf_counter() - start, wait, steps)
        return result

    def end(self) -> None:
        if self._live is not None:
            self._live.release()


_FIXED = 'controller="fixed" measures, and changes nothing'


def _why_nothing_to_inspect(session: TuningSession | None) -> str:
    live = session.live if session is not None else None
    if live is None or live.is_tf_data:
        return (
            "There is no pipeline to show. Call inspect within fit, from another callback, or "
            "after a fit with this callback."
        )
    reason = getattr(live.given, "why_path_stays", None)
    if reason is not None:
        return (
            f"The pipeline of this training is not seen: {reason}. Give the dataset to "
            "keras_het.loader.inspect, or leave that out for this training."
        )
    return (
        "inspect shows one pipeline of tf.data for each worker. Received: the input of a "
        f"distribution strategy ({type(live.given).__name__}), whose pipelines are not known. Give "
        "the dataset to keras_het.loader.inspect without the strategy."
    )


@dataclasses.dataclass(frozen=True)
class LoaderSettings:
    """Final settings of a tuner; `str()` of them is code to paste."""

    knobs: Knobs | None
    code: str

    def __str__(self) -> str:
        return self.code


def _code_of(session: TuningSession, meter: InputWaitMeter) -> str:
    """Return Python code that sets what a session has set, without a tuner."""
    knobs = session.knobs
    if knobs is None:
        return f"# Nothing was changed: {session.observe_only_reason or 'no step was trained'}."
    lines = [
        f"# keras_het LoaderTuner, {meter.steps} steps, "
        f"{meter.idle_fraction:.1%} of the time waiting for data."
    ]
    if session.nice:
        lines += [
            f"# The loader's threads ran at nice {session.nice}, for which tf.data has no option. "
            "To keep it without tuning:",
            "# keras_het.callbacks.LoaderTuner(lambda plan, cpus: "
            f"keras_het.planning.loader.FixedController(plan), nice={session.nice})",
        ]
    if session.is_plain:
        last = f"  # last: prefetch({knobs.prefetch})" if session.turns_prefetch else ""
        lines += [
            "options = tf.data.Options()",
            f"options.threading.private_threadpool_size = {knobs.threads}",
            f"dataset = dataset.with_options(options){last}",
        ]
    else:
        lines += [
            f"knobs = keras_het.loader.{knobs}",
            "dataset = keras_het.loader.tunable_pipeline(build, knobs)",
        ]
    return "\n".join(lines)
