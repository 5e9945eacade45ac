"""Proof in each request that its sender knows the credential."""

from __future__ import annotations

import hashlib
import secrets

import tensorflow as tf

LONGEST_AGE_SECONDS = 600.0
"""Largest difference between the times of a token and of the server, in both directions."""
_TIME_DIGITS, _CODE_DIGITS = 16, 19
_BUCKETS = 2**62


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
