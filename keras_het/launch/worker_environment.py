"""The environment variables each local worker is started with."""

import json
from collections.abc import Mapping, Sequence

from keras_het.launch.emulation import Emulation

_LEAST_INTEROP_THREADS = 2


def worker_environment(
    worker_index: int,
    addresses: Sequence[str],
    threads: int,
    inherited: Mapping[str, str],
    emulation: Emulation | None = None,
) -> dict[str, str]:
    """Returns the whole environment of one worker.

    TF_CONFIG and, when emulating, KERAS_HET_EMULATED_DEVICES are always ours. The numbers of
    threads and Python's buffering are set only where the user did not.

    Args:
        worker_index: The worker.
        addresses: `host:port` of all workers.
        threads: Threads that compute in this worker.
        inherited: What the worker gets besides; wins over the defaults.
        emulation: Emulated devices, or `None`.
    """
    task = {"type": "worker", "index": worker_index}
    tf_config = {"cluster": {"worker": list(addresses)}, "task": task}
    defaults = {
        "TF_NUM_INTRAOP_THREADS": str(threads),
        # A worker that waits in a collective needs a second thread to answer its peers.
        "TF_NUM_INTEROP_THREADS": str(max(_LEAST_INTEROP_THREADS, threads)),
        "OMP_NUM_THREADS": str(threads),
        # Without a terminal Python would hold its output back until the worker ends.
        "PYTHONUNBUFFERED": "1",
    }
    emulated = emulation.environment_of(worker_index) if emulation else {}
    return {**defaults, **inherited, **emulated, "TF_CONFIG": json.dumps(tf_config)}
