"""A process that holds a part of the parameter service without script or data."""

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
    """A process that serves one training after another."""

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
        """Whether a waiting leader has offered a training, having abandoned the previous one."""
        return self._offers.is_pending

    def serve_one(self) -> bool:
        """Wait for a training and serve it to its end; return whether there was one.

        A restarted leader offers again, which ends the training that it abandoned.
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
            f"{spec.num_participants} participants, rule {parts.rule.name}"
        )
        while not (parts.is_closed or self._offers.is_pending or self._is_stopped()):
            time.sleep(_POLL_SECONDS)
        self._say("training has ended" if parts.is_closed else "training was left")
        parts.close()
        return True

    def _make_parts(self) -> HostedParts | None:
        """Create the parts that the leader requests; None if the request cannot be read."""
        try:
            spec, place = self._offers.take()
            return HostedParts(self.address, place, spec, self._secret)
        except (AttributeError, TypeError, ValueError) as error:  # as from another version
            self._say(f"an offer was not taken: {error}")
        # TensorFlow ends a server with its last reference, and with it a later one at its address.
        gc.collect()
        return None
