"""One tuned training: it measures windows, asks the controller, and puts plans into effect."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeAlias

from keras_het.loader import iterator_adapter
from keras_het.loader import tf_data_adapter as adapter
from keras_het.loader.host_budget import CpuPart, HostBudget
from keras_het.loader.host_threads import HostSums, LoaderPriority, LoaderThreads, threads_of
from keras_het.loader.input.order_tuning import KnobChange, OrderTuning
from keras_het.loader.input.step_iterator import StepIterator
from keras_het.loader.iterators.handover import HandoverError, has_memory_cache, why_not
from keras_het.loader.iterators.inspection import (
    KeptReports,
    PipelineReport,
    is_unread,
    read_report,
)
from keras_het.loader.iterators.live_iterator import LiveIterator
from keras_het.loader.iterators.tunable import (
    Build,
    Knobs,
    TunablePipeline,
    plain_pipeline,
    prefetch_size,
    shares_a_shuffle,
    takes_a_place,
)
from keras_het.loader.nested import StepInput
from keras_het.planning.loader import (
    FixedController,
    JobModel,
    LoaderController,
    LoaderPlan,
    LoaderWindow,
    ReadingJob,
    StepSums,
)
from keras_het.usable_cpus import usable_cpus

if TYPE_CHECKING:
    import tensorflow as tf

_logger = logging.getLogger(__name__)

_Prepared: TypeAlias = "tuple[adapter.Dataset, tf.data.Iterator | None]"
MakeController = Callable[[LoaderPlan, float, int | None], LoaderController]
"""Makes a controller from the first plan, the CPUs, and the largest prefetch if it cannot grow."""

_STEPS_TO_START = 4
"""Steps of an epoch before its pipeline's throughput can be judged."""


@dataclasses.dataclass
class Move:
    """A plan that was put into effect, or refused."""

    step: int
    plan: LoaderPlan
    window: LoaderWindow
    handover_seconds: float = 0.0
    refused: str | None = None

    def to_dict(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "reason": self.plan.reason}


@dataclasses.dataclass
class Handover:
    """The change to a pipeline that is built in the background."""

    future: concurrent.futures.Future[_Prepared]
    switch: Callable[[_Prepared], None]

    def poll(self) -> bool:
        if not self.future.done():
            return False
        self.switch(self.future.result())
        return True

    def wait(self, seconds: float) -> None:
        concurrent.futures.wait([self.future], seconds)

    def cancel(self) -> None:
        self.future.cancel()


