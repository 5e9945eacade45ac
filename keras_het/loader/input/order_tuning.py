"""Settings that can change in a strategy's data path, and the transition of a running one."""

from __future__ import annotations

import abc
import concurrent.futures
import dataclasses
import functools
import logging
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from keras_het.loader import tf_data_adapter as adapter
from keras_het.loader.host.threads import LoaderThreads
from keras_het.loader.input.data_pass import ClaimedPass, DataPass, OrderedPass, SlicedPass
from keras_het.loader.input.local_pipeline import global_batches, whole_batches
from keras_het.loader.input.pipeline_pass import PipelinePass
from keras_het.loader.inspection.inspection import PipelineReport, read_report, with_own_rows_named
from keras_het.loader.iterators.adjustable_pipeline import AdjustablePipeline, prefetch_size
from keras_het.loader.iterators.handover import HandoverError, difference, has_memory_cache, why_not
from keras_het.loader.iterators.knobs import Knobs
from keras_het.loader.iterators.replayable import (
    has_one_order_a_pass,
    shares_a_shuffle,
    why_not_replayed,
)
from keras_het.loader.order.pipeline_form import PipelineForm, recognise
from keras_het.loader.order.replay import advance, fresh_copy
from keras_het.planning.loader import LoaderPlan

if TYPE_CHECKING:
    from keras_het.loader.input.global_order import GlobalOrderDataset

logger = logging.getLogger("keras_het")


class OrderTuning:
    """Other knobs for a `GlobalOrderDataset`, whose order of samples stays.

    In element mode another pipeline rereads what every worker reads, without the maps, and takes
    over at a step whose shares are not settled yet. If whole batches are only cut, the running
    iterator is handed over with its buffers. Neither needs the other workers.
    """

    def __init__(self, data: GlobalOrderDataset, source: tf.data.Dataset) -> None:
        self._data = weakref.ref(data)
        self.is_plain = not isinstance(source, AdjustablePipeline)
        self._build = None if self.is_plain else source.build_again
        self._source = source if self.is_plain else source.current
        self.knobs = _knobs_of(source, data.form)
        self.has_own_threads = bool(data.form.options.threading.private_threadpool_size)
        self._moved: PipelineForm | None = None

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
        return why_not_replayed(form.stream, can_be_built=self._build is not None)

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

    def prepare(self, knobs: Knobs, executor: concurrent.futures.ThreadPoolExecutor) -> KnobChange:
        kind = SlicedPreparation if self.data.only_slices else JoiningPreparation
        return kind(self, knobs, executor)

    # --- forms

    def moved_form(self, knobs: Knobs) -> PipelineForm:
        """Return the form with other knobs; in element mode with shuffles at their first pass."""
        built = self._built_form(knobs)
        form = self.data.form
        # each iterator of it would take an order from the shuffles of the dataset
        is_shared = built is not None and shares_a_shuffle(self._source, built.stream)
        if self.data.only_slices:
            if is_shared:
                raise HandoverError(
                    "The builder reads from a shuffle that was made outside of it, of which each "
                    "pipeline would take an order. Call shuffle() within the builder."
                )
            return built or self._with_pool(form, knobs)
        if (
            built is not None
            and not (form.arrays or is_shared)
            and _has_same_order(form.stream, built.stream)
        ):
            return built
        copied = fresh_copy(form.stream)
        if built is None:
            calls = knobs.num_parallel_calls
            pooled = self._with_pool(form, knobs)
            return dataclasses.replace(pooled, stream=copied, autotuned_calls=calls)
        return dataclasses.replace(built, stream=copied, arrays=form.arrays)

    def _with_pool(self, form: PipelineForm, knobs: Knobs) -> PipelineForm:
        # not by merge(), which logs a warning for each value that it changes
        pool = tf.data.ThreadingOptions()
        if form.options.threading.max_intra_op_parallelism is not None:
            most = form.options.threading.max_intra_op_parallelism
            pool.max_intra_op_parallelism = most
        pool.private_threadpool_size = knobs.threads
        options = tf.data.Options().merge(form.options)
        options.threading = pool
        return dataclasses.replace(form, options=options)

    def _built_form(self, knobs: Knobs) -> PipelineForm | None:
        if self._build is None:
            return None
        form, built = self.data.form, recognise(self._build(knobs))
        if built.batch_size != form.batch_size:
            raise HandoverError(
                f"The builder changes the batch size: it was {form.batch_size} and would be "
                f"{built.batch_size}."
            )
        same = ("mode", "drop_remainder", "gathers_indices", "only_slices")
        if any(getattr(built, name) != getattr(form, name) for name in same):
            raise HandoverError(
                f"The builder gives another kind of pipeline: {form.reason}; {built.reason}."
            )
        if not _maps_alike(form, built):
            raise HandoverError("The builder gives samples or maps of another kind.")
        return built

    # --- whole batches

    def moved_batches(self, form: PipelineForm, knobs: Knobs, skip: int) -> tf.data.Dataset:
        return whole_batches(form, self.data.lookahead, skip, knobs.prefetch)

    def start_moved(self, run: SlicedPass) -> None:
        """Hand a new pass over before its first element, with the order of the user's dataset."""
        if self._moved is None:
            return
        try:
            form = self._with_pool(self.data.form, self.knobs) if self.is_plain else self._moved
            batches = self.moved_batches(form, self.knobs, run.first_step)
            run.move_to(batches, form)
        except (HandoverError, ValueError) as error:
            logger.warning("This pass runs with the first settings of its loader: %s", error)

    def adopt(self, form: PipelineForm, knobs: Knobs) -> None:
        self.knobs, self.has_own_threads = knobs, True
        if self.data.only_slices:
            self._moved = form
        else:
            self.data.adopt(form)


