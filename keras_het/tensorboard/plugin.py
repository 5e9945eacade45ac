"""The plugin itself: its routes, which only read."""

from __future__ import annotations

import collections
import functools
import importlib.resources
import json
import logging
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from tensorboard import errors, plugin_util
from tensorboard.backend import http_util
from tensorboard.context import RequestContext
from tensorboard.data import provider
from tensorboard.plugins import base_plugin
from werkzeug.wrappers import Request, Response

from keras_het.tensorboard import log_format, views
from keras_het.tensorboard.log_content import LogContent, UnreadableLogError, Value, log_content

_logger = logging.getLogger(__name__)
_TYPES = {"js": "text/javascript", "css": "text/css", "txt": "text/plain"}
_LONGEST_ARGUMENT = 2_000
_MOST_KEPT = 4
# A reply of the data server may have 256 MiB; memory takes four times what is read.
_MOST_BYTES = 2**27
_MOST_VALUES, _MOST_TAGS = 100_000, 60
_SOME = 9  # values of a tag that tell how large they are
_MOST_PASSES = 500
_Arguments = Mapping[str, str]
_View = Callable[[LogContent, LogContent, _Arguments], dict[str, Any]]


class HetPlugin(base_plugin.TBPlugin):
    """The tab "Heterogeneous": which device is slow, why, and what that costs."""

    plugin_name = log_format.PLUGIN

    def __init__(self, context: base_plugin.TBContext) -> None:
        super().__init__(context)
        self._histories = Histories(context.data_provider)
        folder = importlib.resources.files(__package__) / "static"
        # Exact names only: a path that leads elsewhere is in no dictionary.
        self._files = {
            file.name: file for file in folder.iterdir() if file.name.rpartition(".")[2] in _TYPES
        }

    def get_plugin_apps(self) -> dict[str, Any]:
        routes: dict[str, Any] = {"/runs": self._runs, "/static/*": self._static}
        routes |= {f"/{name}": functools.partial(self._view, view) for name, view in _VIEWS.items()}
        return {route: _application(answer) for route, answer in routes.items()}

    def is_active(self) -> bool:
        """Return False: TensorBoard finds out from the data whether the tab has something."""
        return False

    def frontend_metadata(self) -> base_plugin.FrontendMetadata:
        return base_plugin.FrontendMetadata(
            es_module_path="/static/index.js", tab_name="Heterogeneous"
        )

    def _runs(self, request: Request) -> Response:
        return _json(request, {"runs": self._histories.runs(*_origin(request))})

    def _view(self, view: _View, request: Request) -> Response:
        whole = self._histories.read(*_origin(request), _argument(request.args, "run", ""))
        first, last = _integer(request.args, "first"), _integer(request.args, "last")
        part = views.between(whole, first, last)
        answer = view(whole, part, request.args)
        return _json(request, {**answer, "messages": part.messages})

    def _static(self, request: Request) -> Response:
        name = request.path.partition(f"/plugin/{log_format.PLUGIN}/static/")[2]
        file = self._files.get(name)
        if file is None:
            raise errors.NotFoundError("There is no such file.")
        kind = _TYPES[name.rpartition(".")[2]]
        return http_util.Respond(request, file.read_bytes(), kind)


def _application(answer: Callable[[Request], Response]) -> Callable[..., Any]:
    @Request.application
    def application(request: Request) -> Response:
        if request.method not in ("GET", "HEAD"):
            allowed = [("Allow", "GET, HEAD")]
            return http_util.Respond(request, "Only GET.", "text/plain", 405, headers=allowed)
        try:
            return answer(request)
        except errors.PublicError:
            raise
        except Exception as error:  # of this training: the page says so and shows the others
            _logger.exception("%s of the tab of keras_het", request.path)
            reason = f"This log cannot be shown: {error!r:.300}"
            return http_util.Respond(request, reason, "text/plain", 500)

    return application


def _heat_map(part: LogContent, arguments: _Arguments) -> dict[str, Any]:
    name = _argument(arguments, "quantity", "wall")
    how = _argument(arguments, "how", "median")
    if how not in views.HOW:
        raise errors.InvalidArgumentError(f'"how" is "median" or "highest". Received: {how!r}.')
    most = _integer(arguments, "columns")
    answer = views.heat_map(part, name, how, max(most or views.MOST_COLUMNS, 1))
    if answer is None:
        raise errors.NotFoundError(f"There is no quantity {name!r}.")
    return answer


def _lanes(part: LogContent, arguments: _Arguments) -> dict[str, Any]:
    text = _argument(arguments, "devices", "")
    try:
        chosen = [int(each) for each in text.split(",") if each]
    except ValueError as error:
        raise errors.InvalidArgumentError(
            f'"devices" are indices with commas between them. Received: {text!r}.'
        ) from error
    return views.lanes(part, chosen[: views.MOST_LANES])


