"""What TensorBoard's data provider has of our trainings, put together and kept a while."""

from __future__ import annotations

import collections
import math
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tensorboard import errors
from tensorboard.compat.proto import event_pb2
from tensorboard.data import provider

from keras_het.tensorboard import log_format
from keras_het.tensorboard.log_content import LogContent, NoSetupError, Value, log_content
from keras_het.tensorboard.log_files import content_of

_MOST_KEPT = 4
# A reply of the data server may have 256 MiB; memory takes four times what is read.
_MOST_BYTES = 2**27
_MOST_VALUES = 100_000
_MOST_PASSES = 500


class Histories:
    """Reads trainings: their files where they are on this machine, else what TensorBoard has read.

    TensorBoard reads a file up to its first damage, says nothing of it, and by default does not
    compare checksums.
    """

    def __init__(self, data_provider: Any, logdir: str = "") -> None:
        self._provider, self._logdir = data_provider, logdir
        self._folders: dict[str, Path] = {}  # of runs whose files are on this machine
        self._lock = threading.Lock()  # one page asks for several views of a training at once
        self._kept: collections.OrderedDict[tuple[str, str], tuple[Any, LogContent]] = (
            collections.OrderedDict()
        )

    def runs(self, ctx: Any, experiment: str) -> list[dict[str, Any]]:
        """Return the trainings that have a log: name, and when it was written last."""
        self._find_folders()
        found = {
            run: max((time for _, _, time in self._files(run)), default=0.0)
            for run in list(self._folders)
        }
        if not found:
            listed = self._provider.list_tensors(
                ctx, experiment_id=experiment, plugin_name=log_format.PLUGIN
            )
            found = {
                run: max(series.max_wall_time for series in tags.values())
                for run, tags in listed.items()
                if log_format.SETUP in tags
            }
        return [
            {"name": run, "written": float(time) if math.isfinite(time) else 0.0}
            for run, time in sorted(found.items())
        ]

    def read(self, ctx: Any, experiment: str, run: str) -> LogContent:
        """Return all that is known of a training."""
        state: Any = self._files(run)
        paths = [path for path, _, _ in state]
        if not paths:
            chosen = provider.RunTagFilter(runs=[run])
            tags = self._provider.list_tensors(
                ctx, experiment_id=experiment, plugin_name=log_format.PLUGIN, run_tag_filter=chosen
            ).get(run, {})
            if log_format.SETUP not in tags:
                raise errors.NotFoundError(f"There is no training {run!r} of keras_het.")
            state = sorted((tag, each.max_step, each.max_wall_time) for tag, each in tags.items())
        key = experiment, run
        with self._lock:
            kept = self._kept.get(key)
            if kept is not None and kept[0] == state:
                self._kept.move_to_end(key)
                return kept[1]
            try:
                if paths:
                    content = content_of(paths, _content, event_pb2.Event.FromString)
                else:
                    content = log_content(self._values(ctx, experiment, run, sorted(tags)))
            except NoSetupError as error:
                raise errors.NotFoundError(str(error)) from error
            self._kept[key] = state, content
            while len(self._kept) > _MOST_KEPT:
                self._kept.popitem(last=False)
            return content

    def _find_folders(self) -> None:
        walked = os.walk(self._logdir) if self._logdir else ()
        self._folders = {
            os.path.relpath(folder, self._logdir): Path(folder)
            for folder, _, names in walked
            if log_format.own_files(names)
        }

    def _files(self, run: str) -> list[tuple[str, int, float]]:
        """Path, size and time of each file of a run; of no other folder than those of runs."""
        if run not in self._folders:
            self._find_folders()
        try:
            folder = self._folders[run]
            names = log_format.own_files(each.name for each in folder.iterdir())
            stats = [(str(folder / name), (folder / name).stat()) for name in names]
        except (KeyError, OSError):
            return []
        return [(path, stat.st_size, stat.st_mtime) for path, stat in stats]

    def _values(self, ctx: Any, experiment: str, run: str, tags: list[str]) -> Iterator[Value]:
        for tag in tags:
            most = _MOST_PASSES if tag == log_format.PASSES else _MOST_VALUES
            has_numbers = log_format.steps_per_row(tag) or tag == log_format.HARDWARE_SAMPLES
            if not has_numbers and tag not in log_format.TEXTS:
                continue
            if has_numbers:
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


def _content(path: str, most: int) -> bytes:
    with Path(path).open("rb") as file:
        return file.read(most)


def _text(value: Any) -> bytes:
    item = value.item() if value.size == 1 else b""
    return item if isinstance(item, bytes) else str(item).encode()
