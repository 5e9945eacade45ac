"""One global order of samples, cut into unequal shares for the replicas of all workers."""

from __future__ import annotations

import dataclasses
import functools
import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from keras_het.loader import tf_data_adapter as adapter
from keras_het.loader.input.data_pass import (
    ClaimedPass,
    Claims,
    DataPass,
    OrderedPass,
    PipelinePass,
    SlicedPass,
    Weights,
)
from keras_het.loader.input.distributed_steps import DistributedSteps
from keras_het.loader.input.local_pipeline import (
    build_local_pipeline,
    global_batches,
    whole_batches,
)
from keras_het.loader.input.order_tuning import OrderTuning
from keras_het.loader.input.step_iterator import Wrap
from keras_het.loader.iterators.tunable import TunablePipeline
from keras_het.loader.nested import Spec
from keras_het.loader.order import rows
from keras_het.loader.order.content import describe_content
from keras_het.loader.order.pass_counter import Pass, PassCounter, advance, fresh_copy
from keras_het.loader.order.pipeline_form import PipelineForm, recognise, seeds_of_orders
from keras_het.loader.order.share_queue import ShareQueue
from keras_het.planning.argument_checks import check_number, expect
from keras_het.planning.replica_layout import ReplicaLayout

_logger = logging.getLogger(__name__)


