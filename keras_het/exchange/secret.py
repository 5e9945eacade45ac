"""The secret that tasks share, and the credential that is made of it."""

from __future__ import annotations

import hashlib
import hmac
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

SECRET_VARIABLE = "KERAS_HET_SECRET"
SECRET_FILE_VARIABLE = "KERAS_HET_SECRET_FILE"


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


def model_fingerprint(
    names: Sequence[str], shapes: Sequence[Sequence[int]], dtypes: Sequence[str], rule: str
) -> str:
    """Hash the properties on which client and service must agree.

    Args:
        names: names of the variables, in order.
        shapes: their shapes.
        dtypes: their element types.
        rule: name of the update rule.
    """
    described = [list(names), [list(map(int, shape)) for shape in shapes], list(dtypes), rule]
    return hashlib.sha256(json.dumps(described).encode()).hexdigest()


def credential(secret: bytes, fingerprint: str) -> bytes:
    """Return the 32-byte proof of secret and model that a connection is made with."""
    return hmac.new(secret, fingerprint.encode(), hashlib.sha256).digest()
