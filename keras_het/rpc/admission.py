"""Admission to a service: a credential of secret and model, and a token in each request."""

from __future__ import annotations

import enum
import hashlib
import hmac
import json
import secrets
from collections.abc import Sequence

import tensorflow as tf

LONGEST_AGE_SECONDS = 600.0
"""Largest difference between the times of a token and of the server, in both directions."""
_TIME_DIGITS, _CODE_DIGITS = 16, 19
_BUCKETS = 2**62


class Status(enum.IntEnum):
    """The service's verdict on a request."""

    OK = 0
    REFUSED = 1
    NOT_FINITE = 2
    UNKNOWN_CLIENT = 3
    WAIT = 4
    STALE = 5
    REPEATED = 6
    CLOSED = 7
    NO_CENTER = 8


DIVERGED = (
    "The parameter service does not take this worker's weights, which are not finite, or with "
    "which the center would not be. Its training has diverged: lower the learning rate. "
    "keras.callbacks.TerminateOnNaN ends it."
)


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
    """Return the 32-byte proof of secret and model that every request carries."""
    return hmac.new(secret, fingerprint.encode(), hashlib.sha256).digest()


def token(credential: bytes, function: str, now: tf.Tensor | float) -> tf.Tensor:
    r"""Return a time and a code over time and function that only a credential holder can compute.

    .. math:: \mathrm{token} = t \,\Vert\, \mathrm{SipHash}_k(t \,\Vert\, \mathrm{function})

    with a key k derived from the credential. The credential itself never travels, and a recorded
    token opens no other function, nor the same one after `LONGEST_AGE_SECONDS`.
    """
    milliseconds = tf.cast(tf.convert_to_tensor(now, tf.float64) * 1000, tf.int64)
    time = tf.strings.as_string(milliseconds, width=_TIME_DIGITS, fill="0")
    return time + _code(_key_of(credential), time, function)


class Gate:
    """Admission of requests whose token was recently made with a credential.

    It compares hashes under a random secret key, not the characters one by one, so the time of a
    comparison reveals nothing about the right code.
    """

    def __init__(self, credential: bytes) -> None:
        self._key = _key_of(credential)
        self._own_key = [secrets.randbits(63), secrets.randbits(63)]

    def admits(self, token: tf.Tensor, function: str) -> tf.Tensor:
        """Return whether a request may pass, bool scalar; in a graph or eagerly."""
        time = tf.strings.substr(token, 0, _TIME_DIGITS)
        code = _code(self._key, time, function)
        is_made_here = tf.equal(self._hash(token), self._hash(time + code))
        # Only digits reach the conversion, which fails on anything else.
        milliseconds = tf.strings.to_number(tf.where(is_made_here, time, "0"), tf.int64)
        age = tf.timestamp() - tf.cast(milliseconds, tf.float64) / 1000
        return is_made_here & (tf.abs(age) <= LONGEST_AGE_SECONDS)

    def _hash(self, text: tf.Tensor) -> tf.Tensor:
        return tf.strings.to_hash_bucket_strong(text, _BUCKETS, key=self._own_key)


def _key_of(credential: bytes) -> list[int]:
    digest = hashlib.sha256(b"keras_het token 1" + credential).digest()
    return [int.from_bytes(part, "big") >> 1 for part in (digest[:8], digest[8:16])]


def _code(key: list[int], time: tf.Tensor, function: str) -> tf.Tensor:
    code = tf.strings.to_hash_bucket_strong(time + function, _BUCKETS, key=key)
    return tf.strings.as_string(code, width=_CODE_DIGITS, fill="0")