class GlobalOrderDataset(DistributedSteps):
    """Rows of every global batch, for each local replica.

    Global batch t has rows x_0 ... x_{n-1} in one order that is the same on all workers. With
    shares s = apportion(n, weights), replica r gets rows sum(s[:r]) ... sum(s[:r+1]) - 1: every
    sample exactly once, whatever the weights and however they change. Weights are read once per
    step and take effect `lookahead` steps later, without a new pipeline or a new trace. All workers
    have the same number of steps.

    In "element" mode each worker reads every sample (of arrays only its number) but runs the maps
    of single samples before `batch()` only on its own rows; in "slice" mode each worker runs the
    whole pipeline and keeps its rows. `mode` and `reason` tell which applies. Sharding options of
    the dataset are ignored.

    A replica with no row gets a batch of 0 rows. A map that draws random numbers runs for own rows
    only, so its draws differ from one process's.

    Args:
        dataset: `tf.data.Dataset` of global batches, or of single samples with
            `global_batch_size`. Shuffles need a seed, or the same global seed on all workers.
        layout: all replicas, and which of them are local.
        weights: returns the current share weights, one for each replica; must return the same on
            all workers at the same step.
        wrap: makes an element from a list with the batch of each local replica, and sizes, int64 of
            shape [num_replicas].
        global_batch_size: samples in a global batch, if `dataset` has single samples; the last
            batch may be smaller.
        batch_map: row-wise function of a batch (row i of the result depends on row i only), or
            several, first to last; run on local rows only; must accept 0 rows.
        lookahead: steps by which the pipeline works ahead, and by which a change of weights is
            late.
        claims: called with this dataset when a pass starts; returns the `Claims` of a pass in
            which others take some of the batches, or None.

    Attributes:
        form: what every worker runs, and what only the user of a row runs.
        layout: all replicas, and which of them are local.
        lookahead: steps by which the pipeline works ahead.
        only_slices: whether a step only cuts whole batches, which the user's pipeline makes.
        tuning: the settings that can change while it runs.
        pipelines_built: number of pipelines built for its passes.

    Raises:
        TypeError: if `dataset` is not a `tf.data.Dataset`.
        ValueError: if elements are not batches, or `lookahead` or `global_batch_size` is too small.
    """

    LOOKAHEAD = 2

    def __init__(
        self,
        dataset: tf.data.Dataset,
        layout: ReplicaLayout,
        weights: Weights,
        wrap: Wrap,
        *,
        global_batch_size: int | None = None,
        batch_map: Callable[..., Any] | Sequence[Callable[..., Any]] = (),
        lookahead: int = LOOKAHEAD,
        claims: Callable[[GlobalOrderDataset], Claims | None] | None = None,
    ) -> None:
        if not isinstance(dataset, tf.data.Dataset):
            raise TypeError(
                f"dataset must be a tf.data.Dataset. Received: {dataset!r} of type "
                f"{type(dataset)}. Arrays can be given to fit directly, or made one by "
                "Dataset.from_tensor_slices."
            )
        check_number("global_batch_size", global_batch_size, least=1, whole=True, or_none=True)
        check_number("lookahead", lookahead, least=0, whole=True)
        functions = batch_map if isinstance(batch_map, (list, tuple)) else [batch_map]
        expect(all(map(callable, functions)), "one function, or several", batch_map=batch_map)
        if global_batch_size is None:
            rows.check_batched(dataset.element_spec)
        self.form, passes = _recall_form(dataset, global_batch_size, self)
        self._source = (dataset, global_batch_size)
        self.layout = layout
        self._weights = weights
        self.lookahead = lookahead
        self._get_claims = claims
        self._claims: Claims | None = None
        self._row_functions = tuple(functions)
        self.only_slices = self.form.only_slices and not self._row_functions
        self._idle: list[tuple[tf.data.Dataset, ShareQueue]] = []
        self.pipelines_built = 0
        self.tuning = OrderTuning(self, dataset)
        upstream = list(adapter.upstream_of(self.form.stream))
        self._has_fingerprint = not any(
            adapter.operations_in_functions(node) & adapter.RANDOM_VALUE_OPERATIONS
            for node in upstream
        )
        super().__init__(
            rows.relax_rows(self._batch_spec()),
            int(global_batches(self.form).cardinality()),
            wrap,
            may_be_looked_at=not any(map(adapter.is_keras_py_dataset, upstream)),
            passes=passes,
            draws_once=any(map(adapter.is_keras_generator, upstream))
            or (self.only_slices and any(map(adapter.draws_from_generator, upstream))),
        )
        self._warn_of_changing_order(upstream)
        _logger.info("Input in %s mode: %s.", self.mode, self.reason)

    @functools.cached_property
    def content(self) -> Mapping[str, str]:
        """Properties that identify this data, equal on all workers; reads no element."""
        return describe_content(self._source[0], self.form)

    @property
    def mode(self) -> str:
        """Either "element" (maps run only for own samples) or "slice" (whole batches are made)."""
        return self.form.mode

    @property
    def reason(self) -> str:
        """The reason for this mode."""
        return self.form.reason

    @property
    def takes_keras_arrays(self) -> bool:
        """Whether `fit` received arrays, for which Keras draws the order of samples."""
        return self.form.gathers_indices

    @property
    def global_batch_size(self) -> int | None:
        """Samples of a full global batch, None if unknown."""
        return self.form.batch_size

    @property
    def seeds_of_orders(self) -> list[list[int | None]]:
        """The seeds of all shuffles; 0 and 0 for one whose order cannot be restored."""
        return seeds_of_orders(self._source[0])

    @property
    def own_weight(self) -> float:
        """Samples of this worker in a step, relative to the mean over all workers."""
        weights = list(getattr(self._last, "latest_weights", ()))
        local = self.layout.local_replicas
        own = sum(weights[local.start : local.stop])
        return float(own / sum(weights) * self.layout.num_workers) if any(weights) else 1.0

    def shares_orders_with(self, other: object) -> bool:
        """Tell whether this and another input take orders from one shuffle, in turn."""
        return getattr(other, "_passes", None) is self._passes and self._shuffle() is not None

    def begin_again(self) -> None:
        """Build the pipelines of later passes again, and of one that was only looked at."""
        # a copy, so that a pipeline that still runs is not kept for a later pass
        self.follow(dataclasses.replace(self.form))
        self.cut_again()

    def follow(self, form: PipelineForm) -> None:
        """Make later passes use another form of the same batches."""
        if form is not self.form:
            self.form = form
            self._idle.clear()

    def map(self, function: Callable[..., Any], **_: object) -> GlobalOrderDataset:
        """Return the same input with one more `batch_map`; Keras calls it for `class_weight`."""
        dataset, global_batch_size = self._source
        return GlobalOrderDataset(
            dataset,
            self.layout,
            self._weights,
            self._wrap,
            global_batch_size=global_batch_size,
            batch_map=(*self._row_functions, function),
            lookahead=self.lookahead,
            claims=self._get_claims,
        )

    def prefetch(self, buffer_size: int) -> GlobalOrderDataset:
        """Return this input, which prepares `lookahead` steps ahead whatever `buffer_size` is."""
        del buffer_size
        return self

    def _batch_spec(self) -> Spec:
        if self.only_slices:
            return self.form.stream.element_spec
        self._idle.append(self._build(self.form, self.layout))
        return self._idle[0][0].element_spec[0][0]

    def _pass_to_start(self, number: int) -> int:
        self._claims = self._get_claims(self) if self._get_claims is not None else None
        if self._claims is None:
            return number
        before = self._claims.passes_before
        try:
            # A private copy: another input of the same dataset, for example for validation,
            # advances the shuffles of the original.
            self._seek(before)
        except ValueError:
            if len(before) < len(self._passes.gone_by):
                raise
        else:
            self._passes.set_to(before)
            self._note_position(len(before))
        return len(before)

    def _new_run(self, number: int, first_step: int) -> DataPass:
        if self._claims is not None:
            return self._claimed_run(self._claims, number)
        arguments: dict[str, Any] = {
            "weights": self._weights,
            "lookahead": self.lookahead,
            "number": number,
            "first_step": first_step,
            "num_steps": int(self._steps),
            "wants_fingerprint": self._has_fingerprint,
        }
        if self.only_slices:
            run = self._sliced(self.layout, **arguments)
            self.tuning.start_moved(run)
            return run
        fits, tuning = bool(self._idle) and first_step == 0, self.tuning
        form = tuning.in_own_threads(self.form)
        built = self._idle.pop() if fits else self._build(form, self.layout, first_step)
        idle = None if first_step else weakref.ref(self)
        return self._piped(
            self.form,
            *built,
            give_back=functools.partial(_keep_idle, idle, self.form, *built),
            epoch_steps=None if self.form.reads_ahead else self.epoch_steps,
            parallel_calls=tuning.parallel_calls,
            **arguments,
        )

    def _claimed_run(self, claims: Claims, number: int) -> DataPass:
        parts = claims.num_parts
        own_weights = self._weights

        def weights() -> tuple[float, ...]:
            return tuple(own_weights()) * parts  # of all replicas in each of the parts

        # with several parts all replicas are local: an async worker is alone in its group
        layout = ReplicaLayout((self.layout.num_replicas * parts,)) if parts > 1 else self.layout
        arguments: dict[str, Any] = {"weights": weights, "lookahead": 0, "number": number}
        source: OrderedPass
        if self.only_slices:
            source = self._sliced(layout, **arguments)
        else:
            source = self._piped(self.form, *self._build(self.form, layout), **arguments)
        return ClaimedPass(source, claims, self.lookahead, number)

    def _sliced(self, layout: ReplicaLayout, first_step: int = 0, **arguments: Any) -> SlicedPass:
        self.pipelines_built += 1
        return SlicedPass(
            pipeline=whole_batches(self.form, self.lookahead, first_step),
            keep_alive=self.form,
            layout=layout,
            first_step=first_step,
            reads_ahead=self.form.reads_ahead,
            **arguments,
        )

    def _piped(
        self, form: PipelineForm, pipeline: tf.data.Dataset, orders: ShareQueue, **arguments: Any
    ) -> PipelinePass:
        return PipelinePass(
            pipeline=pipeline,
            keep_alive=form,
            orders=orders,
            batch_rows=form.batch_size or 0,
            **arguments,
        )

    def _build(
        self, form: PipelineForm, layout: ReplicaLayout, skip: int = 0
    ) -> tuple[tf.data.Dataset, ShareQueue]:
        self.pipelines_built += 1
        orders = ShareQueue(layout.num_replicas, self.lookahead, not form.reads_ahead)
        pipeline = build_local_pipeline(
            form, layout, orders, self.lookahead, skip, self._row_functions
        )
        return pipeline, orders

    def _seek(self, passes: tuple[Pass, ...]) -> None:
        try:
            stream = fresh_copy(self.form.stream)
        except ValueError:
            if self.passes_started or self._passes.gone_by:
                raise
            stream = self.form.stream
        if stream is not self.form.stream:
            form = dataclasses.replace(self.form, stream=stream)
            _remember_form(*self._source, form)
        advance(self._ordered_data(), passes)

    def _ordered_data(self) -> tf.data.Dataset:
        return global_batches(self.form)

    def _warn_of_changing_order(self, upstream: list[tf.data.Dataset]) -> None:
        if self.layout.num_workers == 1:
            return
        if any(map(adapter.is_nondeterministic, upstream)):
            _logger.warning(
                "A part of the dataset that every worker runs has deterministic=False: workers "
                "may see different orders, and samples may be lost or used twice. Remove it."
            )
        elif self.form.options.deterministic is False:
            _logger.info("The option deterministic=False is not used: workers need one order.")


