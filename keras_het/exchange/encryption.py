"""TLS between processes, if the environment names certificates."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import grpc

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
