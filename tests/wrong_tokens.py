"""Tokens that nobody must be let in with."""

import tensorflow as tf

from keras_het.rpc.admission import LONGEST_AGE_SECONDS, token


def wrong_token(random, credential, function):
    """One that is malformed, or was made with another credential, function or time.

    Args:
        random: numpy's generator.
        credential: the right one.
        function: the right name.
    """
    now = float(tf.timestamp())
    good = token(credential, function, now).numpy()
    digit = random.integers(len(good))
    others = [
        b"",
        credential,
        good[:-1],
        good + b"\0",
        good[:16],
        bytes(random.bytes(35)),
        b"x" * 16 + good[16:],
        good[:digit] + b"%d" % ((good[digit] - 48 + 1) % 10) + good[digit + 1 :],
        token(credential[:-1] + b"x", function, now).numpy(),
        token(credential, function + "x", now).numpy(),
        token(credential, function, now - LONGEST_AGE_SECONDS - 5).numpy(),
        token(credential, function, now + LONGEST_AGE_SECONDS + 5).numpy(),
        token(credential, function, -now).numpy(),
    ]
    return others[random.integers(len(others))]
