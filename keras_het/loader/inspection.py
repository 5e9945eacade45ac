"""Shows what AUTOTUNE chose in a running pipeline, and where its time goes."""

from __future__ import annotations

import dataclasses
import re
import time
from typing import Any

import tensorflow as tf
from rich.console import Console
from rich.table import Table

from keras_het import private_api
from keras_het.loader.iterator_release import release


@dataclasses.dataclass(frozen=True)
class Stage:
    """One operation of a pipeline.

    Args:
        name: kind of operation, as TensorFlow runs it: neighbours may have been fused.
        depth: operations between it and the consumer.
        parallelism: calls at the same time; 1 for an operation that is not parallel.
        most_parallelism: largest number that AUTOTUNE may choose.
        is_tuned: whether AUTOTUNE may change it.
        buffer_size: elements that its buffer holds, None if it has none.
        buffered: elements in its buffer.
        buffered_bytes: their size.
        elements: elements that it gave so far.
        seconds_per_batch: its own time for a batch of the pipeline, waiting in its function
            included, in seconds.
    """

    name: str
    depth: int
    parallelism: int
    most_parallelism: int
    is_tuned: bool
    buffer_size: int | None
    buffered: int
    buffered_bytes: int
    elements: int
    seconds_per_batch: float

    @property
    def seconds_per_batch_in_parallel(self) -> float:
        """Its time for a batch with all its calls busy: the pipeline is no faster than that."""
        return self.seconds_per_batch / self.parallelism


@dataclasses.dataclass(frozen=True)
class PipelineReport:
    """What a running pipeline does.

    Args:
        stages: its operations, the consumer's end first.
        batches: batches that it gave.
        consumer_seconds: median time from one batch to the question for the next; None if too few
            were taken.
        algorithm: what AUTOTUNE uses; None if the pipeline is not tuned.
        reason: why nothing is known, None if it is.
    """

    stages: tuple[Stage, ...]
    batches: int = 0
    consumer_seconds: float | None = None
    algorithm: str | None = None
    reason: str | None = None

    @property
    def bottleneck(self) -> Stage | None:
        """The operation that bounds the pipeline; None if nothing is known."""
        slowest = max(
            self.stages, key=lambda stage: stage.seconds_per_batch_in_parallel, default=None
        )
        return slowest if slowest is not None and slowest.seconds_per_batch > 0 else None

    @property
    def occupancy(self) -> float | None:
        """How full the last buffer is, from 0 to 1; None if there is none."""
        sizes = [stage for stage in self.stages if stage.buffer_size and stage.name == "Prefetch"]
        return min(sizes[0].buffered / sizes[0].buffer_size, 1.0) if sizes else None  # type: ignore[operator]

    @property
    def verdict(self) -> str:
        """One sentence."""
        slowest = self.bottleneck
        if self.reason is not None:
            return self.reason
        if slowest is None:
            return "No batch was taken yet."
        time_of = slowest.seconds_per_batch_in_parallel * 1e3
        text = f"Bottleneck: {slowest.name}, {time_of:.2f} ms a batch"
        if slowest.parallelism > 1:
            text += f" ({slowest.parallelism} calls at once)"
        if self.consumer_seconds is not None:
            text += f"; the consumer takes {self.consumer_seconds * 1e3:.2f} ms"
            waits = slowest.seconds_per_batch_in_parallel > self.consumer_seconds
            text += ": it waits for data" if waits else ": the pipeline keeps up"
        return text + "."


