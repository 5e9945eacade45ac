"""A process that holds a part of the parameter service and knows neither script nor data."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable

from keras_het.asynchronous.center.hosted_parts import HostedParts
from keras_het.asynchronous.center.offers import Offers

_logger = logging.getLogger("keras_het")
_POLL_SECONDS = 0.05


class ServingProcess:
    """Serves one training after the other.

    Args:
        address: "host:port" to listen on.
        secret: shared by all tasks.
        is_stopped: whether to end.
        say: told what happens.
    """

    def __init__(
        self,
        address: str,
        secret: bytes,
        is_stopped: Callable[[], bool],
        say: Callable[[str], None] = _logger.info,
    ) -> None:
        self.address, self._secret = address, secret
        self._is_stopped, self._say = is_stopped, say
        self._offers = Offers(secret)

    @property
    def is_offered_another(self) -> bool:
        """Whether a leader waits that has offered a training: the last one was left for it."""
        return self._offers.is_pending

    def serve_one(self) -> bool:
        """Waits for a training and serves it to its end; whether there was one.

        A leader that starts again offers again, which ends the training that it left.
        """
        self._say(f"waiting for a training at {self.address}")
        parts = None
        while parts is None:
            if not self._offers.wait_at(self.address, self._is_stopped):
                return False
            parts = self._make_parts()
        spec = parts.spec
        self._offers.register_on(parts.server)
        parts.start()
        held = len(parts.weights.indices)
        self._say(
            f"serving {held} partition{'s' * (held != 1)} of {len(spec.shapes)} variables to "
            f"{spec.num_clients} participants, rule {parts.rule.name}"
        )
        while not (parts.is_closed or self._offers.is_pending or self._is_stopped()):
            time.sleep(_POLL_SECONDS)
        self._say("training has ended" if parts.is_closed else "training was left")
        parts.close()
        return True

    def _make_parts(self) -> HostedParts | None:
        """What the leader wants to be held; None if that cannot be read."""
        try:
            spec, place = self._offers.take()
            return HostedParts(self.address, place, spec, self._secret)
        except (AttributeError, TypeError, ValueError) as error:  # as of another version
            self._say(f"an offer was not taken: {error}")
        # TensorFlow ends a server with the last reference, and with it a later one at its address.
        gc.collect()
        return None