_VIEWS: Mapping[str, _View] = {
    "overview": lambda whole, part, _: views.overview(whole, part),
    "diagnosis": lambda _, part, __: views.diagnosis(part),
    "pipeline": lambda _, part, __: views.pipeline(part),
    "heat_map": lambda _, part, arguments: _heat_map(part, arguments),
    "lanes": lambda _, part, arguments: _lanes(part, arguments),
}
"""What a route answers of a training, of a part of it, and with arguments."""


def _origin(request: Request) -> tuple[RequestContext, str]:
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


def _json(request: Request, answer: dict[str, Any]) -> Response:
    # A text is not searched for NaN, which takes TensorBoard long; there is none in it.
    return http_util.Respond(request, json.dumps(answer, allow_nan=False), "application/json")


class Histories:
    """Reads trainings from what TensorBoard has read, wherever that is."""

    def __init__(self, data_provider: provider.DataProvider) -> None:
        self._provider = data_provider
        self._lock = threading.Lock()  # one page asks for several views of a training at once
        self._kept: collections.OrderedDict[tuple[str, str], tuple[Any, LogContent]] = (
            collections.OrderedDict()
        )

    def runs(self, ctx: RequestContext, experiment: str) -> list[dict[str, Any]]:
        """Return the trainings that have a log: name, and when it was written last."""
        found = {
            run: max(series.max_wall_time for series in tags.values())
            for run, tags in self._tags(ctx, experiment).items()
        }
        return [
            {"name": run, "written": float(time) if math.isfinite(time) else 0.0}
            for run, time in sorted(found.items())
        ]

    def read(self, ctx: RequestContext, experiment: str, run: str) -> LogContent:
        tags = self._tags(ctx, experiment, provider.RunTagFilter(runs=[run])).get(run)
        if tags is None:
            raise errors.NotFoundError(f"There is no training {run!r} of keras_het.")
        state = sorted((tag, each.max_step, each.max_wall_time) for tag, each in tags.items())
        key = experiment, run
        with self._lock:
            kept = self._kept.get(key)
            if kept is None or kept[0] != state:
                messages: list[str] = []
                values = [*self._values(ctx, experiment, run, sorted(tags), messages)]
                try:
                    kept = state, log_content(values, messages)
                except UnreadableLogError as error:
                    raise errors.NotFoundError(str(error)) from error
            self._kept[key] = kept
            self._kept.move_to_end(key)
            while len(self._kept) > _MOST_KEPT:
                self._kept.popitem(last=False)
            return kept[1]

    def _tags(
        self,
        ctx: RequestContext,
        experiment: str,
        of_run: provider.RunTagFilter | None = None,
    ) -> dict[str, dict[str, provider.TensorTimeSeries]]:
        listed = self._provider.list_tensors(
            ctx, experiment_id=experiment, plugin_name=log_format.PLUGIN, run_tag_filter=of_run
        )
        return {run: tags for run, tags in listed.items() if log_format.SETUP in tags}

    def _values(
        self, ctx: RequestContext, experiment: str, run: str, tags: list[str], messages: list[str]
    ) -> Iterator[Value]:
        known = [each for each in tags if log_format.has_numbers(each) or each in log_format.TEXTS]
        for tag in known[:_MOST_TAGS]:
            most = _MOST_PASSES if tag == log_format.PASSES else _MOST_VALUES
            try:
                if log_format.has_numbers(tag):
                    some = self._read(ctx, experiment, run, tag, _SOME)
                    usual = int(np.median([each.numpy.nbytes for each in some] or [1]))
                    most = max(min(most, _MOST_BYTES // max(usual, 1)), 1)
                found = self._read(ctx, experiment, run, tag, most)
            except Exception as error:  # a tensor may claim to be larger than memory
                messages.append(f"{tag} cannot be read: {error!r:.300}")
                continue
            for each in found:
                value = np.asarray(each.numpy)
                content = value if value.dtype.kind == "f" else _text(value)
                yield Value(tag, int(each.step), float(each.wall_time), content)

    def _read(
        self, ctx: RequestContext, experiment: str, run: str, tag: str, most: int
    ) -> Sequence[provider.TensorDatum]:
        found = self._provider.read_tensors(
            ctx,
            experiment_id=experiment,
            plugin_name=log_format.PLUGIN,
            downsample=most,
            run_tag_filter=provider.RunTagFilter(runs=[run], tags=[tag]),
        )
        return found.get(run, {}).get(tag, [])


def _text(value: np.ndarray) -> bytes:
    item = value.item() if value.size == 1 else b""
    return item if isinstance(item, bytes) else str(item).encode()
