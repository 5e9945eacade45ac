"""Names and settings of gRPC that both sides of a connection use."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import grpc
import numpy as np

from keras_het.exchange.message import PIECE_BYTES, Kind, Message

ROOM, HELLO, OPEN = "keras_het", "hello", "open"
# In the metadata of a connection, which arrive before any of its messages.
SERVICE, SENDER = "khet-service", "khet-sender"
NONCE, CLIENT_NONCE, PROOF = "khet-nonce-bin", "khet-client-nonce-bin", "khet-proof-bin"
# A silent machine may come back from a migration; what trains looks itself for lost ones.
_SILENCE_SECONDS = 120.0


def options(ping_seconds: float = 30.0) -> list[tuple[str, int]]:
    """Return settings under which a dead machine is noticed, and no request takes a detour."""
    return [
        ("grpc.max_receive_message_length", PIECE_BYTES),
        ("grpc.max_send_message_length", PIECE_BYTES),
        ("grpc.keepalive_time_ms", int(ping_seconds * 1000)),
        ("grpc.keepalive_timeout_ms", int(_SILENCE_SECONDS * 1000)),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 1000),
        ("grpc.enable_http_proxy", 0),
        # Otherwise two servers share a port, and each gets some of the calls.
        ("grpc.so_reuseport", 0),
        # Otherwise clients of the same address share a connection, and its settings.
        ("grpc.use_local_subchannel_pool", 1),
    ]


CERTIFICATE = "KERAS_HET_TLS_CERTIFICATE"
KEY = "KERAS_HET_TLS_KEY"
AUTHORITY = "KERAS_HET_TLS_AUTHORITY"


class Certificates(NamedTuple):
    """Contents of the files, in PEM; without an authority that of the system is trusted."""

    certificate: bytes
    key: bytes
    authority: bytes | None

    @property
    def server_credentials(self) -> grpc.ServerCredentials:
        """With an authority, whoever connects must show a certificate too."""
        pairs = [(self.key, self.certificate)]
        return grpc.ssl_server_credentials(pairs, self.authority, self.authority is not None)

    @property
    def client_credentials(self) -> grpc.ChannelCredentials:
        return grpc.ssl_channel_credentials(self.authority, self.key, self.certificate)


def read_certificates(environ: Mapping[str, str] | None = None) -> Certificates | None:
    """Read the files that the environment names; None if it names none."""
    environ = os.environ if environ is None else environ
    paths = [environ.get(name, "") for name in (CERTIFICATE, KEY, AUTHORITY)]
    if not any(paths):
        return None
    if not all(paths[:2]):
        given = [name for name in (CERTIFICATE, KEY, AUTHORITY) if environ.get(name)]
        raise ValueError(
            f"TLS needs the paths of a certificate and of its key. Received: {', '.join(given)}. "
            f"Set {CERTIFICATE} and {KEY}, and {AUTHORITY} if your own authority has signed them."
        )
    try:
        certificate, key, *authority = (Path(path).read_bytes() for path in paths if path)
    except OSError as error:
        raise ValueError(
            f"A TLS file cannot be read. Received: {error}. Check {CERTIFICATE}, {KEY} and "
            f"{AUTHORITY}."
        ) from error
    return Certificates(certificate, key, authority[0] if authority else None)


_CODES: tuple[tuple[type[Exception], grpc.StatusCode], ...] = (
    (PermissionError, grpc.StatusCode.UNAUTHENTICATED),
    (TimeoutError, grpc.StatusCode.DEADLINE_EXCEEDED),
    (MemoryError, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (ValueError, grpc.StatusCode.INVALID_ARGUMENT),
    (NotImplementedError, grpc.StatusCode.UNIMPLEMENTED),
    (ConnectionError, grpc.StatusCode.UNAVAILABLE),
    (InterruptedError, grpc.StatusCode.ABORTED),  # to be tried again
    (RuntimeError, grpc.StatusCode.INTERNAL),
)
_LONGEST_TEXT = 2000


def code_of(error: BaseException) -> grpc.StatusCode:
    for kind, code in _CODES:
        if isinstance(error, kind):
            return code
    return grpc.StatusCode.INTERNAL


def error_of(code: grpc.StatusCode | int | None, text: str) -> Exception:
    """Return the exception that a status code stands for; of unknown ones a `ConnectionError`."""
    for kind, known in _CODES:
        if code in (known, known.value[0]):
            return kind(text)
    return ConnectionError(text)


def refusal(error: BaseException) -> Message:
    """Return the answer to a request that ended with an error."""
    text = np.frombuffer(str(error)[:_LONGEST_TEXT].encode(), np.uint8)
    return Message(Kind.REFUSAL, (code_of(error).value[0],), (text,))


def raise_if_refused(answer: Message, address: str) -> Message:
    if answer.kind is not Kind.REFUSAL:
        return answer
    text = answer.vectors[0].tobytes().decode(errors="replace")
    raise error_of(answer.numbers[0], f"{address}: {text}")
