"""The command `keras-het`."""

import argparse
import contextlib
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from types import FrameType

from keras_het.keras_backend import KERAS_BACKEND, NEEDED_BACKEND
from keras_het.launch.arguments import parse_arguments, worker_command
from keras_het.launch.doctor.addresses import HOW_TO_CLOSE, open_to, public_addresses
from keras_het.launch.local.display import Display, WorkerLogs
from keras_het.launch.local.emulation import Emulation
from keras_het.launch.local.failure_report import describe_failures, first_to_fail
from keras_het.launch.local.local_cluster import LocalCluster
from keras_het.launch.local.worker_environment import secret_names
from keras_het.launch.local.worker_process import OutputLine, Stream, WorkerResult, signal_name

_KEEP_LINES = 2000
_WRONG_USAGE = 2
# Hides TensorFlow's information messages, of which each worker prints some 50 lines at startup.
_QUIET_TENSORFLOW = {"TF_CPP_MIN_LOG_LEVEL": "1"}
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    is_run = options.command == "run"
    shown = {"only_chief": options.only_chief, "tf_logs": options.tf_logs} if is_run else {}
    display = Display(sys.stdout, sys.stderr, **shown)
    try:
        return _run(options, display) if is_run else int(options.execute(options))
    except (ValueError, OSError) as error:
        display.say(f"error: {error}")
        return _WRONG_USAGE


def _run(options: argparse.Namespace, display: Display) -> int:
    withheld = secret_names(os.environ, options.keep_env)
    if public := public_addresses():
        display.say(f"warning: {open_to(public)} {HOW_TO_CLOSE}")
    if withheld:
        display.say(f"not passed to the workers: {', '.join(withheld)} (see --keep-env).")
    _warn_of_another_backend(display)
    emulation = _emulation(options)
    label = emulation.describe() if emulation else None
    with contextlib.ExitStack() as stack:
        logs: WorkerLogs | None = None
        if options.log_dir is not None:
            workers = options.workers or len(options.speeds)
            logs = stack.enter_context(WorkerLogs(options.log_dir, workers, label))
        cluster = _make_cluster(options, emulation, display, logs, withheld)
        stack.enter_context(_signals_forwarded(cluster))
        if label:
            display.say(label, stream="stdout")
        with cluster:
            results = cluster.wait()
        display.finish()
        return _report(cluster, results, display, options.only_chief)


def _warn_of_another_backend(display: Display) -> None:
    """Warn only: a script may set its own before importing keras; the strategy checks that."""
    backend = os.environ.get(KERAS_BACKEND) or NEEDED_BACKEND
    if backend != NEEDED_BACKEND:
        display.say(
            f"{KERAS_BACKEND} is {backend!r} here, and keras_het needs {NEEDED_BACKEND!r}: unless "
            "the script sets that before it imports keras, HeterogeneousStrategy refuses to be "
            "made, and without a strategy each worker trains alone. To set it for all workers: "
            f"{KERAS_BACKEND}={NEEDED_BACKEND} keras-het run ..."
        )


def _make_cluster(
    options: argparse.Namespace,
    emulation: Emulation | None,
    display: Display,
    logs: WorkerLogs | None,
    withheld: Sequence[str],
) -> LocalCluster:
    def on_line(worker_index: int, stream: Stream, line: OutputLine) -> None:
        if logs is not None:
            logs.write(worker_index, stream, line)
        display.show(worker_index, stream, line)

    def on_stop(number: int) -> None:
        display.say(f"forwarding {signal_name(number)} to all workers; send it again to hurry.")

    return LocalCluster(
        worker_command(options),
        options.workers,
        num_async_workers=options.async_workers,
        env={}
        if options.tf_logs
        else {n: os.environ.get(n, v) for n, v in _QUIET_TENSORFLOW.items()},
        withheld=withheld,
        emulation=emulation,
        cpus_per_worker=options.cpus_per_worker,
        pin=options.pin,
        on_line=on_line,
        on_stop=on_stop,
        keep_lines=_KEEP_LINES,
        grace_seconds=options.grace_seconds,
    )


def _emulation(options: argparse.Namespace) -> Emulation | None:
    if options.speeds is None:
        return None
    times: dict[str, float] = {}
    if options.sample_milliseconds is not None:
        times["seconds_per_sample"] = options.sample_milliseconds / 1000
    if options.fixed_milliseconds is not None:
        times["fixed_seconds"] = options.fixed_milliseconds / 1000
    return Emulation(options.speeds, **times)


@contextlib.contextmanager
def _signals_forwarded(cluster: LocalCluster) -> Iterator[None]:
    def forward(number: int, frame: FrameType | None) -> None:
        cluster.request_stop(number)

    before = {
        number: signal.signal(number, forward)
        for number in _SIGNALS
        # nohup makes the process ignore it, and that must stay
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _report(
    cluster: LocalCluster, results: Sequence[WorkerResult], display: Display, only_chief: bool
) -> int:
    if cluster.stopped_by is not None:
        display.say(f"stopped by {signal_name(cluster.stopped_by)}; all workers have ended.")
        return 128 + cluster.stopped_by
    if cluster.failures:
        first = first_to_fail(results)
        display.say(describe_failures(results, only_chief and first.index != 0))
        ended_training = [result for result in cluster.failures if cluster.is_needed(result)]
        if not ended_training:
            display.say(
                "the other workers have trained to the end without it, which is no failure."
            )
            return 0
        return (first if first in ended_training else ended_training[0]).shell_exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
