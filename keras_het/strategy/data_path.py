"""The strategy's side of the data path: wrapping of batches and comparison of their order."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import tensorflow as tf

from keras_het.loader import FileShardedDataset, GlobalOrderDataset
from keras_het.loader.input.data_pass import Claims
from keras_het.loader.input.distributed_steps import DistributedSteps
from keras_het.loader.order.pipeline_form import with_order_of_epoch, with_repeatable_order
from keras_het.strategy.batches.uneven_per_replica import (
    Placement,
    is_worthwhile,
    wrap_shares,
    wrapped_spec,
)
from keras_het.strategy.cluster import agreement
from keras_het.value_types import Nest

if TYPE_CHECKING:
    from keras_het.strategy.heterogeneous_strategy import HeterogeneousStrategy

_Steps = TypeVar("_Steps", bound=DistributedSteps)


class DataPath:
    """Factory of the strategy's datasets, which remembers the one being iterated."""

    def __init__(self, strategy: HeterogeneousStrategy, weights: tuple[float, ...]) -> None:
        self._strategy = weakref.ref(strategy)
        self.layout, self.devices = strategy.layout, strategy.extended.worker_devices
        local = self.layout.local_replicas
        self.own_replicas = slice(local.start, local.stop)
        self._placement = Placement(self.devices) if is_worthwhile(self.devices) else None
        self.weights = weights
        self.on_input_wait: Callable[[float], None] | None = None
        # Seconds that the batches drawn so far for one execution were waited for, if all of them
        # are drawn before its first step.
        self._waited: float | None = None
        self._least_lookahead = 0
        self._latest: weakref.ref[DistributedSteps] | None = None
        self.current_shares: tuple[int, ...] = ()
        self.samples_delivered = 0
        self.local_samples_delivered = 0
        # When async workers take a part of each epoch: which worker takes which batches of a new
        # pass, and of which dataset.
        self.claims_source: Callable[[], Claims | None] | None = None
        self._claimed: weakref.ref[DistributedSteps] | None = None
        self._num_distributed = 0
        self._latest_built: weakref.ref[DistributedSteps] | None = None

    def distribute(
        self,
        dataset: tf.data.Dataset,
        global_batch_size: int | None,
        batch_map: Callable[..., Any] | Sequence[Callable[..., Any]],
        lookahead: int | None,
    ) -> GlobalOrderDataset:
        drawn = agreement.drawn_seed()
        if self._get_strategy().num_async_workers:
            dataset = with_repeatable_order(dataset, drawn)
        elif drawn is not None:
            # the user did not set this seed, and it must not make epochs alike
            dataset = with_order_of_epoch(dataset, (drawn + self._num_distributed) % 2**31)
            self._num_distributed += 1
        if lookahead is None:
            lookahead = max(GlobalOrderDataset.LOOKAHEAD, self._least_lookahead)
        return self._build(
            GlobalOrderDataset,
            dataset,
            global_batch_size=global_batch_size,
            claims=self._claims,
            batch_map=batch_map,
            lookahead=lookahead,
        )

    def claim(
        self, dataset: DistributedSteps | None, source: Callable[[], Claims | None] | None
    ) -> None:
        """Make passes over `dataset` take only the batches that `source` provides."""
        self.claims_source = source
        self._claimed = weakref.ref(dataset) if dataset is not None else None

    def _claims(self, dataset: GlobalOrderDataset) -> Claims | None:
        is_claimed = self._claimed is not None and self._claimed() is dataset
        return self.claims_source() if is_claimed and self.claims_source is not None else None

    def to_be_trained(self) -> DistributedSteps | None:
        """Return the data that a `fit` starting now will iterate, or None if unknown."""
        iterated = self.iterated()
        built = self._latest_built() if self._latest_built is not None else None
        if iterated is not None and (built is None or iterated.was_looked_at):
            return iterated
        return built

    def distribute_files(
        self,
        filenames: Sequence[str],
        reader: Callable[[tf.Tensor], tf.data.Dataset],
        **options: object,
    ) -> FileShardedDataset:
        if self._get_strategy().num_async_workers:
            raise ValueError(
                "Async workers take global batches of one order; files that each worker reads by "
                'itself have none. Received: a cluster with a job "async". Use strategy.distribute.'
            )
        return self._build(FileShardedDataset, filenames, reader, **options)

    def _build(self, kind: Callable[..., _Steps], *sources: object, **options: object) -> _Steps:
        dataset = kind(
            *sources,
            layout=self.layout,
            weights=lambda: self.weights,
            wrap=_Wrapper(self),
            **options,
        )
        self._latest_built = weakref.ref(dataset)
        return dataset

    def iterated(self) -> DistributedSteps | None:
        """The dataset that provided the latest step, or None before the first."""
        return self._latest() if self._latest is not None else None

    @contextlib.contextmanager
    def reading_ahead(self, steps: int) -> Iterator[None]:
        """Let data that is distributed meanwhile work ahead by at least so many steps."""
        before, self._least_lookahead = self._least_lookahead, steps
        try:
            yield
        finally:
            self._least_lookahead = before

    @contextlib.contextmanager
    def drawing_together(self) -> Iterator[None]:
        """Let batches be drawn for several steps of which none has begun."""
        self._waited = 0.0
        try:
            yield
        finally:
            self._waited = None

    def on_step(self, dataset: DistributedSteps, is_new_pass: bool) -> None:
        """Compare the workers' data in the first step of a pass; called with every step."""
        self._latest = weakref.ref(dataset)
        waited = dataset.input_wait_seconds
        if self._waited is not None:  # the first step waits for all batches
            self._waited = waited = self._waited + waited
        if self.on_input_wait is not None:
            self.on_input_wait(waited)
        if is_new_pass and self._is_compared:
            shares = str(list(self.current_shares))
            agreement.check_same_pass(self._get_strategy(), dataset, shares)

    def on_end(self, dataset: DistributedSteps, steps: int) -> None:
        """Compare the steps of a pass unless they were known before; called at its end."""
        if dataset.cardinality >= 0 or not self._is_compared:
            return
        if steps:
            agreement.check_same_end(self._get_strategy(), steps)
        else:
            agreement.check_same_pass(self._get_strategy(), dataset, "none")

    @property
    def _is_compared(self) -> bool:
        return self.claims_source is None and self._get_strategy().num_workers > 1

    @property
    def placement(self) -> Placement | None:
        """How parts get to their devices, None if their step is to copy them."""
        # An execution of several steps takes batches that lie on the host.
        return self._placement if self._waited is None else None

    def _get_strategy(self) -> HeterogeneousStrategy:
        strategy = self._strategy()
        if strategy is None:
            raise RuntimeError(
                "The HeterogeneousStrategy of this dataset no longer exists. Keep a reference to "
                "the strategy as long as its datasets are in use."
            )
        return strategy