def _keep_idle(
    owner: weakref.ref[GlobalOrderDataset] | None,
    form: PipelineForm,
    pipeline: tf.data.Dataset,
    orders: ShareQueue,
) -> None:
    dataset = owner() if owner else None
    if dataset is not None and dataset.form is form and len(dataset._idle) < 2:
        dataset._idle.append((pipeline, orders))


@dataclasses.dataclass
class Known:
    """Form of a dataset, and its passes; no form if that would keep the dataset alive."""

    form: PipelineForm | None
    passes: PassCounter
    inputs: weakref.WeakSet[GlobalOrderDataset] = dataclasses.field(default_factory=weakref.WeakSet)


# A second `fit` on the same dataset object continues its shuffle orders, as in stock Keras.
_known: weakref.WeakKeyDictionary[adapter.Dataset, dict[int | None, Known]] = (
    weakref.WeakKeyDictionary()
)
# Data sets that read from one shuffle share its orders: its `take` and `skip`, and those that
# Keras makes in each `fit` with class weights.
_passes: weakref.WeakKeyDictionary[adapter.Dataset, PassCounter] = weakref.WeakKeyDictionary()


def _recall_form(
    dataset: adapter.Dataset, global_batch_size: int | None, reader: GlobalOrderDataset
) -> tuple[PipelineForm, PassCounter]:
    """Return the form and the passes of a dataset, remembered from earlier inputs."""
    of_sizes = _known.setdefault(dataset, {})
    if global_batch_size not in of_sizes:
        shuffle = adapter.first_reshuffled(dataset)
        passes = PassCounter()
        if shuffle is not None:
            passes = _passes.setdefault(shuffle, passes)
        of_sizes[global_batch_size] = Known(None, passes)
    known = of_sizes[global_batch_size]
    form = known.form
    if form is None:
        parts = dataset.current if isinstance(dataset, TunablePipeline) else dataset
        form = recognise(parts.batch(global_batch_size) if global_batch_size else parts)
        form = dataclasses.replace(form, is_built=parts is not dataset)
    if form.mode == "element":  # the stream of a slice form may be the dataset itself
        known.form = form
    known.inputs.add(reader)
    return form, known.passes


def _remember_form(
    dataset: adapter.Dataset, global_batch_size: int | None, form: PipelineForm
) -> None:
    """Make all inputs of a dataset read from a copy: they take their orders from one shuffle."""
    known = _known[dataset][global_batch_size]
    known.form = form
    for each in list(known.inputs):
        each.follow(form)
