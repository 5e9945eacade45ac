"""Sum gradients of all workers on this machine's CPU."""

from __future__ import annotations

from keras_het.exchange.secret import credential, model_fingerprint, read_secret
from keras_het.exchange.server import Server
from keras_het.exchange.sums import Sums

SERVICE = "sums"


def summation_credential(num_workers: int, num_spare: int) -> bytes:
    """Return the proof of shared secret and cluster that every connection shows."""
    about = model_fingerprint([], [[num_workers, num_spare]], ["float32"], "summation 1")
    return credential(read_secret(), about)


class SummationService:
    """Takes a worker's part of a vector, and answers with the sum over all workers.

    Args:
        address: where it listens, "host:port"; port 0 is any free one.
        num_workers: number of those that contribute.
        credential: what they show.
    """

    def __init__(self, address: str, num_workers: int, credential: bytes) -> None:
        self.server = Server(address)
        self.address = self.server.address
        self.sum_for(num_workers, credential)

    def sum_for(self, num_workers: int, credential: bytes) -> None:
        """Sum for so many workers from now on; forget what others have contributed."""
        self.sums = Sums(num_workers)
        self.server.serve(SERVICE, credential, self.sums.handle)

    def start(self) -> None:
        """Start answering."""
        self.server.start()

    def close(self) -> None:
        """Stop answering; requests that wait for a worker fail."""
        self.server.close()