def with_own_batches(
    dataset: tf.distribute.DistributedDataset, strategy: HeterogeneousStrategy
) -> tf.distribute.DistributedDataset:
    """Make a dataset with one batch per replica refuse what cannot apply to it."""
    kind = type(dataset)

    class WithOwnBatches(kind):  # type: ignore[misc, valid-type]
        """Datasets made by a user-defined function."""

        def __iter__(self) -> tf.distribute.DistributedIterator:
            if len(set(strategy.share_weights)) > 1:
                refuse_own_batches(f"shares {list(strategy.share_weights)}")
            return super().__iter__()

        refuse_shares = staticmethod(refuse_own_batches)

    dataset.__class__ = WithOwnBatches
    return dataset


def refuse_own_batches(what: str) -> None:
    raise ValueError(
        "The function that was given to distribute_datasets_from_function makes batches for each "
        f"replica, whose sizes the strategy cannot change. Received: {what}. Give "
        "strategy.distribute(dataset, global_batch_size=...) the whole dataset of single samples, "
        "the same on every worker (without shard()), or use equal shares and no BatchBalancer."
    )


class _Wrapper:
    """Wrapper of one dataset's batches for the train step."""

    def __init__(self, data_path: DataPath, dataset: DistributedSteps | None = None) -> None:
        self._data_path = data_path
        self._dataset = weakref.ref(dataset) if dataset is not None else None
        self._checked_passes = 0
        self._sizes: tuple[bytes, tf.Tensor] | None = None

    def bound_to(self, dataset: DistributedSteps) -> _Wrapper:
        """Return a wrapper for one dataset, which holds a reference to it."""
        return _Wrapper(self._data_path, dataset)

    def element_spec(self, spec: Nest) -> Nest:
        layout = self._data_path.layout
        return wrapped_spec(spec, len(layout.local_replicas), layout.num_replicas)

    def __call__(self, local_batches: list[Nest], sizes: np.ndarray) -> Nest:
        self._data_path.current_shares = tuple(sizes.tolist())
        self._data_path.samples_delivered += int(sizes.sum())
        self._data_path.local_samples_delivered += int(sizes[self._data_path.own_replicas].sum())
        dataset = self._dataset() if self._dataset is not None else None
        if dataset is not None:
            dataset.samples_delivered += int(sizes.sum())
            passes = dataset.passes_started
            self._data_path.on_step(dataset, is_new_pass=passes != self._checked_passes)
            self._checked_passes = passes
        devices = self._data_path.devices
        return wrap_shares(local_batches, self._sizes_tensor(sizes), devices)

    @property
    def placement(self) -> Placement | None:
        return self._data_path.placement

    def at_end(self, steps: int) -> None:
        """Report the end of the dataset's pass; called once, with its number of steps."""
        dataset = self._dataset() if self._dataset is not None else None
        if dataset is not None:
            self._data_path.on_end(dataset, steps)

    def _sizes_tensor(self, sizes: np.ndarray) -> tf.Tensor:
        """Convert the shares once for all steps that have the same ones."""
        key = sizes.tobytes()
        if self._sizes is None or self._sizes[0] != key:
            with tf.device("CPU:0"):  # where steps look at them
                self._sizes = (key, tf.constant(sizes, tf.int64))
        return self._sizes[1]