class TuningSession:
    """Tuner of the pipeline of one `fit`."""

    def __init__(
        self,
        make_controller: MakeController,
        nice: int = 0,
        budget: HostBudget | None = None,
        observe_only_reason: str | None = None,
    ) -> None:
        self._make_controller = make_controller
        self._priority = LoaderPriority(nice)
        self.share = CpuPart(budget)
        self._plain: tuple[adapter.Dataset, TunablePipeline] | None = None
        self.pipeline: TunablePipeline | None = None
        self.order: OrderTuning | None = None
        self.change: tuple[KnobChange | Handover, Move | None] | None = None
        self.live: LiveIterator | None = None
        self.controller: LoaderController | None = None
        self.observe_only_reason = observe_only_reason
        self.moves: list[Move] = []
        self.has_changed = False
        self._sums: StepSums | None = None
        self._host = HostSums()
        self._reading = ReadingJob()
        self._steps = self._steps_before = 0
        self._built: dict[Knobs, adapter.Dataset] = {}
        self._executor: concurrent.futures.ThreadPoolExecutor | None = None
        self.job: JobModel | None = None
        self._confirmed: LoaderPlan | None = None
        self._first_knobs: Knobs | None = None
        self._reports = KeptReports(self._read_report)
        self._epochs = 0

    def begin_epoch(self) -> None:
        self._steps_before = self._steps
        self._epochs += 1
        current = self.pipeline.current if self.pipeline is not None else None
        if self._epochs == 2 and current is not None and has_memory_cache(current):
            # a handover would empty a cache that is full by now
            self._only_observe("its cache in memory is full after the first epoch")

    def open(self, iterator: Iterator[StepInput]) -> LiveIterator:
        if self.live is not None:
            self._pause(_STEPS_TO_START)
            self.live.release()
        self.live = live = LiveIterator(iterator, self.nice)
        source = iterator.source if isinstance(iterator, StepIterator) else None
        order: OrderTuning | None = getattr(source, "tuning", None)
        if order is not None:
            if order is not self.order:
                self._begin_order(order)
            return live
        adjustable = self._adjustable(live)
        if adjustable is None:
            return live
        if adjustable is not self.pipeline:
            self._begin_pipeline(adjustable)
        if live.pipeline is None:
            self._move_plain(live, adjustable)
        return live

    def after_step(
        self, seconds: float, input_wait: float, steps: int, is_last: bool = False
    ) -> None:
        """Record one execution; now and then decide, or put a plan into effect."""
        self._steps += steps
        self._reports.after_step(self._steps)
        self._use(self.share.heartbeat())
        if self.order is not None:
            self._lower_priority()
        if self.change is not None:
            if self.order is not None or not is_last:
                self._poll(*self.change)
            return
        sums = self._sums
        if sums is None:
            return
        was_skipping = sums.is_skipping
        full = sums.add(seconds, input_wait, steps)
        if was_skipping and not sums.is_skipping:
            self._host.mark(self._threads())
        if full:
            self._decide()
        if is_last:
            self.end_epoch()

    def end_epoch(self) -> None:
        """Mark the end of the steps; called internally if no step was known to be the last one."""
        if self.change is None:
            # even if Keras continues with the same iterator: with short epochs a step then counts
            self._pause(max(min(_STEPS_TO_START, self._steps - self._steps_before - 1), 1))

    def close(self) -> None:
        if self.live is not None:
            self.live.release()
            self.live = None
        self.share.leave()
        if self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)
            self._executor = None
        self._cancel()
        self._built.clear()

    def report(self) -> PipelineReport | None:
        return self._reports.latest(self._steps)

    def last_report(self) -> PipelineReport | None:
        report = self._reports.look(self._steps)
        return self._reports.last_seen or report

    def _read_report(self) -> PipelineReport | None:
        if self.order is not None:
            return self.order.report()
        live = self.live
        return read_report(live.iterator) if live is not None and live.is_tf_data else None

    @property
    def nice(self) -> int:
        return self._priority.value

    @property
    def knobs(self) -> Knobs | None:
        """The settings in effect, or those before while unproven; None if they are the user's."""
        tuned = self.order or self.pipeline
        if tuned is None or (self.is_plain and not self.has_changed):
            return None
        if self._confirmed is None or self._confirmed == tuned.knobs.plan:
            return tuned.knobs
        first = self._first_knobs
        if first is not None and first.plan == self._confirmed:
            return first  # the user's own numbers
        return Knobs.of_plan(self._confirmed)

    @property
    def is_plain(self) -> bool:
        if self.order is not None:
            return self.order.is_plain
        return self.live is None or self.live.pipeline is None

    @property
    def turns_prefetch(self) -> bool:
        """Whether the last `prefetch` is among the settings, and not the user's or AUTOTUNE's."""
        if self.order is not None:
            return self.order.largest_prefetch is None
        return self._plain is None or prefetch_size(self._plain[0]) is not None

    # --- which pipeline

    def _adjustable(self, live: LiveIterator) -> TunablePipeline | None:
        if live.pipeline is not None:
            return live.pipeline
        if not live.is_tf_data:
            self._only_observe(_why_path_stays(live.given))
            return None
        dataset = iterator_adapter.iterated_data_set(live.given)
        if dataset is None:
            return None
        if self._plain is None or self._plain[0] is not dataset:
            if any(isinstance(node, TunablePipeline) for node in adapter.upstream_of(dataset)):
                _logger.info(
                    "Operations after keras_het.loader.tunable_pipeline (of class_weight, or map, "
                    "take and the like) make it an ordinary dataset: parallel calls stay as they "
                    "are."
                )
            self._plain = (dataset, plain_pipeline(dataset))
        return self._plain[1]

    def _begin_order(self, order: OrderTuning) -> None:
        self._cancel()
        self.order = order
        self._begin(order.knobs, order.refusal(), order.largest_prefetch)
        if self.observe_only_reason is None:
            order.begin()
        if self.observe_only_reason is None and not order.has_own_threads:
            self.change = order.prepare(order.knobs, self._background()), None

    def _begin_pipeline(self, adjustable: TunablePipeline) -> None:
        self.pipeline = adjustable
        # not the present one: its shuffles keep the sequence of orders for the epochs to come
        self._built = {}
        knobs = adjustable.knobs
        is_fixed = self._is_plain_pipeline and not self.turns_prefetch
        self._begin(knobs, why_not(adjustable.current), knobs.prefetch if is_fixed else None)

    def _begin(self, knobs: Knobs, refusal: str | None, most_prefetch: int | None) -> None:
        self._first_knobs = knobs
        if refusal is not None:
            self._only_observe(refusal)
        if self.observe_only_reason is not None:
            self.controller = FixedController(knobs.plan)
        else:
            self.controller = self._make_controller(knobs.plan, usable_cpus(), most_prefetch)
        self.share.announce()
        self._sums = StepSums(self.controller.next_window)
        self._begin_window()

    @property
    def _is_plain_pipeline(self) -> bool:
        return self._plain is not None and self._plain[1] is self.pipeline

    def _move_plain(self, live: LiveIterator, adjustable: TunablePipeline) -> None:
        """Move an ordinary dataset to a private thread pool, before its first element."""
        if self.observe_only_reason is not None:
            return
        try:
            if is_unread(live.given) and _begins_alike(adjustable.current):
                live.begin_in(adjustable.current)
            else:
                live.move_to(adjustable.current)
        except HandoverError as error:
            self._only_observe(str(error))
        else:
            self.has_changed = True

    def _only_observe(self, reason: str) -> None:
        if self.observe_only_reason is None:
            self.observe_only_reason = reason
            _logger.info("LoaderTuner only observes: %s.", reason)
        self.controller = FixedController(self.controller.plan) if self.controller else None
        self._cancel()

    def _cancel(self) -> None:
        if self.change is not None:
            self.change[0].cancel()
            self.change = None

    # --- windows and decisions

    def _begin_window(self) -> None:
        if self._sums is not None and self.controller is not None:
            self._sums.begin(self.controller.next_window)
            self._host.begin(self._threads())

    def _pause(self, steps: int) -> None:
        """Exclude the time between epochs, and the first steps of a pipeline that starts."""
        if self._sums is not None:
            if not self._sums.is_skipping:
                self._host.add(self._threads())
            self._sums.pause(steps)

    def _threads(self) -> LoaderThreads:
        if self.order is not None:
            return self.order.threads
        return threads_of(self.live.iterator if self.live is not None else None)

    def _decide(self) -> None:
        sums, controller = self._sums, self.controller
        if sums is None or controller is None:
            return
        window = self._measured(sums)
        self._share_host(controller, window)
        plan = controller.observe(window)
        self._confirmed = getattr(controller, "confirmed_plan", None)
        changes = self._priority.observe(self.share.processes)
        is_stuck = changes and not self._lower_priority() and not self.nice
        if is_stuck and self.observe_only_reason is None:
            self._priority.cost_threads()
            # new threads have the priority that these cannot regain
            plan = plan or dataclasses.replace(controller.plan, reason="other programs are busy")
        if plan is None:
            self._begin_window()
        else:
            self._build(plan, window)

    def _lower_priority(self) -> bool:
        reader = self.order or self.live
        return reader is None or reader.lower_priority(self._priority.value)

    def _measured(self, sums: StepSums) -> LoaderWindow:
        self._host.add(self._threads())
        reader = self.order or self.live
        return LoaderWindow(
            sums.steps,
            sums.seconds,
            sums.input_wait_seconds,
            self._host.idle_cpus,
            self._host.loader_cpu_seconds,
            (reader.batch_bytes if reader is not None else None) or 0,
            sums.waiting_steps,
            self._host.loader_queue_seconds,
        )

    def _share_host(self, controller: LoaderController, window: LoaderWindow) -> None:
        job = getattr(controller, "job", None)
        if job is None:
            # it does not wait: its present use is all it needs
            cpu = (window.loader_cpu_seconds or 0.0) / window.steps
            job = JobModel(max(cpu, 1e-6), max(window.device_seconds, 1e-6), cpu)
        if self.order is not None:
            job = dataclasses.replace(job, weight=self.order.weight)
        self.job = job
        need = self._reading.observe(controller.plan.loaders, window, time.time())
        self._use(self.share.update(job, need))

    def _use(self, cpus: float | None) -> None:
        if cpus is not None and self.controller is not None:
            self.controller.set_cpus(cpus)
            self.controller.set_reading_loaders(self.share.reading_loaders)

    # --- plans

    def _build(self, plan: LoaderPlan, window: LoaderWindow) -> None:
        knobs = Knobs.of_plan(plan)
        move = Move(self._steps, plan, window)
        if self.order is not None:
            self.change = self.order.prepare(knobs, self._background()), move
        elif self.pipeline is not None:
            running = None if self._is_plain_pipeline else self.pipeline.current
            work = (self.pipeline.build_again, knobs, self._built.get(knobs), running)
            future = self._background().submit(prepare_iterator, *work)
            self.change = Handover(future, functools.partial(self._hand_over, knobs)), move

    def _hand_over(self, knobs: Knobs, prepared: _Prepared) -> None:
        if self.live is None or self.pipeline is None:
            return
        self._reports.look(self._steps)
        self.live.move_to(*prepared)
        self._built[knobs] = prepared[0]
        self.pipeline.adopt(knobs, prepared[0])

    def _background(self) -> concurrent.futures.ThreadPoolExecutor:
        if self._executor is None:
            self._executor = concurrent.futures.ThreadPoolExecutor(1, "loader_tuner")
        return self._executor

    def _poll(self, change: KnobChange | Handover, move: Move | None) -> None:
        """Advance a move; without a move it is a strategy's first thread pool."""
        start = time.perf_counter()
        try:
            if not change.poll():
                return
        except Exception as error:  # the user's function may raise anything
            reason = str(error) or type(error).__name__
            if move is not None and self.controller is not None:
                move.refused = reason
                self.controller.refused(move.plan)
                self._confirmed = getattr(self.controller, "confirmed_plan", None)
            self._only_observe(reason)
        else:
            self.change = None
            self.has_changed = True
            if move is not None:
                move.handover_seconds = time.perf_counter() - start
                _logger.info("Loader at step %d: %s.", self._steps, move.plan)
        if move is not None:
            self.moves.append(move)
        self._begin_window()


def prepare_iterator(
    build: Build, knobs: Knobs, known: adapter.Dataset | None, running: adapter.Dataset | None
) -> _Prepared:
    """Prepare a handover in the background: trace the functions, make an iterator."""
    # If parts are those that run, an iterator would disturb their shuffles: this applies to an
    # ordinary dataset, for which `running` is None, and to a shuffle made outside of the builder.
    dataset = build(knobs) if known is None else known
    is_apart = running is not None and not shares_a_shuffle(running, dataset)
    return dataset, iter(dataset) if is_apart else None


def _begins_alike(dataset: adapter.Dataset) -> bool:
    """Tell whether one more iterator changes nothing; one with `warm_start` has begun to work."""
    options = dataset.options()
    return not (options.experimental_warm_start or has_memory_cache(dataset)) and not takes_a_place(
        dataset
    )


def _why_path_stays(iterator: Iterator[StepInput] | None) -> str:
    if isinstance(iterator, StepIterator):
        return "each worker reads its own files, which have no common order to restart in"
    other = "the data path of a distribution strategy cannot be changed while it runs"
    return getattr(iterator, "why_path_stays", other)
