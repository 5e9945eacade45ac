"""What TensorBoard's data provider has of our trainings, put together and kept a while."""

from __future__ import annotations

import collections
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
from tensorboard import errors
from tensorboard.data import provider

from keras_het.tensorboard import log_format
from keras_het.tensorboard.log_content import LogContent, NoSetupError, Value, log_content

_MOST_KEPT = 4
# A reply of the data server may have 256 MiB; memory takes four times what is read.
_MOST_BYTES = 2**27
_MOST_VALUES = 100_000
_MOST_PASSES = 500


class Histories:
    """Reads trainings through a data provider, whatever is behind it.

    Args:
        data_provider: TensorBoard's `DataProvider`.
    """

    def __init__(self, data_provider: Any) -> None:
        self._provider = data_provider
        self._lock = threading.Lock()  # one page asks for several views of a training at once
        self._kept: collections.OrderedDict[tuple[str, str], tuple[Any, LogContent]] = (
            collections.OrderedDict()
        )

    def runs(self, ctx: Any, experiment: str) -> list[dict[str, Any]]:
        """Return the trainings that have a setup: name, last step and time of the last value.

        Args:
            ctx: TensorBoard's context of the request.
            experiment: its experiment's id.
        """
        found = self._provider.list_tensors(
            ctx, experiment_id=experiment, plugin_name=log_format.PLUGIN
        )
        return [
            {
                "name": run,
                "last_step": int(max(series.max_step for series in tags.values())),
                "written": float(max(series.max_wall_time for series in tags.values())),
            }
            for run, tags in sorted(found.items())
            if log_format.SETUP in tags
        ]

    def read(self, ctx: Any, experiment: str, run: str) -> LogContent:
        """Return all that is known of a training.

        Args:
            ctx: TensorBoard's context of the request.
            experiment: its experiment's id.
            run: name of the training.

        Raises:
            NotFoundError: if there is no such training.
        """
        chosen = provider.RunTagFilter(runs=[run])
        tags = self._provider.list_tensors(
            ctx, experiment_id=experiment, plugin_name=log_format.PLUGIN, run_tag_filter=chosen
        ).get(run, {})
        if log_format.SETUP not in tags:
            raise errors.NotFoundError(f"There is no training {run!r} of keras_het.")
        state = sorted((tag, series.max_step, series.max_wall_time) for tag, series in tags.items())
        key = experiment, run
        with self._lock:
            kept = self._kept.get(key)
            if kept is not None and kept[0] == state:
                self._kept.move_to_end(key)
                return kept[1]
            try:
                content = log_content(self._values(ctx, experiment, run, sorted(tags)))
            except NoSetupError as error:
                raise errors.NotFoundError(str(error)) from error
            self._kept[key] = state, content
            while len(self._kept) > _MOST_KEPT:
                self._kept.popitem(last=False)
            return content

    def _values(self, ctx: Any, experiment: str, run: str, tags: list[str]) -> Iterator[Value]:
        for tag in tags:
            most = _MOST_PASSES if tag == log_format.PASSES else _MOST_VALUES
            if log_format.steps_per_row(tag) or tag == log_format.HARDWARE_SAMPLES:
                for sample in self._read(ctx, experiment, run, tag, 1):
                    most = max(min(most, _MOST_BYTES // max(sample.numpy.nbytes, 1)), 1)
            for each in self._read(ctx, experiment, run, tag, most):
                value = np.asarray(each.numpy)
                content = value if value.dtype.kind == "f" else _text(value)
                yield Value(tag, int(each.step), float(each.wall_time), content)

    def _read(self, ctx: Any, experiment: str, run: str, tag: str, most: int) -> Any:
        found = self._provider.read_tensors(
            ctx,
            experiment_id=experiment,
            plugin_name=log_format.PLUGIN,
            downsample=most,
            run_tag_filter=provider.RunTagFilter(runs=[run], tags=[tag]),
        )
        return found.get(run, {}).get(tag, [])


def _text(value: Any) -> bytes:
    item = value.item() if value.size == 1 else b""
    return item if isinstance(item, bytes) else str(item).encode()
