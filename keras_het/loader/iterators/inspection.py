"""AUTOTUNE's choices in a running pipeline, and where its time goes."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable
from typing import IO, TYPE_CHECKING

import tensorflow as tf
from rich.console import Console
from rich.table import Table

from keras_het.loader import iterator_adapter
from keras_het.loader import tf_data_adapter as adapter
from keras_het.loader.iterators.handover import hold_functions_of, release, was_handed_over
from keras_het.loader.iterators.stages import CONSUMER, PipelineStage, read_stages
from keras_het.loader.iterators.tunable import TunablePipeline
from keras_het.planning.argument_checks import check_number
from keras_het.usable_cpus import own_cpus

if TYPE_CHECKING:
    from tensorflow.core.framework.model_pb2 import ModelProto

_WRITES_FILES = (
    "The pipeline writes files when it runs, so it was not read. Call LoaderTuner.inspect "
    "within fit."
)
_SECONDS_BETWEEN_LOOKS = 0.02  # at a dataset being read; a look takes about 0.1 ms


@dataclasses.dataclass(frozen=True)
class PipelineReport:
    """Activity of a running pipeline.

    Args:
        stages: its operations, starting at the consumer's end.
        batches: batches it has yielded.
        consumer_seconds: median time from one batch to the request for the next; None if too few
            were taken.
        algorithm: AUTOTUNE's algorithm; None if the pipeline is not tuned.
        reason: why nothing is known, None if something is.
        seen: time of the observation, if not the present.
    """

    stages: tuple[PipelineStage, ...]
    batches: int = 0
    consumer_seconds: float | None = None
    algorithm: str | None = None
    reason: str | None = None
    seen: str | None = None

    @property
    def awaited(self) -> Limit | None:
        """Limit that the consumer waits for; None without a wait or data."""
        if self.consumer_seconds is None or not self.batches:
            return None
        limits = limits_of(self.stages)
        own = slowest_of(limit for limit in limits if limit.is_of_consumer)
        other = slowest_of(limit for limit in limits if not limit.is_of_consumer)
        own_seconds = own.seconds_per_batch if own is not None else 0.0
        if other is not None and other.seconds_per_batch > self.consumer_seconds + own_seconds:
            return other
        return own if own_seconds > _NOTICEABLE * self.consumer_seconds else None

    @property
    def limit(self) -> Limit | None:
        """Limit that the consumer waits for, else that of the pipeline; None if unknown."""
        if not self.batches:
            return None
        return self.awaited or slowest_of(limits_of(self.stages))

    @property
    def is_complete(self) -> bool:
        """Whether the time of all its stages is known."""
        return bool(self.stages) and all(stage.is_recorded for stage in self.stages)

    @property
    def bottleneck(self) -> PipelineStage | None:
        """The operation that takes the most time; None if unknown."""
        return self.limit.largest if self.limit is not None else None

    @property
    def occupancy(self) -> float | None:
        """Fill level of the last buffer, from 0 to 1; None if there is none."""
        sizes = [stage for stage in self.stages if stage.buffer_size and stage.name == "Prefetch"]
        return min(sizes[0].buffered / sizes[0].buffer_size, 1.0) if sizes else None  # type: ignore[operator]

    @property
    def verdict(self) -> str:
        """The verdict in one sentence."""
        if self.reason is not None:
            return self.reason
        if not self.batches:
            return "No batch was taken yet."
        limit = self.limit
        if limit is None:
            return "No time is known." + self._gaps
        title = "Bottleneck" if self.is_complete else "Slowest known stage"
        text = f"{title}: {limit.description}"
        if self.consumer_seconds is not None:
            text += f"; the consumer takes {self.consumer_seconds * 1e3:.2f} ms"
            text += self._judgement(self.awaited)
        return text + "." + self._gaps

    def _judgement(self, awaited: Limit | None) -> str:
        if awaited is None:
            if self.is_complete:
                return ": the pipeline keeps up"
            return ": the pipeline keeps up for the rest of the pass" if self._has_the_rest else ""
        if awaited.is_of_consumer:
            return ": it waits, because it does this itself; add a prefetch after it"
        return ": it waits for data"

    @property
    def _gaps(self) -> str:
        names = " and ".join(stage.name for stage in self.stages if not stage.is_recorded)
        if not names:
            return ""
        if self._has_the_rest:
            return f" What {names} read has ended: the rest of the pass is in its buffer."
        return (
            f" Of what {names} read nothing is recorded at the moment: the iterators have ended or "
            "only just begun. Look again."
        )

    @property
    def _has_the_rest(self) -> bool:
        """Whether only the filling of shuffle buffers, which are full, is unknown."""
        unknown = [stage for stage in self.stages if not stage.is_recorded]
        return bool(unknown) and all(
            stage.name.startswith("Shuffle") and stage.buffered for stage in unknown
        )


def read_report(iterator: tf.data.Iterator) -> PipelineReport:
    model = _model_of(iterator)
    if model is None:
        return PipelineReport((), reason=_why_nothing_is_known(iterator))
    batches = int(model.nodes[model.output].num_elements)
    gaps = sorted(model.gap_times)
    algorithm = type(model.optimization_params).DESCRIPTOR.fields_by_name["algorithm"]
    name = algorithm.enum_type.values_by_number[model.optimization_params.algorithm].name
    return PipelineReport(
        read_stages(model, _pool_threads(iterator)),
        batches,
        gaps[len(gaps) // 2] / 1e6 if len(gaps) >= 3 else None,
        name,
    )


def _pool_threads(iterator: tf.data.Iterator) -> int:
    dataset = iterator_adapter.iterated_data_set(iterator)
    own = dataset.options().threading.private_threadpool_size if dataset is not None else None
    return own or tf.config.threading.get_inter_op_parallelism_threads() or len(own_cpus())


def is_unread(iterator: tf.data.Iterator) -> bool:
    model = _model_of(iterator)
    return model is not None and not model.nodes[model.output].num_elements


def _model_of(iterator: tf.data.Iterator) -> ModelProto | None:
    # TensorFlow would log a warning every time it is asked for something it does not have
    if was_handed_over(iterator) or _is_not_tuned(iterator):
        return None
    return iterator_adapter.iterator_model(iterator)


def _is_not_tuned(iterator: tf.data.Iterator) -> bool:
    dataset = iterator_adapter.iterated_data_set(iterator)
    return dataset is not None and dataset.options().autotune.enabled is False


def _why_nothing_is_known(iterator: tf.data.Iterator) -> str:
    if not hasattr(tf.raw_ops, "IteratorGetModelProto"):
        return "This TensorFlow does not show the model of a pipeline: 2.17 or newer is needed."
    if _is_not_tuned(iterator):
        return "The pipeline has options.autotune.enabled = False: nothing is recorded."
    return (
        "The pipeline continues where another one was, as after a move of LoaderTuner: TensorFlow "
        "records nothing of it. Give keras_het.loader.inspect a keras_het.loader.tunable_pipeline "
        "itself. An ordinary dataset with a seeded shuffle or a cache in memory is moved before "
        "its first batch: give it to keras_het.loader.inspect outside of fit, or give fit a "
        "keras_het.loader.tunable_pipeline."
    )


def inspect(
    dataset_or_iterator: tf.data.Dataset | tf.data.Iterator,
    seconds: float = 1.0,
    file: IO[str] | None = None,
) -> PipelineReport:
    """Print what AUTOTUNE chose in a pipeline, live, and name its bottleneck.

    Args:
        dataset_or_iterator: a running `tf.data.Iterator`, which is only inspected; or a
            `tf.data.Dataset`, of which a new iterator is read as fast as possible. This uses up
            one of the orders of an ordinary dataset's seeded shuffle; a `pipeline` with one is
            rebuilt with its present knobs. A dataset that writes files, such as `cache(filename)`
            or `snapshot`, is not read.
        seconds: how long to read a dataset.
        file: where to print, the terminal by default.

    Returns:
        The report as an object.

    Raises:
        TypeError: if the argument is neither.
    """
    check_number("seconds", seconds, least=0)
    if isinstance(dataset_or_iterator, tf.data.Iterator):
        report = read_report(dataset_or_iterator)
    elif isinstance(dataset_or_iterator, tf.data.Dataset):
        report = _report_of_data_set(dataset_or_iterator, seconds)
    else:
        raise TypeError(
            "inspect needs a tf.data.Dataset or a tf.data.Iterator. Received: dataset_or_iterator="
            f"{dataset_or_iterator!r} of type {type(dataset_or_iterator)}. Within fit, call "
            "LoaderTuner.inspect; instead of what strategy.distribute gives, inspect the dataset "
            "that it was given."
        )
    show(report, file)
    return report


def show(report: PipelineReport, file: IO[str] | None = None) -> None:
    console = Console(file=file)
    if report.stages:
        console.print(_table(report))
    console.print(report.verdict)
    if report.seen is not None:
        console.print(report.seen)


def _report_of_data_set(dataset: tf.data.Dataset, seconds: float) -> PipelineReport:
    if any(map(adapter.writes_files, adapter.upstream_of(dataset))):
        # reading would leave partial files, in the way of the training iterator that writes them
        return PipelineReport((), reason=_WRITES_FILES)
    if isinstance(dataset, TunablePipeline):
        dataset = dataset.to_look_at()
    iterator = iter(dataset)
    hold_functions_of(iterator, dataset)
    report = None
    now = time.monotonic()
    end, next_look = now + seconds, now
    for count, _ in enumerate(iterator, 1):
        now = time.monotonic()
        is_power_of_two = not count & (count - 1)  # short datasets may end before the next look
        if now >= next_look or now > end or is_power_of_two:
            report = better(report, read_report(iterator))
            next_look = now + _SECONDS_BETWEEN_LOOKS
        if now > end:
            break
    report = report or read_report(iterator)
    release(iterator)
    # nothing consumed: the time between two queries is meaningless
    return dataclasses.replace(report, consumer_seconds=None)


def better(before: PipelineReport | None, now: PipelineReport) -> PipelineReport:
    """Return the later report, unless it lacks iterators that have just ended, as all do."""
    if before is None or now.is_complete or not before.is_complete:
        return now
    return before


def _table(report: PipelineReport) -> Table:
    slowest = report.limit.stages if report.limit is not None else ()
    table = Table(title=f"{report.batches} batches, AUTOTUNE {report.algorithm}")
    names = ["  " * (stage.depth - 1) + stage.name for stage in report.stages]
    table.add_column("stage", min_width=max(map(len, names)))
    for name in ("parallelism", "buffer", "elements", "ms a batch", "ms in parallel"):
        table.add_column(name, justify="right")
    for name, stage in zip(names, report.stages, strict=True):
        table.add_row(
            name,
            _calls(stage),
            "" if stage.buffer_size is None else f"{stage.buffered} of {stage.buffer_size}",
            str(stage.elements),
            f"{stage.seconds_per_batch * 1e3:.3f}" if stage.is_recorded else "?",
            f"{stage.seconds_per_batch_in_parallel * 1e3:.3f}",
            style="bold" if stage in slowest else None,
        )
    return table


def _calls(stage: PipelineStage) -> str:
    if max(stage.parallelism, stage.most_parallelism) == 1:
        return ""
    text = str(stage.parallelism)
    if stage.parallelism > stage.at_once:
        text += f", {stage.at_once} at once"
    return f"{text} (tuned, at most {stage.most_parallelism})" if stage.is_tuned else text


_NAMED = 0.1  # least part of a limit's time for which a stage is named
_NOTICEABLE = 0.05  # part of the consumer's time; less in its own thread is not a wait


@dataclasses.dataclass(frozen=True)
class Limit:
    """Stages that cannot run at the same time: a pipeline is no faster than they are together."""

    stages: tuple[PipelineStage, ...]
    at_once: int

    @property
    def seconds_per_batch(self) -> float:
        return sum(stage.seconds_per_batch for stage in self.stages) / self.at_once

    @property
    def largest(self) -> PipelineStage:
        return max(self.stages, key=lambda stage: stage.seconds_per_batch)

    @property
    def is_of_consumer(self) -> bool:
        return self.stages[0].thread == CONSUMER

    @property
    def named(self) -> tuple[PipelineStage, ...]:
        least = _NAMED * sum(stage.seconds_per_batch for stage in self.stages)
        return tuple(stage for stage in self.stages if stage.seconds_per_batch >= least)

    @property
    def description(self) -> str:
        named = self.named
        text = _enumerated([stage.name for stage in named])
        is_in_pool = self.stages[0].thread is None
        if len(named) > 1:
            threads = "thread" if self.at_once == 1 else f"{self.at_once} threads"
            text += f" in the same {threads}" if is_in_pool else " one after the other"
        text += f", {self.seconds_per_batch * 1e3:.2f} ms a batch"
        if len(named) == 1 and is_in_pool and named[0].parallelism > self.at_once:
            return f"{text} ({named[0].parallelism} calls, {self.at_once} at once)"
        if self.at_once > 1 and not (len(named) > 1 and is_in_pool):
            text += f" ({self.at_once}{' calls' if is_in_pool else ''} at once)"
        return text


def limits_of(stages: Iterable[PipelineStage]) -> tuple[Limit, ...]:
    threads: dict[int, list[PipelineStage]] = {}
    pool: list[PipelineStage] = []
    for stage in stages:
        if stage.thread is None:
            pool.append(stage)
        else:
            threads.setdefault(stage.thread, []).append(stage)
    limits = [
        Limit(tuple(found), max(stage.at_once for stage in found)) for found in threads.values()
    ]
    # maps that several threads of an interleave call need the pool too
    calls = pool + [
        stage
        for found in threads.values()
        for stage in found
        if stage.at_once > 1 and stage.name == "Map"
    ]
    limits += [Limit((stage,), stage.at_once) for stage in calls]
    if pool:
        # each alone may have all threads, but not both
        shared = Limit(tuple(pool), max(stage.most_parallelism for stage in pool))
        limits += [Limit(shared.named, shared.at_once)] if len(shared.named) > 1 else []
    return tuple(limit for limit in limits if limit.seconds_per_batch > 0.0)


def slowest_of(limits: Iterable[Limit]) -> Limit | None:
    return max(limits, key=lambda limit: limit.seconds_per_batch, default=None)


def _enumerated(names: list[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


_SECONDS_BETWEEN_KEPT_LOOKS = 1.0  # a look takes a few tenths of a millisecond
_PAUSE = 500.0  # times the duration of a look, for pipelines with many iterators

_CUT_DEPTH = 3


class KeptReports:
    """Looks at a pipeline now and then: TensorFlow forgets them once it is handed over or ends."""

    def __init__(self, read: Callable[[], PipelineReport | None]) -> None:
        self._read = read
        self._kept: tuple[PipelineReport, int] | None = None
        self._next_look = 0.0

    def after_step(self, step: int) -> None:
        now = time.monotonic()
        # after the first few steps too: a training may be short
        if now >= self._next_look or not step & (step - 1):
            self.look(step)
            end = time.monotonic()
            self._next_look = end + max(_SECONDS_BETWEEN_KEPT_LOOKS, _PAUSE * (end - now))

    def look(self, step: int) -> PipelineReport | None:
        report = self._read()
        if report is not None and report.stages and report.batches:
            before = self._kept[0] if self._kept is not None else None
            if better(before, report) is report:
                self._kept = report, step
        return report

    def latest(self, step: int) -> PipelineReport | None:
        report = self.look(step)
        has_stages = report is not None and report.stages
        return report if has_stages else self.last_seen or report

    @property
    def last_seen(self) -> PipelineReport | None:
        if self._kept is None:
            return None
        report, step = self._kept
        return dataclasses.replace(report, seen=f"This was seen at step {step} of the training.")


def with_own_rows_named(report: PipelineReport) -> PipelineReport:
    # the one that cuts waits until the consumer settles the shares: that time is not its own
    stages = list(report.stages)
    for place, stage in enumerate(stages):
        if stage.depth == _CUT_DEPTH - 1:
            stages[place] = dataclasses.replace(stage, name="Maps of own rows")
        elif stage.depth == _CUT_DEPTH and stage.name == "Map":
            stages[place] = dataclasses.replace(
                stage, name="Cut into shares", seconds_per_batch=0.0
            )
    return dataclasses.replace(report, stages=tuple(stages))
