"""The plugin itself: its routes, which only read."""

from __future__ import annotations

import collections
import functools
import importlib.resources
import json
import logging
import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from tensorboard import errors, plugin_util
from tensorboard.backend import http_util
from tensorboard.compat.proto import event_pb2
from tensorboard.data import provider
from tensorboard.plugins import base_plugin
from werkzeug import wrappers

from keras_het.tensorboard import log_format, views
from keras_het.tensorboard.log_content import LogContent, NoSetupError, Value, log_content
from keras_het.tensorboard.log_files import content_of

_logger = logging.getLogger("keras_het")
_TYPES = {"js": "text/javascript", "css": "text/css", "txt": "text/plain"}
_LONGEST_ARGUMENT = 2_000
_MOST_KEPT = 4
# A reply of the data server may have 256 MiB; memory takes four times what is read.
_MOST_BYTES = 2**27
_MOST_VALUES = 100_000
_MOST_PASSES = 500
_Arguments = Mapping[str, str]


class HetPlugin(base_plugin.TBPlugin):
    """The tab "Heterogeneous": which device is slow, why, and what that costs."""

    plugin_name = log_format.PLUGIN

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self._histories = Histories(context.data_provider, context.logdir or "")
        folder = importlib.resources.files(__package__) / "static"
        # Exact names only: a path that leads elsewhere is in no dictionary.
        self._files = {
            file.name: file for file in folder.iterdir() if file.name.rpartition(".")[2] in _TYPES
        }

    def get_plugin_apps(self) -> dict[str, Any]:
        return {
            "/runs": self._app(self._runs),
            "/overview": self._app(self._overview),
            "/diagnosis": self._app(functools.partial(self._of_part, views.diagnosis)),
            "/heat_map": self._app(self._heat_map),
            "/pipeline": self._app(functools.partial(self._of_part, views.pipeline)),
            "/lanes": self._app(self._lanes),
            "/static/*": self._app(self._static),
        }

    def is_active(self) -> bool:
        """Return False: TensorBoard finds out from the data whether the tab has something."""
        return False

    def frontend_metadata(self) -> Any:
        return base_plugin.FrontendMetadata(
            es_module_path="/static/index.js", tab_name="Heterogeneous"
        )

    def _app(self, answer: Callable[[Any], Any]) -> Any:
        @wrappers.Request.application
        @functools.wraps(answer)
        def application(request: Any) -> Any:
            if request.method not in ("GET", "HEAD"):
                return http_util.Respond(
                    request, "Only GET.", "text/plain", 405, headers=[("Allow", "GET, HEAD")]
                )
            try:
                return answer(request)
            except errors.PublicError:
                raise
            except Exception as error:  # of this training: the page says so and shows the others
                _logger.exception("%s of the tab of keras_het", request.path)
                reason = f"This log cannot be shown: {error!r:.300}"
                return http_util.Respond(request, reason, "text/plain", 500)

        return application

    def _runs(self, request: Any) -> Any:
        context, experiment = _origin(request)
        return _json(request, {"runs": self._histories.runs(context, experiment)})

    def _overview(self, request: Any) -> Any:
        whole, part = self._content(request)
        return _json(request, views.overview(whole, part), part)

    def _of_part(self, view: Callable[[LogContent], dict[str, Any]], request: Any) -> Any:
        _, part = self._content(request)
        return _json(request, view(part), part)

    def _heat_map(self, request: Any) -> Any:
        _, part = self._content(request)
        name = _argument(request.args, "quantity", "wall")
        how = _argument(request.args, "how", "median")
        if how not in views.HOW:
            raise errors.InvalidArgumentError(f'"how" is "median" or "highest". Received: {how!r}.')
        most = _integer(request.args, "columns")
        answer = views.heat_map(part, name, how, max(most or views.MOST_COLUMNS, 1))
        if answer is None:
            raise errors.NotFoundError(f"There is no quantity {name!r}.")
        return _json(request, answer, part)

    def _lanes(self, request: Any) -> Any:
        _, part = self._content(request)
        text = _argument(request.args, "devices", "")
        try:
            chosen = [int(each) for each in text.split(",") if each]
        except ValueError as error:
            raise errors.InvalidArgumentError(
                f'"devices" are indices with commas between them. Received: {text!r}.'
            ) from error
        return _json(request, views.lanes(part, chosen[: views.MOST_LANES]), part)

    def _static(self, request: Any) -> Any:
        name = request.path.partition(f"/plugin/{log_format.PLUGIN}/static/")[2]
        file = self._files.get(name)
        if file is None:
            raise errors.NotFoundError("There is no such file.")
        kind = _TYPES[name.rpartition(".")[2]]
        return http_util.Respond(request, file.read_bytes(), kind)

    def _content(self, request: Any) -> tuple[LogContent, LogContent]:
        context, experiment = _origin(request)
        run = _argument(request.args, "run", "")
        whole = self._histories.read(context, experiment, run)
        first, last = _integer(request.args, "first"), _integer(request.args, "last")
        return whole, views.between(whole, first, last)


def _origin(request: Any) -> tuple[Any, str]:
    environ = request.environ
    return plugin_util.context(environ), plugin_util.experiment_id(environ)


def _argument(arguments: _Arguments, name: str, default: str) -> str:
    text = arguments.get(name, default)
    if len(text) > _LONGEST_ARGUMENT:
        raise errors.InvalidArgumentError(f'"{name}" is too long.')
    return text


def _integer(arguments: _Arguments, name: str) -> int | None:
    text = _argument(arguments, name, "")
    try:
        value = int(text) if text else None
    except ValueError as error:
        raise errors.InvalidArgumentError(
            f'"{name}" is an integer. Received: {text[:50]!r}.'
        ) from error
    if value is not None and not -(2**62) < value < 2**62:
        raise errors.InvalidArgumentError(f'"{name}" is out of range.')
    return value


def _json(request: Any, answer: dict[str, Any], content: LogContent | None = None) -> Any:
    if content is not None:
        answer["messages"] = views.messages(content)
    # A text is not searched for NaN, which takes TensorBoard long; there is none in it.
    return http_util.Respond(request, json.dumps(answer, allow_nan=False), "application/json")


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
            has_numbers = log_format.has_numbers(tag)
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
