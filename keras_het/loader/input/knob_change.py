"""Transition of a strategy's running data path to other knobs."""

from __future__ import annotations

import abc
import concurrent.futures
import functools
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from keras_het.loader.input.data_pass import DataPass, SlicedPass
from keras_het.loader.input.local_pipeline import global_batches
from keras_het.loader.input.pipeline_pass import NextPipeline, PipelinePass
from keras_het.loader.iterators.handover import HandoverError
from keras_het.loader.iterators.knobs import Knobs
from keras_het.loader.order.pipeline_form import PipelineForm
from keras_het.loader.order.replay import advance

if TYPE_CHECKING:
    import tensorflow as tf

    from keras_het.loader.input.order_tuning import OrderTuning


class KnobChange(abc.ABC):
    """A change that works in the background and switches between two steps of training.

    If the pass ends first, another attempt follows in the next one.
    """

    def __init__(
        self, tuning: OrderTuning, knobs: Knobs, executor: concurrent.futures.ThreadPoolExecutor
    ) -> None:
        self._tuning = tuning
        self.knobs = knobs
        self._executor = executor
        self._run: DataPass | None = None
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
        """Wait for the background work, at most this long."""
        if self._future is not None:
            concurrent.futures.wait([self._future], seconds)

    def cancel(self) -> None:
        """Give up; prepared work is discarded."""
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
    def _prepare(self, run: DataPass, cancelled: threading.Event) -> object:
        """Do all that can be done before the switch, in the background."""

    @abc.abstractmethod
    def _switch(self, prepared: Any) -> None:
        """Do the rest between two steps, on the training thread."""


class SlicedPreparation(KnobChange):
    """Handover of the running iterator of whole batches."""

    def _prepare(
        self, run: DataPass, cancelled: threading.Event
    ) -> tuple[PipelineForm, tf.data.Dataset, tf.data.Iterator | None]:
        form = self._tuning.moved_form(self.knobs)
        batches = self._tuning.moved_batches(form, self.knobs, run.first_step)
        # the parts of an ordinary data set are those that run: an iterator would disturb shuffles
        return form, batches, None if self._tuning.is_plain else iter(batches)

    def _switch(
        self, prepared: tuple[PipelineForm, tf.data.Dataset, tf.data.Iterator | None]
    ) -> None:
        form, batches, iterator = prepared
        if isinstance(self._run, SlicedPass):
            self._run.move_to(batches, form, iterator)
            self._tuning.adopt(form, self.knobs)
            self._in_effect = True


class JoiningPreparation(KnobChange):
    """Takeover by another pipeline that first catches up with the running one."""

    # steps by which the other pipeline gets ahead; more if the running one was quicker
    _margin = 0

    def _prepare(self, run: DataPass, cancelled: threading.Event) -> NextPipeline | None:
        if not isinstance(run, PipelinePass):
            raise HandoverError("This pass cannot be joined.")
        data = self._tuning.data
        self._check_count(run)
        form = self._tuning.moved_form(self.knobs)
        advance(global_batches(form), data.passes_before(run))
        start = run.ordered
        pipeline, orders = data.build(start, form)
        adopt = functools.partial(self._adopt, form)
        replicas = data.layout.num_replicas
        next_pipeline = NextPipeline(pipeline, orders, replicas, start, form, adopt)
        return self._catch_up(next_pipeline, run, cancelled)

    def _catch_up(
        self, next_pipeline: NextPipeline, run: PipelinePass, cancelled: threading.Event
    ) -> NextPipeline | None:
        try:
            while not cancelled.is_set():
                if next_pipeline.position >= run.ordered + self._margin:
                    return next_pipeline
                next_pipeline.skip(run.batch_rows)
        except StopIteration:
            pass  # the pass ends first: the next one begins with these knobs
        except BaseException:
            next_pipeline.drop()
            raise
        next_pipeline.drop()
        return None

    def _switch(self, prepared: NextPipeline | None) -> None:
        run = self._run
        if prepared is None or not isinstance(run, PipelinePass):
            return
        try:
            self._check_count(run)
        except HandoverError:
            prepared.drop()
            raise
        if prepared.position < run.ordered:
            self._margin = max(1, 2 * self._margin)
            self._submit(self._catch_up, prepared, run, self._cancelled)
            return
        run.join(prepared)

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
    if isinstance(result, NextPipeline):
        result.drop()
