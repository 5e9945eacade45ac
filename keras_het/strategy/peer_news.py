"""Carries the news of a lost worker from one worker to the next."""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import threading
from collections.abc import Callable, Iterable

import numpy as np

from keras_het.strategy.cluster_address import places_of

_TOKEN_BYTES = 32
_LONGEST = 16_384
_SECONDS = 2.0
_QUEUE = 64


def new_token() -> np.ndarray:
    """A secret that the chief draws for all, as int64 of shape [4]; collectives carry it."""
    return np.frombuffer(secrets.token_bytes(_TOKEN_BYTES), np.int64)


class PeerNews:
    """Hears what others have found, and tells it.

    Whoever does not know the token, which travels among the workers at their start, is not heard.

    Args:
        own_address: this worker's address in the cluster, `host:port`.
    """

    def __init__(self, own_address: str) -> None:
        self._token = b""
        self._neighbours: tuple[str, ...] = ()
        self._on_news: Callable[[str], None] = lambda message: None
        self._listener = _listen(own_address)

    @property
    def port(self) -> int:
        """Where this worker listens; 0 if it cannot."""
        return 0 if self._listener is None else int(self._listener.getsockname()[1])

    def start(
        self, token: np.ndarray, neighbours: Iterable[str], on_news: Callable[[str], None]
    ) -> None:
        """Begins to hear.

        Args:
            token: what `new_token` gave on the chief.
            neighbours: addresses `host:port` of those who are told.
            on_news: called with what was heard, in a thread.
        """
        self._token, self._neighbours = token.astype(np.int64).tobytes(), tuple(neighbours)
        self._on_news = on_news
        if self._listener is not None:
            threading.Thread(target=self._hear, name="keras_het-news", daemon=True).start()

    def tell(self, message: str) -> None:
        """Tells all neighbours at once; waits for none of them."""
        for address in self._neighbours:
            threading.Thread(target=self._send, args=(address, message), daemon=True).start()

    def close(self) -> None:
        """Hears no more."""
        if self._listener is not None:
            self._listener.close()

    def _send(self, address: str, message: str) -> None:
        host, _, port = address.rpartition(":")
        with (
            contextlib.suppress(OSError),
            socket.create_connection((host.strip("[]"), int(port)), _SECONDS) as connection,
        ):
            connection.sendall(self._token + message.encode()[:_LONGEST])

    def _hear(self) -> None:
        listener = self._listener
        while listener is not None:
            try:
                connection, _ = listener.accept()
            except OSError:  # closed
                return
            with connection, contextlib.suppress(OSError):
                connection.settimeout(_SECONDS)
                text = _read(connection)
                if hmac.compare_digest(text[:_TOKEN_BYTES], self._token):
                    self._on_news(text[_TOKEN_BYTES:].decode(errors="replace"))


def _listen(own_address: str) -> socket.socket | None:
    """Listens where other hosts reach this one, and on a loopback address for those of this."""
    for family, (host, _) in places_of(own_address):
        listener = socket.socket(family, socket.SOCK_STREAM)
        # The name of this host need not be that of an interface.
        for place in (host, "::" if family == socket.AF_INET6 else ""):
            with contextlib.suppress(OSError):
                listener.bind((place, 0))
                listener.listen(_QUEUE)
                return listener
        listener.close()
    return None


def _read(connection: socket.socket) -> bytes:
    text = b""
    while len(text) < _TOKEN_BYTES + _LONGEST and (more := connection.recv(_LONGEST)):
        text += more
    return text
