"""Settings of an input pipeline that do not change its elements."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import TypeAlias

import tensorflow as tf

from keras_het.planning.argument_checks import check_number
from keras_het.planning.loader import LoaderPlan
from keras_het.usable_cpus import usable_cpus


@dataclasses.dataclass(frozen=True)
class Knobs:
    """Settings of a pipeline that `build(knobs)` reads; elements and their order are the same.

    Args:
        num_parallel_calls: for every `map`, `interleave` and `batch` that runs in parallel.
        prefetch: batches of the last `prefetch`.
        threads: size of the pipeline's private thread pool; `num_parallel_calls` beyond it lets
            finished samples wait for their turn without a thread.

    Raises:
        ValueError: if a number is less than 1.
    """

    num_parallel_calls: int
    prefetch: int
    threads: int

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            check_number(name, value, least=1, whole=True)

    @classmethod
    def for_host(cls) -> Knobs:
        """Return initial settings: one thread per CPU that this process may use."""
        return cls.of_plan(LoaderPlan(max(math.ceil(usable_cpus()), 1), 2))

    @classmethod
    def of_plan(cls, plan: LoaderPlan) -> Knobs:
        """Return settings that put a plan into effect.

        Args:
            plan: loaders become threads; a thread has two calls, so it need not wait until its
                finished sample is taken in order.
        """
        return cls(2 * plan.loaders, plan.prefetch, plan.loaders)

    @property
    def plan(self) -> LoaderPlan:
        """The plan to which these settings correspond."""
        return LoaderPlan(self.threads, self.prefetch)

    def options(self) -> tf.data.Options:
        """The settings that are options of a dataset."""
        options = tf.data.Options()
        options.threading.private_threadpool_size = self.threads
        return options


Build: TypeAlias = "Callable[[Knobs], tf.data.Dataset]"
"""Builds a `tf.data.Dataset`; the same elements and operations whatever the knobs are."""