class KnobChange(abc.ABC):
    """A change made in the background and between two steps; it starts again with the next pass."""

    def __init__(
        self, tuning: OrderTuning, knobs: Knobs, executor: concurrent.futures.ThreadPoolExecutor
    ) -> None:
        self._tuning = tuning
        self.knobs = knobs
        self._executor = executor
        self._run: Any = None  # of the kind that the dataset makes
        self._future: concurrent.futures.Future[Any] | None = None
        self._cancelled = threading.Event()
        self._in_effect = False

    def poll(self) -> bool:
        """Advance; the training thread calls it between two steps until the knobs are in effect."""
        if self._in_effect:
            return True
        run = self._tuning.data.running
        if run is None or run.is_over:
            return False
        if run is not self._run:
            self._begin(run)
        if self._future is not None and self._future.done():
            future, self._future = self._future, None
            self._switch(future.result())
        return self._in_effect

    def wait(self, seconds: float) -> None:
        if self._future is not None:
            concurrent.futures.wait([self._future], seconds)

    def cancel(self) -> None:
        self._cancelled.set()
        if self._future is not None and not self._future.cancel():
            self._future.add_done_callback(_drop_result)
        self._future = None

    def _begin(self, run: DataPass) -> None:
        self.cancel()
        self._cancelled = threading.Event()
        self._run = run
        reason = self._tuning.refusal()
        if reason is not None:
            raise HandoverError(reason)
        self._submit(self._prepare, run, self._cancelled)

    def _submit(self, function: Callable[..., object], *arguments: object) -> None:
        self._future = self._executor.submit(function, *arguments)

    @abc.abstractmethod
    def _prepare(self, run: Any, cancelled: threading.Event) -> object:
        """Do all that can be done before the switch, in the background."""

    @abc.abstractmethod
    def _switch(self, prepared: Any) -> None:
        """Do the rest between two steps, on the training thread."""


class SlicedPreparation(KnobChange):
    """Handover of the running iterator of whole batches."""

    def _prepare(
        self, run: SlicedPass, cancelled: threading.Event
    ) -> tuple[PipelineForm, tf.data.Dataset, tf.data.Iterator | None]:
        form = self._tuning.moved_form(self.knobs)
        batches = self._tuning.moved_batches(form, self.knobs, run.first_step)
        # the parts of an ordinary dataset are those that run: an iterator would disturb shuffles
        return form, batches, None if self._tuning.is_plain else iter(batches)

    def _switch(
        self, prepared: tuple[PipelineForm, tf.data.Dataset, tf.data.Iterator | None]
    ) -> None:
        form, batches, iterator = prepared
        self._run.move_to(batches, form, iterator)
        self._tuning.adopt(form, self.knobs)
        self._in_effect = True