def read_report(iterator: Any) -> PipelineReport:
    """What a running iterator does, from the model by which AUTOTUNE tunes it.

    Args:
        iterator: a `tf.data.Iterator`. One question takes about 0.1 ms.

    Returns:
        A report; without stages, and with a reason, where TensorFlow exposes nothing: before
        version 2.17, for pipelines with `options.autotune.enabled = False`, and for those that were
        handed over.
    """
    model = private_api.iterator_model(iterator)
    if model is None:
        return PipelineReport((), reason=_why_nothing_is_known(iterator))
    batches = int(model.nodes[model.output].num_elements)
    stages: list[Stage] = []
    _collect(model, model.output, 0, batches, stages)
    gaps = sorted(model.gap_times)
    algorithm = type(model.optimization_params).DESCRIPTOR.fields_by_name["algorithm"]
    name = algorithm.enum_type.values_by_number[model.optimization_params.algorithm].name
    return PipelineReport(
        tuple(stage for stage in stages if stage.name != "Root"),
        batches,
        gaps[len(gaps) // 2] / 1e6 if len(gaps) >= 3 else None,
        name,
    )


def _why_nothing_is_known(iterator: Any) -> str:
    if not hasattr(tf.raw_ops, "IteratorGetModelProto"):
        return "This TensorFlow does not show the model of a pipeline: 2.17 or newer is needed."
    dataset = private_api.iterated_data_set(iterator)
    if dataset is not None and dataset.options().autotune.enabled is False:
        return "The pipeline has options.autotune.enabled = False: nothing is recorded."
    return (
        "The pipeline goes on where another one was, as after a move of LoaderTuner: TensorFlow "
        "records nothing of it."
    )


def inspect(dataset_or_iterator: Any, seconds: float = 1.0, file: Any = None) -> PipelineReport:
    """Prints what AUTOTUNE chose in a pipeline, live, and names its bottleneck.

    Args:
        dataset_or_iterator: a running `tf.data.Iterator`, which is only looked at; or a
            `tf.data.Dataset`, of which a new iterator is read as fast as it goes.
        seconds: how long to read a data set.
        file: where to print, the terminal by default.

    Returns:
        The same as an object.

    Raises:
        TypeError: if it is neither.
    """
    if isinstance(dataset_or_iterator, tf.data.Iterator):
        report = read_report(dataset_or_iterator)
    elif isinstance(dataset_or_iterator, tf.data.Dataset):
        report = _report_of_data_set(dataset_or_iterator, seconds)
    else:
        raise TypeError(
            "inspect needs a tf.data.Dataset or a tf.data.Iterator. Received: "
            f"{dataset_or_iterator!r} of type {type(dataset_or_iterator)}. Within fit without "
            "a strategy, call LoaderTuner.inspect."
        )
    console = Console(file=file)
    if report.stages:
        console.print(_table(report))
    console.print(report.verdict)
    return report


def _report_of_data_set(dataset: Any, seconds: float) -> PipelineReport:
    iterator = iter(dataset)
    end = time.monotonic() + seconds
    for _ in iterator:
        if time.monotonic() > end:
            break
    report = read_report(iterator)
    release(iterator)
    # nobody consumed: the time between two questions says nothing
    return dataclasses.replace(report, consumer_seconds=None)


def _collect(model: Any, number: int, depth: int, batches: int, stages: list[Stage]) -> None:
    node = model.nodes[number]
    parameters = {entry.name: entry for entry in node.parameters}
    parallel, buffer = parameters.get("parallelism"), parameters.get("buffer_size")
    stages.append(
        Stage(
            name=re.sub(r"V\d+$", "", node.name),
            depth=depth,
            parallelism=max(int(parallel.state_value), 1) if parallel else 1,
            most_parallelism=max(int(parallel.max), 1) if parallel else 1,
            is_tuned=any(entry.tunable for entry in node.parameters),
            buffer_size=int(buffer.state_value) if buffer else None,
            buffered=int(node.buffered_elements),
            buffered_bytes=int(node.buffered_bytes),
            elements=int(node.num_elements),
            seconds_per_batch=node.processing_time / 1e9 / batches if batches else 0.0,
        )
    )
    for source in node.inputs:
        _collect(model, source, depth + 1, batches, stages)


def _table(report: PipelineReport) -> Table:
    table = Table(title=f"{report.batches} batches, AUTOTUNE {report.algorithm}")
    for name in ("stage", "parallelism", "buffer", "elements", "ms a batch", "ms in parallel"):
        table.add_column(name, justify="left" if name == "stage" else "right")
    for stage in report.stages:
        tuned = f" (tuned, at most {stage.most_parallelism})" if stage.is_tuned else ""
        table.add_row(
            "  " * (stage.depth - 1) + stage.name,
            f"{stage.parallelism}{tuned}" if stage.most_parallelism > 1 else "",
            "" if stage.buffer_size is None else f"{stage.buffered} of {stage.buffer_size}",
            str(stage.elements),
            f"{stage.seconds_per_batch * 1e3:.3f}",
            f"{stage.seconds_per_batch_in_parallel * 1e3:.3f}",
            style="bold" if stage is report.bottleneck else None,
        )
    return table
