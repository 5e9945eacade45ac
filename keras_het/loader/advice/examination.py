"""Common basis of all rules: the pipeline, its cost, and its cost after a change."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import tensorflow as tf

from keras_het.loader import tf_data_adapter as adapter
from keras_het.loader.advice import nodes
from keras_het.loader.advice.cost import Cost, gives_any_within, is_read_within, measure
from keras_het.loader.advice.rebuilding import path_to, rebuilt

Dataset = adapter.Dataset
_Result = TypeVar("_Result")
_logger = logging.getLogger("keras_het")

LEAST_GAIN = 1.2
LEAST_SECONDS = 0.5e-3  # per batch: less disappears in a Keras step
_SMALLEST_PART = 0.05
_HOPELESS = 0.7
_FILL_TIMES, _FILL_SECONDS = 20, 10.0
_KEPT_BYTES, _MOST_KEPT = 128_000_000, 2048


@dataclasses.dataclass(frozen=True)
class Gain:
    """Value of a change.

    Args:
        ratio: batches/s after the change over batches/s now.
        is_measured: whether the whole changed pipeline was run.
    """

    ratio: float
    is_measured: bool


class Examination:
    """One pipeline under examination.

    Args:
        dataset: the pipeline as `fit` would get it.
        seconds: how long to run each part, and each changed pipeline.
        step_seconds: time of the device for a batch; a pipeline faster than that gains nothing.
    """

    def __init__(self, dataset: Dataset, seconds: float, step_seconds: float) -> None:
        self.dataset, self.seconds, self.step_seconds = dataset, seconds, step_seconds
        self.options = tf.data.Options().merge(dataset.options())
        self.why_not = self._fill_caches()
        self._costs: dict[int, tuple[Dataset, Cost]] = {}
        self._whole: float | None = None

    def _fill_caches(self) -> str | None:
        """Fill caches in memory, and report why the pipeline cannot be run."""
        upstream = list(adapter.upstream_of(self.dataset))
        if any(map(adapter.writes_files, upstream)):
            return "The pipeline writes files when it runs, so that nothing was measured."
        longest = max(_FILL_TIMES * self.seconds, _FILL_SECONDS)
        for node in filter(nodes.is_cache, upstream):
            if not is_read_within(node, longest, self.options):
                return f"The cache was not full after {longest:.0f} s: nothing was measured."
        return None

    @property
    def seconds_per_batch(self) -> float:
        """Time per batch of the whole pipeline."""
        if self._whole is None:
            self._whole = self.run(self.dataset)
        return self._whole

    def all_nodes(self) -> Iterator[tuple[Dataset, float]]:
        """Every operation with the number of its elements in one batch of the whole pipeline."""
        return nodes.with_scales(self.dataset)

    def run(self, dataset: Dataset) -> float:
        """Seconds per batch of any pipeline."""
        return measure(dataset, self.seconds, self.options).seconds

    def cost(self, node: Dataset) -> Cost:
        """Cost per element of a part of the pipeline, including everything before it."""
        if id(node) not in self._costs:
            try:
                cost = measure(node, self.seconds, self.options, in_chunks=True)
            except tf.errors.OpError:
                # later operations may ignore errors; if not, the whole pipeline reports them
                cost = self._cost_without_errors(node)
            # the node is kept, so that no other one gets its id
            self._costs[id(node)] = node, cost
        return self._costs[id(node)][1]

    def _cost_without_errors(self, node: Dataset) -> Cost:
        # without an end and with nothing but errors, TensorFlow would search for an element forever
        if not gives_any_within(node, self.seconds, self.options):
            return Cost(0.0, 0.0)
        return measure(node.ignore_errors(), self.seconds, self.options, in_chunks=True)

    def kept(self, node: Dataset) -> Dataset:
        """Repeat some elements of a part of the pipeline from a full cache."""
        cost = self.cost(node)
        within = min(self.seconds / max(cost.seconds, 1e-9), _KEPT_BYTES / max(cost.bytes, 1))
        cached = node.take(int(min(max(within, 8), _MOST_KEPT))).cache()
        for _ in cached.with_options(self.options):
            pass
        return cached.repeat()

    def gain_of(
        self, node: Dataset, replacement: Dataset, rest: Sequence[Dataset] | None = None
    ) -> Gain | None:
        """Return the gain of the pipeline from replacing one part with another.

        Args:
            node: the present part.
            replacement: its replacement.
            rest: the operations after it; by default those after `node`.

        Returns:
            The gain; None if it is not worth a change, or cannot be run. If the operations after
            `node` cannot be rebuilt, the gain is what its own time allows.
        """
        path = path_to(self.dataset, node) if rest is None else rest
        changed = self.quietly(lambda: rebuilt(replacement, path))
        if changed is not None:
            return self._gain_over_now(changed)
        return self.quietly(lambda: self._gain_of_part(node, replacement))

    def _gain_of_part(self, node: Dataset, replacement: Dataset) -> Gain | None:
        """Upper bound of a faster part's gain; the smaller difference of two runs counts."""
        scale = next(scale for each, scale in self.all_nodes() if each is node)
        saved = self.cost(node).seconds - self.cost(replacement).seconds
        if self.most_gain(scale * saved) is None:
            return None
        before, after = (
            measure(each, self.seconds, self.options, in_chunks=True).seconds
            for each in (node, replacement)
        )
        return self.most_gain(scale * min(saved, before - after))

    def can_build(self, replacement: Dataset, rest: Sequence[Dataset]) -> bool:
        """Tell whether the operations `rest` can be rebuilt on a changed beginning."""
        return self.quietly(lambda: rebuilt(replacement, rest)) is not None

    def can_run(self, node: Dataset, replacement: Dataset) -> bool:
        """Tell whether the pipeline can be rebuilt, and yields batches, with another part."""
        changed = self.quietly(lambda: rebuilt(replacement, path_to(self.dataset, node)))
        if changed is None:
            return False
        return self.quietly(lambda: next(iter(changed.with_options(self.options)))) is not None

    def _gain_over_now(self, changed: Dataset) -> Gain | None:
        """Gain of a changed pipeline; the better of two runs of each counts.

        Other work on the machine makes a run slower, never faster.
        """
        after = self.quietly(lambda: self.run(changed))
        if after is None or after <= 0 or self._ratio(self.seconds_per_batch, after) < _HOPELESS:
            return None
        self._whole = before = min(self.seconds_per_batch, self.run(self.dataset))
        after = min(after, self.run(changed))
        return Gain(self._ratio(before, after), True) if self._is_worth(before, after) else None

    def most_gain(self, saved_seconds: float) -> Gain | None:
        """The largest gain if a part that takes so long per batch were free."""
        before = self.seconds_per_batch
        after = max(before - saved_seconds, _SMALLEST_PART * before)
        return Gain(self._ratio(before, after), False) if self._is_worth(before, after) else None

    def _ratio(self, before: float, after: float) -> float:
        return max(before, self.step_seconds) / max(after, self.step_seconds, 1e-9)

    def _is_worth(self, before: float, after: float) -> bool:
        step = self.step_seconds
        saved = max(before, step) - max(after, step)
        return after > 0 and saved >= LEAST_SECONDS and self._ratio(before, after) >= LEAST_GAIN

    @staticmethod
    def quietly(function: Callable[[], _Result]) -> _Result | None:
        """Return the result, or None if the user's function cannot be used in another place."""
        try:
            return function()
        except Exception as error:
            _logger.debug("The changed pipeline cannot be run: %s", error)
            return None