class JoiningPreparation(KnobChange):
    """Takeover by another pipeline that first catches up with the running one."""

    # steps by which the other pipeline gets ahead; more if the running one was quicker
    _margin = 0
    _form: PipelineForm

    def _prepare(self, run: PipelinePass, cancelled: threading.Event) -> PipelinePass | None:
        data = self._tuning.data
        self._check_count(run)
        self._form = form = self._tuning.moved_form(self.knobs)
        advance(global_batches(form), data.passes_before(run))
        return self._catch_up(data.successor(run, form, run.ordered), run, cancelled)

    def _catch_up(
        self, successor: PipelinePass, run: PipelinePass, cancelled: threading.Event
    ) -> PipelinePass | None:
        try:
            while not cancelled.is_set():
                if successor.ordered >= run.ordered + self._margin:
                    return successor
                successor.order(wanted=False)
                successor.read()
        except StopIteration:
            pass  # the pass ends first: the next one begins with these knobs
        except BaseException:
            successor.close()
            raise
        successor.close()
        return None

    def _switch(self, prepared: PipelinePass | None) -> None:
        run: PipelinePass = self._run
        if prepared is None:
            return
        try:
            self._check_count(run)
        except HandoverError:
            prepared.close()
            raise
        if prepared.ordered < run.ordered:
            self._margin = max(1, 2 * self._margin)
            self._submit(self._catch_up, prepared, run, self._cancelled)
            return
        run.join(prepared, functools.partial(self._adopt, self._form))

    def _check_count(self, run: PipelinePass) -> None:
        if self._tuning.data.has_lost_count(run):
            raise HandoverError(
                "a pass takes several orders of a shuffle, or of several shuffles, and the data "
                "were read half-way or by another input (an evaluation): which orders come next is "
                "not known"
            )

    def _adopt(self, form: PipelineForm) -> None:
        self._tuning.adopt(form, self.knobs)
        self._in_effect = True


def _drop_result(future: concurrent.futures.Future[Any]) -> None:
    if future.cancelled() or future.exception() is not None:
        return
    result = future.result()
    if isinstance(result, PipelinePass):
        result.close()


def _knobs_of(source: tf.data.Dataset, form: PipelineForm) -> Knobs:
    # an earlier training may have left other settings in the form
    threads = form.options.threading.private_threadpool_size
    if isinstance(source, AdjustablePipeline):
        same = not threads or threads == source.knobs.threads
        return source.knobs if same else Knobs.of_plan(LoaderPlan(threads, source.knobs.prefetch))
    first = Knobs.for_host()
    threads = threads or first.threads
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
            "orders a change would disturb; make it with keras_het.loader.pipeline"
        )
    if not has_one_order_a_pass(form.stream):
        return (
            "every worker makes whole batches, of which a pass takes several orders (a repeat "
            "after a shuffle, or several shuffles): workers would differ in later epochs"
        )
    return None


def _maps_alike(form: PipelineForm, built: PipelineForm) -> bool:
    specs = [[node.element_spec for node in each.element_maps] for each in (form, built)]
    return (
        specs[0] == specs[1]
        and form.stream.element_spec == built.stream.element_spec
        and form.sample_spec == built.sample_spec
    )


def _has_same_order(old: tf.data.Dataset, new: tf.data.Dataset) -> bool:
    """Tell whether another build of a stream has the same order of samples and can replace it."""
    if has_memory_cache(old) or difference(old, new) is not None:
        return False
    return why_not_replayed(new, can_be_built=True) is None and _seeds(old) == _seeds(new)


def _seeds(stream: tf.data.Dataset) -> list[tuple[int | None, int | None]]:
    nodes = adapter.upstream_of(stream)
    return [adapter.shuffle_seeds(node) for node in nodes if adapter.is_shuffle(node)]
