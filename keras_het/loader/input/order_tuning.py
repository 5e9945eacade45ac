"""Settings that can change in a strategy's data path, and the transition of a running one."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import logging
import weakref
from typing import TYPE_CHECKING, TypeAlias

import tensorflow as tf

from keras_het.loader import tf_data_adapter as adapter
from keras_het.loader.host_threads import LoaderThreads
from keras_het.loader.input.data_pass import (
    ClaimedPass,
    DataPass,
    OrderedPass,
    PipelinePass,
    SlicedPass,
)
from keras_het.loader.input.local_pipeline import STEPS_AT_ONCE, whole_batches
from keras_het.loader.iterators.handover import HandoverError, has_memory_cache, why_not
from keras_het.loader.iterators.inspection import PipelineReport, read_report, with_own_rows_named
from keras_het.loader.iterators.tunable import (
    Knobs,
    TunablePipeline,
    has_one_order_a_pass,
    prefetch_size,
    shares_a_shuffle,
)
from keras_het.loader.order.pipeline_form import PipelineForm, recognise
from keras_het.loader.order.share_queue import ParallelCalls

if TYPE_CHECKING:
    from keras_het.loader.input.global_order import GlobalOrderDataset

_logger = logging.getLogger(__name__)

_Moved: TypeAlias = "tuple[PipelineForm, tf.data.Dataset, tf.data.Iterator | None]"

_MOST_THREADS = 64
"""Threads that sleep cost nothing, and more would not be needed by most storage."""


class OrderTuning:
    """Other knobs for a `GlobalOrderDataset`, whose order of samples stays."""

    # In element mode the maps of own samples run in a pool with more threads than they need, and
    # the order of each step says how many of them run at once. If whole batches are only cut, the
    # running iterator is handed over with its buffers. Neither needs the other workers.

    def __init__(self, data: GlobalOrderDataset, source: tf.data.Dataset) -> None:
        self._data = weakref.ref(data)
        self.is_plain = not isinstance(source, TunablePipeline)
        self._build = None if self.is_plain else source.build_again
        self._source = source if self.is_plain else source.current
        self.knobs = _knobs_of(source, data.form)
        self.has_own_threads = bool(data.form.options.threading.private_threadpool_size)
        self._moved: PipelineForm | None = None
        self._orders_calls = False
        self.parallel_calls = ParallelCalls()

    @property
    def data(self) -> GlobalOrderDataset:
        data = self._data()
        if data is None:
            raise HandoverError("The dataset that was tuned no longer exists.")
        return data

    def refusal(self) -> str | None:
        data, form = self.data, self.data.form
        if isinstance(data.running, ClaimedPass):
            return "async workers take a part of its batches"
        if data.only_slices:
            return _why_slices_stay(form, self.is_plain)
        if form.gathers_indices:
            return "rows of arrays in memory are gathered: there is nothing to tune"
        if form.mode == "slice":
            return "a function of rows follows batches that every worker makes as a whole"
        return None

    @property
    def largest_prefetch(self) -> int | None:
        """The present `prefetch` if it cannot grow, None if it can."""
        return None if self.data.only_slices else self.knobs.prefetch

    @property
    def weight(self) -> float:
        """The weight of this worker's steps among a host's jobs, by the samples it prepares."""
        return 1.0 if self.data.only_slices else self.data.own_weight

    @property
    def batch_bytes(self) -> int:
        run = self.data.running
        return run.batch_bytes if isinstance(run, SlicedPass) else 0

    @property
    def threads(self) -> LoaderThreads:
        data = self._data()
        run = data.running if data is not None else None
        return run.held.threads if isinstance(run, OrderedPass) else LoaderThreads()

    def report(self) -> PipelineReport | None:
        data = self._data()
        run = data.running if data is not None else None
        if not isinstance(run, OrderedPass) or run.is_over:
            return None
        report = read_report(run.held.iterator)
        return with_own_rows_named(report) if isinstance(run, PipelinePass) else report

    def lower_priority(self, nice: int) -> bool:
        return self.threads.lower_priority(nice)

    # --- maps of own samples

    def begin(self) -> None:
        """Tune the passes to come; one that was only looked at begins again, if it can."""
        if self._orders_calls or self.data.only_slices or self.refusal() is not None:
            return
        self._orders_calls = self.has_own_threads = True
        self.order_calls(self.knobs)
        self.data.begin_again()

    def in_own_threads(self, form: PipelineForm) -> PipelineForm:
        return _with_pool(form, _MOST_THREADS) if self._orders_calls else form

    def order_calls(self, knobs: Knobs) -> None:
        """Give the maps of the steps to be ordered as many calls as there are loaders."""
        self.knobs = knobs
        steps_at_once = min(self.data.lookahead + 1, STEPS_AT_ONCE)
        self.parallel_calls.number = max(knobs.threads // steps_at_once, 1)

    def prepare(self, knobs: Knobs, executor: concurrent.futures.ThreadPoolExecutor) -> KnobChange:
        return KnobChange(self, knobs, executor)

    # --- whole batches

    def moved_form(self, knobs: Knobs) -> PipelineForm:
        """Return the form of whole batches with other knobs."""
        form = self.data.form
        if self._build is None:
            return _with_pool(form, knobs.threads)
        built = recognise(self._build(knobs))
        if built.batch_size != form.batch_size:
            raise HandoverError(
                f"The builder changes the batch size: it was {form.batch_size} and would be "
                f"{built.batch_size}."
            )
        if not built.only_slices or built.drop_remainder != form.drop_remainder:
            raise HandoverError(
                f"The builder gives another kind of pipeline: {form.reason}; {built.reason}."
            )
        # each iterator of it would take an order from the shuffles of the dataset
        if shares_a_shuffle(self._source, built.stream):
            raise HandoverError(
                "The builder reads from a shuffle that was made outside of it, of which each "
                "pipeline would take an order. Call shuffle() within the builder."
            )
        return built

    def moved_batches(self, form: PipelineForm, knobs: Knobs, skip: int) -> tf.data.Dataset:
        return whole_batches(form, self.data.lookahead, skip, knobs.prefetch)

    def start_moved(self, run: SlicedPass) -> None:
        """Hand a new pass over before its first element, with the order of the user's dataset."""
        if self._moved is None:
            return
        try:
            plain = _with_pool(self.data.form, self.knobs.threads)
            form = plain if self.is_plain else self._moved
            batches = self.moved_batches(form, self.knobs, run.first_step)
            run.move_to(batches, form)
        except (HandoverError, ValueError) as error:
            _logger.warning("This pass runs with the first settings of its loader: %s", error)

    def adopt(self, form: PipelineForm, knobs: Knobs) -> None:
        self.knobs, self.has_own_threads, self._moved = knobs, True, form


