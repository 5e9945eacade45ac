"""Names and settings of gRPC that both sides of a connection use."""

from __future__ import annotations

from keras_het.exchange.message import PIECE_BYTES

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
