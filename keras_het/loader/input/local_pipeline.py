"""Pipeline of one worker: it takes its own rows of each global batch and maps only them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import tensorflow as tf

from keras_het.loader import iterator_adapter
from keras_het.loader import tf_data_adapter as adapter
from keras_het.loader.nested import Batch, Spec
from keras_het.loader.order import rows
from keras_het.loader.order.pipeline_form import PipelineForm
from keras_het.loader.order.share_queue import ShareQueue
from keras_het.planning.replica_layout import ReplicaLayout

Dataset = adapter.Dataset

STEPS_AT_ONCE = 2
"""Steps whose own rows are mapped at the same time."""


def global_batches(form: PipelineForm) -> Dataset:
    """The global batches of a form before any work that only the user of a row does."""
    if form.mode == "slice":
        return form.stream
    return form.stream.batch(form.batch_size, drop_remainder=form.drop_remainder)


def whole_batches(form: PipelineForm, lookahead: int, skip: int = 0, prefetch: int = 1) -> Dataset:
    """The global batches of a form in slice mode, for their consumer to cut."""
    batches = form.stream.skip(skip) if skip else form.stream
    ahead = max(lookahead, prefetch, 1) if form.reads_ahead else 0
    return (batches.prefetch(ahead) if ahead else batches).with_options(_in_order(form.options))


def build_local_pipeline(
    form: PipelineForm,
    layout: ReplicaLayout,
    orders: ShareQueue,
    lookahead: int,
    skip: int = 0,
    row_functions: tuple[Callable[..., Any], ...] = (),
) -> Dataset:
    batches = global_batches(form)
    if skip:
        batches = batches.skip(skip)
    batches = orders.admit(batches)
    if form.reads_ahead and form.mode == "element":
        # read the next samples while the maps of this step run
        batches = batches.prefetch(1)
    cut = _cut_function(batches.element_spec, form, layout, orders)
    finish = _finish_function(form, layout, (*form.row_functions, *row_functions))
    works = form.element_maps or form.arrays or form.row_functions or row_functions
    parallel = {"num_parallel_calls": STEPS_AT_ONCE, "deterministic": True} if works else {}
    # a stage that waits for orders must be a sequential map, and its reader must not hold a lock
    # meanwhile: a parallel map does not, a parallel interleave would block finished steps
    own_rows = batches.map(cut)
    finished = own_rows.map(finish, **parallel)
    for mapped in (own_rows, finished):
        iterator_adapter.free_graph_with(mapped)
    return finished.prefetch(max(lookahead, 1)).with_options(_in_order(form.options))


def _cut_function(
    element_spec: Spec, form: PipelineForm, layout: ReplicaLayout, orders: ShareQueue
) -> Callable[..., Any]:
    # map() spreads a tuple over the arguments of its function, and nothing else
    is_tuple = type(element_spec) is tuple
    local = layout.local_replicas

    @tf.autograph.experimental.do_not_convert
    def cut(*arguments: Batch) -> tuple[Batch, tf.Tensor, tf.Tensor, tf.Tensor]:
        batch = arguments if is_tuple else arguments[0]
        whole, rest = cast("tuple[Batch, Batch]", batch) if form.gathers_indices else (batch, None)
        total = rows.count_rows(whole)
        sizes, wants_fingerprint, calls = orders.sizes(orders.take(), total)
        start = tf.reduce_sum(sizes[: local.start])
        count = tf.reduce_sum(sizes[local.start : local.stop])
        if _needs_probe(form):
            count = tf.maximum(count, 1)
            start = tf.minimum(start, total - count)
        own = rows.slice_rows(whole, start, count)
        fingerprint = tf.cond(
            wants_fingerprint, lambda: rows.hash_rows(whole), lambda: tf.constant(0, tf.int64)
        )
        return ((own, rest) if form.gathers_indices else own), sizes, fingerprint, calls

    return cut


def _finish_function(
    form: PipelineForm, layout: ReplicaLayout, row_functions: tuple[Callable[..., Any], ...]
) -> Callable[..., Any]:
    local = layout.local_replicas
    functions = [tf.function(function) for function in row_functions]

    @tf.autograph.experimental.do_not_convert
    def finish(
        batch: Batch, sizes: tf.Tensor, fingerprint: tf.Tensor, calls: tf.Tensor
    ) -> tuple[tuple[Batch, ...], tf.Tensor, tf.Tensor]:
        local_sizes = sizes[local.start : local.stop]
        if form.element_maps or form.arrays:
            batch = _mapped_rows(batch, form, tf.reduce_sum(local_sizes), calls)
        for function in functions:
            batch = function(*batch) if type(batch) is tuple else function(batch)
        return rows.split_rows(batch, local_sizes, len(local)), sizes, fingerprint

    return finish


def _needs_probe(form: PipelineForm) -> bool:
    """Tell whether a replica without a share maps a sample, and drops it, to know its shapes."""
    if not form.element_maps:
        return False
    specs = [
        spec
        for spec in tf.nest.flatten(form.element_maps[-1].element_spec)
        if not adapter.is_none(spec)
    ]
    return not all(
        isinstance(spec, tf.TensorSpec) and spec.shape.is_fully_defined() for spec in specs
    )


def _mapped_rows(own: Batch, form: PipelineForm, count: tf.Tensor, calls: tf.Tensor) -> Batch:
    if form.arrays:
        rows_of_arrays = [tf.gather(array, own) for array in form.arrays]
        own = tf.nest.pack_sequence_as(form.sample_spec, rows_of_arrays)
    if not form.element_maps:
        return own
    if _needs_probe(form):
        return rows.slice_rows(_mapped_batch(own, form, calls), tf.zeros([], tf.int64), count)
    return tf.cond(count > 0, lambda: _mapped_batch(own, form, calls), lambda: _empty_batch(form))


def _mapped_batch(own: Batch, form: PipelineForm, calls: tf.Tensor) -> Batch:
    samples = tf.data.Dataset.from_tensor_slices(own)
    for node in form.element_maps:
        is_tuned = form.is_built or adapter.has_autotuned_calls(node)
        ordered = calls if is_tuned else None
        samples = adapter.AppliedMap(node, samples, form.autotuned_calls, ordered)
    return samples.batch(form.batch_size).get_single_element()


def _empty_batch(form: PipelineForm) -> Batch:
    return tf.nest.map_structure(
        lambda spec: None if adapter.is_none(spec) else tf.zeros([0, *spec.shape], spec.dtype),
        form.element_maps[-1].element_spec,
    )


def _in_order(options: tf.data.Options) -> tf.data.Options:
    """Return the user's options, except for an order that is the same on every worker."""
    merged = tf.data.Options().merge(options)
    if merged.deterministic is False:
        merged.deterministic = True
    return merged
