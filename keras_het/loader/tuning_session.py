"""One training that is tuned: measures windows, asks the controller, puts plans into effect."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import logging
import time
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_het import private_api
from keras_het.loader.adjustable_pipeline import (
    AdjustablePipeline,
    build_tuned,
    plain_pipeline,
    prefetch_size,
    threads_of,
)
from keras_het.loader.handover import HandoverError, has_memory_cache, why_not
from keras_het.loader.host_budget import HostBudget
from keras_het.loader.host_cpus import IdleCpus, usable_cpus
from keras_het.loader.knobs import Knobs
from keras_het.loader.live_iterator import LiveIterator
from keras_het.planning.loader import (
    FixedController,
    JobModel,
    LoaderController,
    LoaderPlan,
    LoaderWindow,
    StepSums,
)

logger = logging.getLogger("keras_het")

MakeController = Callable[[LoaderPlan, float, int | None], LoaderController]
"""Makes a controller of the first plan, the CPUs, and the largest prefetch if it cannot grow."""

_SECONDS_BETWEEN_UPDATES = 1.0


@dataclasses.dataclass
class Move:
    """A plan that was put into effect, or refused.

    Args:
        step: steps that were trained before.
        plan: the plan.
        window: the measurement that led to it.
        handover_seconds: how long training stood still for it.
        refused: why it was not put into effect, None if it was.
    """

    step: int
    plan: LoaderPlan
    window: LoaderWindow
    handover_seconds: float = 0.0
    refused: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """The move as plain Python values, for JSON."""
        return {**dataclasses.asdict(self), "reason": self.plan.reason}


class TuningSession:
    """Tunes the pipeline of one `fit`.

    Args:
        make_controller: makes the controller once the pipeline is known.
        nice: nice value of the pipeline's own threads.
        budget: divides the host among its jobs; None if this job is alone.

    Attributes:
        moves: what was done.
        observes_only: why nothing is changed, None if it may be.
        pipeline: the pipeline that is tuned, None before the first step.
    """

    def __init__(
        self, make_controller: MakeController, nice: int = 0, budget: HostBudget | None = None
    ) -> None:
        self._make_controller = make_controller
        self._nice = nice
        self._budget = budget
        self._plain: tuple[Any, AdjustablePipeline] | None = None
        self.pipeline: AdjustablePipeline | None = None
        self.live: LiveIterator | None = None
        self.controller: LoaderController | None = None
        self.observes_only: str | None = None
        self.moves: list[Move] = []
        self._sums: StepSums | None = None
        self._idle = IdleCpus()
        self._cpu_mark: float | None = None
        self._steps = 0
        self._epochs = 0
        self._batch: list[Any] = []
        self._built: dict[Knobs, Any] = {}
        self._building: tuple[Knobs, Move, concurrent.futures.Future[Any]] | None = None
        self._executor: concurrent.futures.ThreadPoolExecutor | None = None
        self._updated = 0.0
        self.job: JobModel | None = None

    def open(self, iterator: Any) -> LiveIterator:
        """Begins to read an iterator that the training loop was given.

        Args:
            iterator: of a new epoch.

        Returns:
            What to read instead.
        """
        if self.live is not None:
            self.live.let_go(is_held_elsewhere=False)
        self._epochs += 1
        live = LiveIterator(iterator, self._nice)
        self.live = live
        if self._epochs == 2:
            self._freeze_if_cached()
        adjustable = self._adjustable(live)
        if adjustable is None:
            return live
        if adjustable is not self.pipeline:
            self._begin(adjustable)
        if live.pipeline is None:
            self._move_plain(live, adjustable)
        if self._sums is not None and self.controller is not None:
            self._sums.begin(self._window_of_new_epoch())
        return live

    def after_step(self, seconds: float, input_wait: float, steps: int, batches: list[Any]) -> None:
        """Takes note of one execution; now and then decides, or puts a plan into effect.

        Args:
            seconds: its time.
            input_wait: part of it in which it waited for its batches.
            steps: number of its steps.
            batches: their batches.
        """
        self._steps += steps
        if self._building is not None:
            if self._building[2].done():
                self._put_into_effect()
            return
        sums = self._sums
        if sums is None:
            return
        was_skipping = sums.is_skipping
        full = sums.add(seconds, input_wait, steps)
        if was_skipping and not sums.is_skipping:
            self._mark()
        if full:
            self._batch = batches
            self._decide()

    def close(self) -> None:
        """Ends the session; iterators go in the background."""
        if self.live is not None:
            self.live.let_go(is_held_elsewhere=True)
            self.live = None
        if self._budget is not None:
            self._budget.leave()
        if self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)
            self._executor = None
        self._building = None
        self._built.clear()

    # --- which pipeline

    def _adjustable(self, live: LiveIterator) -> AdjustablePipeline | None:
        if live.pipeline is not None:
            return live.pipeline
        dataset = self._plain_data_set(live)
        if dataset is None:
            return None
        if self._plain is None or self._plain[0] is not dataset:
            self._plain = (dataset, plain_pipeline(dataset))
        return self._plain[1]

    def _plain_data_set(self, live: LiveIterator) -> Any:
        if not live.is_tf_data:
            self._only_observe(
                "the data path of a distribution strategy cannot be changed while it runs"
            )
            return None
        return private_api.iterated_data_set(live.given)

    def _begin(self, adjustable: AdjustablePipeline) -> None:
        self.pipeline = adjustable
        self._built = {adjustable.knobs: adjustable.current}
        reason = why_not(adjustable.current)
        plan, cpus = adjustable.knobs.plan, usable_cpus()
        if reason is not None:
            self._only_observe(reason)
            self.controller = FixedController(plan)
        else:
            is_plain = self._plain is not None and self._plain[1] is adjustable
            no_prefetch = is_plain and prefetch_size(self._plain_source()) is None
            most = plan.prefetch if no_prefetch else None
            self.controller = self._make_controller(plan, cpus, most)
        self._sums = StepSums(self.controller.next_window)
        self._mark()

    def _plain_source(self) -> Any:
        return self._plain[0] if self._plain is not None else None

    def _move_plain(self, live: LiveIterator, adjustable: AdjustablePipeline) -> None:
        """Puts an ordinary data set into its own thread pool, before its first element."""
        if self.observes_only is not None:
            return
        try:
            live.move_to(adjustable.current)
        except HandoverError as error:
            self._only_observe(str(error))

    def _freeze_if_cached(self) -> None:
        # a handover would empty a cache that is full by now
        if self.pipeline is not None and has_memory_cache(self.pipeline.current):
            self._only_observe("its cache in memory is full after the first epoch")

    def _only_observe(self, reason: str) -> None:
        if self.observes_only is None:
            self.observes_only = reason
            logger.info("LoaderTuner only observes: %s.", reason)
        self.controller = FixedController(self.controller.plan) if self.controller else None
        self._building = None

    # --- windows and decisions

    def _window_of_new_epoch(self) -> Any:
        window = self.controller.next_window if self.controller else None
        # a pipeline has to start before its throughput can be judged
        return dataclasses.replace(window, skip_steps=max(window.skip_steps, 4)) if window else None

    def _mark(self) -> None:
        self._idle.read()
        self._cpu_mark = self._loader_cpu()

    def _loader_cpu(self) -> float | None:
        threads = threads_of(self.live.iterator) if self.live is not None else None
        return threads.cpu_seconds() if threads is not None else None

    def _decide(self) -> None:
        sums, controller = self._sums, self.controller
        if sums is None or controller is None:
            return
        window = self._measured(sums)
        self._share_host(window)
        plan = controller.observe(window)
        if plan is None:
            sums.begin(controller.next_window)
            self._mark()
        else:
            self._build(plan, window)

    def _measured(self, sums: StepSums) -> LoaderWindow:
        cpu, mark = self._loader_cpu(), self._cpu_mark
        known = cpu is not None and mark is not None
        return LoaderWindow(
            sums.steps,
            sums.seconds,
            sums.input_wait_seconds,
            self._idle.read(),
            max(cpu - mark, 0.0) if known else None,  # type: ignore[operator]
            sum(_bytes_of(leaf) for leaf in tf.nest.flatten(self._batch[:1])),
            sums.waiting_steps,
        )

    def _share_host(self, window: LoaderWindow) -> None:
        job = getattr(self.controller, "job", None)
        if job is None:
            # it does not wait: what it uses now is all it needs
            cpu = (window.loader_cpu_seconds or 0.0) / window.steps
            job = JobModel(max(cpu, 1e-6), max(window.device_seconds, 1e-6), cpu)
        self.job = job
        now = time.monotonic()
        if self._budget is None or now - self._updated < _SECONDS_BETWEEN_UPDATES:
            return
        self._updated = now
        try:
            cpus = self._budget.update(job)
        except OSError as error:
            logger.warning("Jobs on this host do not share it: %s.", error)
            self._budget = None
            return
        if self.controller is not None:
            self.controller.set_cpus(cpus)

    # --- plans

    def _build(self, plan: LoaderPlan, window: LoaderWindow) -> None:
        knobs = Knobs.of_plan(plan)
        move = Move(self._steps, plan, window)
        if self._executor is None:
            self._executor = concurrent.futures.ThreadPoolExecutor(1, "loader_tuner")
        if knobs in self._built:
            future: concurrent.futures.Future[Any] = concurrent.futures.Future()
            future.set_result(self._built[knobs])
        elif self.pipeline is not None:
            future = self._executor.submit(build_tuned, self.pipeline.build, knobs)
        self._building = (knobs, move, future)
        if future.done():
            self._put_into_effect()

    def _put_into_effect(self) -> None:
        if self._building is None or self.controller is None or self._sums is None:
            return
        knobs, move, future = self._building
        self._building = None
        start = time.perf_counter()
        try:
            dataset = future.result()
            if self.live is None or self.pipeline is None:
                return
            self.live.move_to(dataset)
        except Exception as error:  # the user's function may raise anything
            move.refused = str(error) or type(error).__name__
            self.controller.refused(move.plan)
            self._only_observe(move.refused)
        else:
            move.handover_seconds = time.perf_counter() - start
            self._built[knobs] = dataset
            self.pipeline.adopt(knobs, dataset)
            logger.info("Loader at step %d: %s.", self._steps, move.plan)
        self.moves.append(move)
        if self.controller is not None:
            self._sums.begin(self.controller.next_window)
        if not self._sums.is_skipping:
            self._mark()


def _bytes_of(leaf: Any) -> int:
    """Size of a tensor, 0 if it cannot be told."""
    if not isinstance(leaf, tf.Tensor) or leaf.dtype in (tf.string, tf.variant):
        return 0
    return int(leaf.shape.num_elements() or 0) * int(leaf.dtype.size)