class KnobChange:
    """Other calls for the steps to be ordered, or a handover of whole batches."""

    # A handover is prepared in the background, and starts again with the next pass.

    def __init__(
        self, tuning: OrderTuning, knobs: Knobs, executor: concurrent.futures.ThreadPoolExecutor
    ) -> None:
        self._tuning = tuning
        self.knobs = knobs
        self._executor = executor
        self._run: SlicedPass | None = None
        self._future: concurrent.futures.Future[_Moved] | None = None
        self._in_effect = False

    def poll(self) -> bool:
        """Advance; the training thread calls it between two steps until the knobs are in effect."""
        tuning = self._tuning
        if not tuning.data.only_slices:
            if reason := tuning.refusal():
                raise HandoverError(reason)
            tuning.begin()
            tuning.order_calls(self.knobs)
            return True
        run = tuning.data.running
        if self._in_effect or run is None or run.is_over:
            return self._in_effect
        if run is not self._run:
            self._begin(run)
        if self._run is not None and self._future is not None and self._future.done():
            future, self._future = self._future, None
            form, batches, iterator = future.result()
            self._run.move_to(batches, form, iterator)
            self._tuning.adopt(form, self.knobs)
            self._in_effect = True
        return self._in_effect

    def _begin(self, run: DataPass) -> None:
        self.cancel()
        reason = self._tuning.refusal()
        if reason is not None or not isinstance(run, SlicedPass):
            raise HandoverError(reason)
        self._run = run
        self._future = self._executor.submit(self._prepare, run.first_step)

    def wait(self, seconds: float) -> None:
        if self._future is not None:
            concurrent.futures.wait([self._future], seconds)

    def cancel(self) -> None:
        if self._future is not None:
            self._future.cancel()
        self._future = None

    def _prepare(self, first_step: int) -> _Moved:
        form = self._tuning.moved_form(self.knobs)
        batches = self._tuning.moved_batches(form, self.knobs, first_step)
        # the parts of an ordinary dataset are those that run: an iterator would disturb shuffles
        return form, batches, None if self._tuning.is_plain else iter(batches)


def _with_pool(form: PipelineForm, threads: int) -> PipelineForm:
    # not by merge(), which logs a warning for each value that it changes
    pool = tf.data.ThreadingOptions()
    if form.options.threading.max_intra_op_parallelism is not None:
        pool.max_intra_op_parallelism = form.options.threading.max_intra_op_parallelism
    pool.private_threadpool_size = threads
    options = tf.data.Options().merge(form.options)
    options.threading = pool
    return dataclasses.replace(form, options=options)


def _knobs_of(source: tf.data.Dataset, form: PipelineForm) -> Knobs:
    if isinstance(source, TunablePipeline):
        return source.knobs
    first = Knobs.for_host()
    threads = form.options.threading.private_threadpool_size or first.threads
    calls = form.autotuned_calls or 2 * threads
    return Knobs(calls, prefetch_size(source) or first.prefetch, threads)


def _why_slices_stay(form: PipelineForm, is_plain: bool) -> str | None:
    reason = why_not(form.stream)
    if reason:
        return reason
    if has_memory_cache(form.stream):
        return "every worker makes whole batches, and their cache in memory would start over"
    nodes = adapter.upstream_of(form.stream)
    if is_plain and any(map(adapter.is_reshuffled, nodes)):
        return (
            "every worker makes whole batches of an ordinary dataset with a shuffle, whose later "
            "orders a change would disturb; make it with keras_het.loader.tunable_pipeline"
        )
    if not has_one_order_a_pass(form.stream):
        return (
            "every worker makes whole batches, of which a pass takes several orders (a repeat "
            "after a shuffle, or several shuffles): workers would differ in later epochs"
        )
    return None
