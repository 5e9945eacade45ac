"""A data provider that has what it is given, in the place of TensorBoard's."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from tensorboard.data import provider

from keras_het.tensorboard import log_format
from keras_het.tensorboard.log_content import Value


class FakeProvider:
    """Answers as TensorBoard's providers do.

    Args:
        runs: by name, the values of each.
    """

    def __init__(self, runs: Mapping[str, Iterable[Value]]) -> None:
        self.reads = 0
        self.data: dict[str, dict[str, list[Any]]] = {}
        for run, values in runs.items():
            self.add(run, values)

    def add(self, run: str, values: Iterable[Value]) -> None:
        tags = self.data.setdefault(run, collections.defaultdict(list))
        for each in values:
            array = np.asarray(each.value)
            if isinstance(each.value, bytes):
                array = np.array(each.value, object)
            tags[each.tag].append(provider.TensorDatum(each.step, each.time, array))

    def list_tensors(
        self,
        ctx: Any = None,
        *,
        experiment_id: str,
        plugin_name: str,
        run_tag_filter: Any = None,
    ) -> dict[str, dict[str, Any]]:
        assert plugin_name == log_format.PLUGIN
        return {
            run: {
                tag: provider.TensorTimeSeries(
                    max_step=max(each.step for each in series),
                    max_wall_time=max(each.wall_time for each in series),
                    plugin_content=b"",
                    description="",
                    display_name="",
                )
                for tag, series in tags.items()
            }
            for run, tags in self.data.items()
            if run_tag_filter is None or run in run_tag_filter.runs
        }

    def read_tensors(
        self,
        ctx: Any = None,
        *,
        experiment_id: str,
        plugin_name: str,
        downsample: int,
        run_tag_filter: Any,
    ) -> dict[str, dict[str, list[Any]]]:
        self.reads += 1
        return {
            run: {tag: self.data[run][tag][-downsample:] for tag in run_tag_filter.tags}
            for run in run_tag_filter.runs
        }
