"""The environment variables that each local worker is started with."""

import json
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from keras_het.seen_versions import KERAS_BACKEND, NEEDED_BACKEND
from keras_het.planning.time_model import LinearTimeModel

KERAS_HET_EMULATED_DEVICES = "KERAS_HET_EMULATED_DEVICES"

_DEFAULT_SECONDS_PER_SAMPLE = 0.004


@dataclass(frozen=True)
class Emulation:
    """One emulated device per worker.

    A device of speed `s` takes at least `fixed_seconds + seconds_per_sample / s` for a step of one
    sample. It waits for that time without burning CPU, so several fit on one machine. Asynchronous
    ones compute while their hosts continue, as GPUs do.
    """

    speeds: tuple[float, ...]
    seconds_per_sample: float = _DEFAULT_SECONDS_PER_SAMPLE
    fixed_seconds: float = 0.0
    asynchronous: bool = False

    def __post_init__(self) -> None:
        if not self.speeds or not all(0 < speed < float("inf") for speed in self.speeds):
            raise ValueError(
                "Emulated devices need positive finite speeds, one for each worker. Received: "
                f"speeds={self.speeds}. Give relative speeds such as 4,2,1."
            )
        self.time_models()

    def time_models(self) -> tuple[LinearTimeModel, ...]:
        return tuple(
            LinearTimeModel(self.fixed_seconds, self.seconds_per_sample / speed)
            for speed in self.speeds
        )

    def environment_of(self, worker_index: int) -> dict[str, str]:
        model = self.time_models()[worker_index]
        device = {
            "speed": self.speeds[worker_index],
            "fixed_seconds": model.fixed_seconds,
            "seconds_per_sample": model.seconds_per_sample,
        }
        if self.asynchronous:
            device["asynchronous"] = True
        return {KERAS_HET_EMULATED_DEVICES: json.dumps([device])}

    def describe(self) -> str:
        speeds = ":".join(f"{speed:g}" for speed in self.speeds)
        times = ", ".join(f"{1000 * model.seconds_per_sample:g}" for model in self.time_models())
        fixed = f" plus {1000 * self.fixed_seconds:g} ms a step" if self.fixed_seconds else ""
        kind = "asynchronous device" if self.asynchronous else "device"
        return (
            f"EMULATION: {kind} speeds {speeds} are emulated by waiting ({times} ms per sample"
            f"{fixed}). Times of this run are not those of real devices."
        )


# Hides TensorFlow's information messages, of which each worker prints some 50 lines at startup.
QUIET_TENSORFLOW = {"TF_CPP_MIN_LOG_LEVEL": "1"}
_LEAST_INTEROP_THREADS = 2
ADDRESS = "KERAS_HET_SERVICE_ADDRESS"
_SECRET = "KERAS_HET_SECRET"
# Not TOKENIZERS_PARALLELISM or MAX_TOKENS, nor GOOGLE_APPLICATION_CREDENTIALS, which is a path.
_SECRETS = re.compile(r"(TOKEN|SECRET)(_|$)|PASSWORD|PASSWD|(API|ACCESS|PRIVATE)_?KEY")
_OURS = "KERAS_HET_*"


def secret_names(environ: Iterable[str], kept: Iterable[str]) -> list[str]:
    """Return names like those of secrets: who reaches a worker's port reads its environment."""
    patterns = [_OURS, *kept]
    return sorted(
        name
        for name in environ
        if _SECRETS.search(name.upper()) and not any(fnmatchcase(name, each) for each in patterns)
    )


def worker_environment(
    worker_index: int,
    addresses: Sequence[str],
    threads: int,
    inherited: Mapping[str, str],
    emulation: Emulation | None = None,
    num_async_workers: int = 0,
) -> dict[str, str]:
    defaults = {
        "TF_NUM_INTRAOP_THREADS": str(threads),
        # A worker that waits in a collective needs a second thread to answer its peers. An emulated
        # device waits in a thread too; a real one would leave that thread to them.
        "TF_NUM_INTEROP_THREADS": str(max(_LEAST_INTEROP_THREADS, threads) + bool(emulation)),
        "OMP_NUM_THREADS": str(threads),
        # Without a terminal Python would buffer its output until the worker ends.
        "PYTHONUNBUFFERED": "1",
    }
    emulated = emulation.environment_of(worker_index) if emulation else {}
    tf_config = tf_config_of(worker_index, addresses, num_async_workers)
    return with_backend({**defaults, **inherited, **emulated, "TF_CONFIG": tf_config})


def tf_config_of(worker_index: int, addresses: Sequence[str], num_async_workers: int) -> str:
    """Return TF_CONFIG of one of the workers, of which the last ones are asynchronous."""
    num_sync = len(addresses) - num_async_workers
    cluster = {"worker": list(addresses[:num_sync])}
    task = {"type": "worker", "index": worker_index}
    if num_async_workers:
        cluster["async"] = list(addresses[num_sync:])
    if worker_index >= num_sync:
        task = {"type": "async", "index": worker_index - num_sync}
    return json.dumps({"cluster": cluster, "task": task})


def with_backend(environment: Mapping[str, str]) -> dict[str, str]:
    # as Keras does; the default overrides the user's keras.json
    backend = environment.get(KERAS_BACKEND) or NEEDED_BACKEND
    return {**environment, KERAS_BACKEND: backend}


def service_environment(
    address: str, inherited: Mapping[str, str], secret: str | None = None
) -> dict[str, str]:
    given = any(inherited.get(name) for name in (_SECRET, f"{_SECRET}_FILE"))
    own = {} if given else {_SECRET: secret or secrets.token_hex(32)}
    return {ADDRESS: address, **own}
