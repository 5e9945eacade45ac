"""Compares credentials in the graph, in a time that says nothing about them."""

from __future__ import annotations

import secrets
from typing import Any

import tensorflow as tf


class Gate:
    """Admits requests that carry a credential.

    Hashes under a key that nobody knows are compared, not the bytes one by one: how long the
    comparison takes says nothing about the credential.

    Args:
        credential: what every request must carry.
    """

    def __init__(self, credential: bytes) -> None:
        self._key = [secrets.randbits(63), secrets.randbits(63)]
        self._expected = int(self._hash(tf.constant(credential)))

    def admits(self, credential: Any) -> Any:
        """Whether a request may pass, bool scalar.

        Args:
            credential: what it carries, string scalar.
        """
        return tf.equal(self._hash(credential), self._expected)

    def _hash(self, credential: Any) -> Any:
        return tf.strings.to_hash_bucket_strong(credential, 2**62, key=self._key)
