"""The secret that tasks share, and the credential that is made of it."""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

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


NONCE_BYTES = 16
_MOST_NONCES = 1024


class Keys(NamedTuple):
    """Keys of one connection."""

    # Made from credential (secret and who is meant), service, sender and a random number of each
    # side that is used once: nothing recorded is worth anything on another connection. Each message
    # has a code over its header with its number, one more than the last.

    proof: bytes
    """Shown by the client as it connects."""
    answer: bytes
    """Shown by the server, which so proves that it knows the secret too."""
    requests: bytes
    answers: bytes

    def is_shown(self, proof: bytes) -> bool:
        return hmac.compare_digest(proof, self.proof)


def make_keys(
    credential: bytes, service: str, sender: int, nonce: bytes, client_nonce: bytes
) -> Keys:
    about = b"keras_het exchange 1\0%s\0%d\0" % (service.encode(), sender) + nonce + client_nonce
    base = hmac.digest(credential, about, "sha256")
    return Keys(*(hmac.digest(base, name.encode(), "sha256") for name in Keys._fields))


class Nonces:
    """Random numbers that were given out, each good for one connection."""

    # So many are open that those who know no secret make a client ask again at worst.

    def __init__(self) -> None:
        self._open: OrderedDict[bytes, None] = OrderedDict()
        self._lock = threading.Lock()

    def give(self) -> bytes:
        nonce = secrets.token_bytes(NONCE_BYTES)
        with self._lock:
            self._open[nonce] = None
            if len(self._open) > _MOST_NONCES:
                self._open.popitem(last=False)
        return nonce

    def take(self, nonce: bytes) -> bool:
        """Return whether a number was given out and not yet used."""
        with self._lock:
            return self._open.pop(nonce, self) is None
