"""Proofs that both sides of a connection know the secret, and the keys of its messages."""

from __future__ import annotations

import hmac
import secrets
import threading
from collections import OrderedDict
from typing import NamedTuple

NONCE_BYTES = 16
_MOST_NONCES = 1024


class Keys(NamedTuple):
    """Keys of one connection.

    They are made from the credential (secret and who is meant), service, sender, and a random
    number of each side that is used once: nothing that was recorded is worth anything on another
    connection. Within one, each message has a code over its header with its number, one more than
    the last.
    """

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
    """Random numbers that were given out, each good for one connection.

    So many of them are open at a time that those who know no secret, and ask for others, make a
    client ask again at worst.
    """

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
