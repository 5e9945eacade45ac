"""Errors that must end nothing, for example while tidying up: each is a line of the log."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

_logger = logging.getLogger(__name__)


@contextlib.contextmanager
def ignore_errors(doing: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        _logger.debug("Ignored while %s: %r", doing, error)
