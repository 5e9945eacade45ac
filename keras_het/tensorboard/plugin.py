"""The plugin itself: its routes, which only read."""

from __future__ import annotations

import functools
import importlib.resources
import json
import logging
from collections.abc import Callable, Mapping
from typing import Any

from tensorboard import errors, plugin_util
from tensorboard.backend import http_util
from tensorboard.plugins import base_plugin
from werkzeug import wrappers

from keras_het.tensorboard import log_format, views
from keras_het.tensorboard.histories import Histories
from keras_het.tensorboard.log_content import LogContent

_logger = logging.getLogger("keras_het")
_TYPES = {"js": "text/javascript", "css": "text/css", "txt": "text/plain"}
_LONGEST_ARGUMENT = 2_000
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
        """Return the application behind each route."""
        return {
            "/runs": self._app(self._runs),
            "/overview": self._app(self._overview),
            "/diagnosis": self._app(self._diagnosis),
            "/heat_map": self._app(self._heat_map),
            "/pipeline": self._app(self._pipeline),
            "/lanes": self._app(self._lanes),
            "/static/*": self._app(self._static),
        }

    def is_active(self) -> bool:
        """Return False: TensorBoard finds out from the data whether the tab has something."""
        return False

    def frontend_metadata(self) -> Any:
        """Return what TensorBoard needs to show the tab."""
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

    def _diagnosis(self, request: Any) -> Any:
        _, part = self._content(request)
        return _json(request, views.diagnosis(part), part)

    def _pipeline(self, request: Any) -> Any:
        _, part = self._content(request)
        return _json(request, views.pipeline(part), part)

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
        """The training that a request names, and the part of it with the steps it names."""
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
