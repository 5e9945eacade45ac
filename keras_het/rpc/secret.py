"""The secret that tasks share; read without TensorFlow, which may not start where it is checked."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

SECRET_VARIABLE = "KERAS_HET_SERVICE_SECRET"
SECRET_FILE_VARIABLE = "KERAS_HET_SERVICE_SECRET_FILE"


def read_secret(environ: Mapping[str, str] | None = None) -> bytes:
    """Read the shared secret from the environment or a file; never from a command line."""
    environ = os.environ if environ is None else environ
    text, path = environ.get(SECRET_VARIABLE, ""), environ.get(SECRET_FILE_VARIABLE, "")
    if bool(text) == bool(path):
        given = "both" if text else "neither"
        raise ValueError(
            "The parameter service needs one shared secret, the same for all tasks. Received: "
            f"{given} of {SECRET_VARIABLE} and {SECRET_FILE_VARIABLE}. Set one of them, for "
            f"example {SECRET_FILE_VARIABLE} to a file with the output of `openssl rand -hex 32`."
        )
    secret = text.encode() if text else Path(path).read_bytes().strip()
    if len(secret) < 16:
        raise ValueError(
            f"The shared secret must have at least 16 bytes. Received: {len(secret)} bytes. "
            "`openssl rand -hex 32` makes a good one."
        )
    return secret
