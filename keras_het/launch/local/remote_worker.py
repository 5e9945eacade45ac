"""The other end of `keras-het run --hosts`: a program that ssh starts for one worker.

Its arguments are the worker's command. The first line of its standard input has the worker's
variables and its GPU, each further line the number of a signal: ssh itself forwards none, unless
with a terminal, which would make one of the two streams of output. Where the input ends without
one the launcher or the connection is gone, and the worker is ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading

from keras_het.launch.local.gpus import choose_gpus, environment_of, present_gpus

_SECONDS_TO_OBEY = 10.0


def main() -> int:
    opening = json.loads(sys.stdin.readline())
    environment = {**os.environ, **opening["environment"]}
    if opening["gpu"] is not None:
        environment |= environment_of(choose_gpus(f"{opening['gpu']},", present_gpus())[0])
    worker = subprocess.Popen(
        sys.argv[1:], env=environment, stdin=subprocess.DEVNULL, start_new_session=True
    )
    threading.Thread(target=_obey, args=(worker,), daemon=True).start()
    code = worker.wait()
    _send(worker, signal.SIGKILL)  # to what it has left
    return code if code >= 0 else 128 - code


def _obey(worker: subprocess.Popen[bytes]) -> None:
    for line in sys.stdin:
        _send(worker, int(line))
    _send(worker, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        worker.wait(_SECONDS_TO_OBEY)
    _send(worker, signal.SIGKILL)


def _send(worker: subprocess.Popen[bytes], number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(worker.pid, number)


if __name__ == "__main__":
    sys.exit(main())
