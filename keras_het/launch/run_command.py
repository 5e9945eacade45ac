"""The command `keras-het run`: a script as several workers, on this machine or by ssh."""

import argparse
import contextlib
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

from keras_het.keras_backend import KERAS_BACKEND, NEEDED_BACKEND
from keras_het.launch.cluster_environment import PORT, read_hosts
from keras_het.launch.doctor.addresses import HOW_TO_CLOSE, open_to, public_addresses
from keras_het.launch.grammar import (
    Commands,
    add_cluster,
    add_command,
    add_script,
    check_script,
    not_negative,
    number,
    positive_integer,
    script_command,
    speeds_of,
)
from keras_het.launch.local.display import Display, WorkerLogs
from keras_het.launch.local.emulation import Emulation
from keras_het.launch.local.failure_report import describe_failures, first_to_fail
from keras_het.launch.local.gpus import AUTO, choose_gpus, environment_of, present_gpus
from keras_het.launch.local.local_cluster import LocalCluster
from keras_het.launch.local.own_workers import OwnWorkers, own_workers
from keras_het.launch.local.tracebacks import uncaught_error
from keras_het.launch.local.worker_environment import QUIET_TENSORFLOW, secret_names
from keras_het.launch.local.worker_process import OutputLine, Stream, WorkerResult, signal_name
from keras_het.launch.ssh_cluster import SshCluster
from keras_het.strategy.cluster.cluster_config import TF_CONFIG
from keras_het.telemetry.hardware import NvmlMissingError

_KEEP_LINES = 2000
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_REPLACED = "TF_CONFIG of the environment is replaced by one of the workers that are started here."
_EPILOG = """\
examples:
  keras-het run --gpus auto train.py            a worker on each GPU
  keras-het run --workers 3 train.py --epochs 5
  keras-het run --speeds 4,2,1 train.py         three emulated devices, 4 : 2 : 1
  keras-het run --workers 2 -m package.train
  keras-het run --hosts hosts.txt train.py      workers on other machines, by ssh
  keras-het run --ray --workers 2:4 train.py    on a Ray cluster, with the machines it has
  keras-het run --speeds 4,4,1 --async-workers 1 train.py    the slow one trains on its own

Options of keras-het stand before the script; everything after it belongs to the script.

Security: workers meet on 127.0.0.1, but TensorFlow's servers listen on every interface of this
machine, and cannot be bound to one. Who reaches their ports reads files and environment, and
writes: let a firewall keep others out, or start the command in a network of its own:
unshare --map-root-user --net sh -c 'ip link set lo up; keras-het run ...'
"""


def add_run_command(commands: Commands) -> None:
    run = add_command(
        commands,
        "run",
        run_workers,
        "start a script as several workers, on this machine or by ssh",
        "Starts a script as several workers on this machine, with TF_CONFIG on "
        "127.0.0.1 and free ports, or by ssh on others. Ends all when one fails and says which "
        "and why.",
        _EPILOG,
    )
    _add_target(run)
    _add_ray(run)
    _add_emulation(run)
    _add_processors(run)
    _add_output(run)


def _add_target(run: argparse.ArgumentParser) -> None:
    run.add_argument(
        "-w",
        "--workers",
        type=_workers,
        metavar="N",
        help="number of workers (default: the number of GPUs or speeds); with --ray also the least "
        "and the most, such as 2:4",
    )
    run.add_argument(
        "--gpus",
        metavar="WHICH",
        help="one worker for each GPU: auto for all of this machine, a number, or places such as "
        "0,2; each worker sees its own only",
    )
    run.add_argument(
        "--hosts",
        metavar="HOSTS",
        help="start the workers by ssh, in this directory on other machines: a file with 'host "
        "[slots=N]' in each line, or hosts with commas, such as a,b:2,node[01-03]; with --gpus "
        "auto each sees the next GPU of its host only",
    )
    add_cluster(run)
    add_script(run)


def _add_ray(run: argparse.ArgumentParser) -> None:
    group = run.add_argument_group(
        "Ray: workers that are lost are replaced, and new ones are added"
    )
    group.add_argument(
        "--ray",
        nargs="?",
        const="auto",
        metavar="ADDRESS",
        help="start the workers on the Ray cluster of this machine, or that of an address (see "
        "keras_het.ray.Trainer)",
    )
    group.add_argument(
        "--resources",
        type=_resources,
        metavar="NAME=AMOUNT,...",
        help="with --ray, what each worker needs, in Ray's units: GPU=1, or a resource that its "
        "nodes were started with (default: CPU=1)",
    )


def _add_emulation(run: argparse.ArgumentParser) -> None:
    group = run.add_argument_group("emulation of devices of different speed")
    group.add_argument(
        "--speeds",
        type=speeds_of,
        metavar="A,B,...",
        help="relative speed of each worker's device in samples per second, such as 4,2,1",
    )
    group.add_argument(
        "--sample-milliseconds",
        type=not_negative,
        metavar="MS",
        help="time of one sample on a device of speed 1 (default: 4)",
    )
    group.add_argument(
        "--fixed-milliseconds",
        type=not_negative,
        metavar="MS",
        help="time of a step without samples, on every device (default: 0)",
    )
    group.add_argument(
        "--asynchronous",
        action="store_true",
        help="devices compute while their hosts go on, as GPUs do",
    )


def _add_processors(run: argparse.ArgumentParser) -> None:
    group = run.add_argument_group("processors")
    group.add_argument(
        "--cpus-per-worker",
        type=positive_integer,
        metavar="N",
        help="CPUs of each worker (default: all CPUs dealt out evenly)",
    )
    group.add_argument(
        "--pin",
        action=argparse.BooleanOptionalAction,
        help="bind each worker to its CPUs (default: yes if no CPU has to be shared)",
    )


def _add_output(run: argparse.ArgumentParser) -> None:
    run.add_argument(
        "--keep-env",
        action="append",
        default=[],
        metavar="NAME",
        help="pass a variable that looks like a secret (TOKEN, SECRET, PASSWORD, "
        "API_KEY and the like in its name) to the workers all the same; may be a pattern such as "
        "'AWS_*', and may come several times",
    )
    group = run.add_argument_group("output and end")
    group.add_argument(
        "--only-chief",
        "--quiet-workers",
        action="store_true",
        help="show the output of worker 0 only; a failed worker's last lines are shown anyway",
    )
    group.add_argument(
        "--tf-logs",
        action="store_true",
        help="show also what TensorFlow logs of its start (its warnings are shown anyway)",
    )
    group.add_argument(
        "--log-dir", type=Path, metavar="DIRECTORY", help="write worker-N.log for each worker"
    )
    group.add_argument(
        "--grace-seconds",
        type=not_negative,
        default=10.0,
        metavar="S",
        help="time to obey a signal before a stronger one follows (default: 10)",
    )


def check_run(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Exit with code 2 if options contradict each other."""
    if options.ray:
        _check_ray(parser, options)
    elif options.resources or isinstance(options.workers, tuple):
        parser.error("--resources, and the least and the most of --workers, need --ray")
    emulated = options.sample_milliseconds, options.fixed_milliseconds
    if options.speeds is None and (options.asynchronous or emulated != (None, None)):
        parser.error("--sample-milliseconds, --fixed-milliseconds and --asynchronous need --speeds")
    if options.speeds and options.workers not in (None, len(options.speeds)):
        parser.error(
            f"--speeds has {len(options.speeds)} speeds, but --workers is {options.workers}: give "
            "as many speeds as workers, or leave out --workers"
        )
    if options.port != PORT and not options.hosts:
        parser.error("--port is that of workers on other machines: give --hosts, or leave it out")
    if options.hosts:
        _check_hosts(parser, options)
    elif options.gpus is not None:
        if options.speeds or options.workers:
            parser.error("--gpus starts one worker for each GPU: leave out --workers and --speeds")
    elif options.workers is None and options.speeds is None:
        _refuse_options_after_the_script(parser, options)
        parser.error(
            "give --gpus auto for a worker on each GPU, --hosts FILE for other machines, "
            "--workers N, or --speeds A,B,... to emulate devices"
        )
    num_workers = 0 if options.ray else options.workers or len(options.speeds or ())
    if num_workers and options.async_workers >= num_workers:
        parser.error(
            f"--async-workers {options.async_workers} leaves no worker of {num_workers} for the "
            "synchronous group; give less"
        )
    check_script(parser, options)


def _refuse_options_after_the_script(
    parser: argparse.ArgumentParser, options: argparse.Namespace
) -> None:
    ours = ("-w", "--workers", "--gpus", "--hosts", "--ray", "--speeds")
    after = [each for each in options.script_arguments if each.partition("=")[0] in ours]
    if after:
        parser.error(
            f"what follows the script belongs to it, received {after[0]} after {options.script}: "
            f"give options of keras-het first, keras-het run {after[0]} ... {options.script}"
        )


def _check_ray(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    if os.path.isfile(options.ray):  # noqa: PTH113
        parser.error(f"--ray takes an address, received {options.ray!r}: give --workers behind it")
    others = {
        "--gpus": options.gpus,
        "--hosts": options.hosts,
        "--speeds": options.speeds,
        "--async-workers": options.async_workers or None,
        "--cpus-per-worker": options.cpus_per_worker,
        "--pin": options.pin,
        "--log-dir": options.log_dir,
        "--only-chief": options.only_chief or None,
        "--tf-logs": options.tf_logs or None,
        "--keep-env": options.keep_env or None,
        "--python": None if options.python == sys.executable else options.python,
    }
    if given := [name for name, value in others.items() if value is not None]:
        parser.error(f"with --ray, Ray starts the workers: leave out {given[0]}")
    if options.workers is None:
        parser.error("--ray needs --workers N, or the least and the most: --workers 2:4")


def _check_hosts(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    others = {
        "--workers": options.workers,
        "--speeds": options.speeds,
        "--cpus-per-worker": options.cpus_per_worker,
        "--pin": options.pin,
    }
    if given := [name for name, value in others.items() if value is not None]:
        parser.error(f"--hosts tells the workers, on other machines: leave out {given[0]}")
    if options.gpus not in (None, AUTO):
        parser.error(
            f"with --hosts each worker takes the next GPU of its host: give --gpus {AUTO}, and as "
            "many slots of a host as it has GPUs"
        )


def run_workers(options: argparse.Namespace) -> int:
    display = Display(sys.stdout, sys.stderr, options.only_chief, options.tf_logs)
    _warn_of_another_backend(display)
    if options.ray:
        return _run_on_ray(options, display)
    withheld = secret_names(os.environ, options.keep_env)
    if public := public_addresses():
        display.say(f"warning: {open_to(public)} {HOW_TO_CLOSE}")
    if withheld:
        display.say(f"not passed to the workers: {', '.join(withheld)} (see --keep-env).")
    gpus: list[str] = []
    own: OwnWorkers | None = None
    hosts = read_hosts(options.hosts) if options.hosts else []
    if hosts:
        options.workers = len(hosts)
    elif options.gpus is not None:
        try:
            gpus = choose_gpus(options.gpus, present_gpus(), options.async_workers)
            own = own_workers(os.environ, len(gpus), options.async_workers)
        except (ValueError, NvmlMissingError) as error:
            display.say(f"--gpus: {error}")
            return 2
        options.workers = len(gpus)
    if own is None and os.environ.get(TF_CONFIG, "").strip():
        display.say(_REPLACED)
    first = own.first_index if own else 0
    emulation = _emulation(options)
    label = emulation.describe() if emulation else None
    logs: WorkerLogs | None = None

    def on_line(worker_index: int, stream: Stream, line: OutputLine) -> None:
        if logs is not None:
            logs.write(first + worker_index, line)
        display.show(first + worker_index, stream, line)

    def on_stop(number: int) -> None:
        display.say(f"forwarding {signal_name(number)} to all workers; send it again to hurry.")

    quiet = {} if options.tf_logs else QUIET_TENSORFLOW
    with contextlib.ExitStack() as stack:
        if options.log_dir is not None:
            indices = range(first, first + (options.workers or len(options.speeds)))
            logs = stack.enter_context(WorkerLogs(options.log_dir, indices, label))
        common: dict[str, Any] = {
            "num_async_workers": options.async_workers,
            "env": {name: os.environ.get(name, value) for name, value in quiet.items()},
            "withheld": withheld,
            "on_line": on_line,
            "on_stop": on_stop,
            "keep_lines": _KEEP_LINES,
            "grace_seconds": options.grace_seconds,
        }
        command = script_command(options)
        if hosts:
            has_gpus = options.gpus is not None
            cluster: LocalCluster = SshCluster(command, hosts, options.port, has_gpus, **common)
        else:
            cluster = LocalCluster(
                command,
                options.workers,
                worker_env=_environments(gpus, own),
                emulation=emulation,
                cpus_per_worker=options.cpus_per_worker,
                pin=options.pin,
                end_on_failure=not (own and own.is_async),
                **common,
            )
        stack.enter_context(_signals_forwarded(cluster))
        if label:
            display.say(label, stream="stdout")
        for index, host in enumerate(hosts):
            display.say(f"worker {index} is on {host}.", stream="stdout")
        dealt = gpus or cluster.gpus
        for index, gpu in enumerate(dealt if any(dealt) else (), first):
            sees = f"GPU {gpu} only" if gpu else "no GPU"
            display.say(f"worker {index} sees {sees}.", stream="stdout")
        if dealt and not any(dealt):
            reason = "devices are emulated" if label else "there are fewer than workers"
            display.say(f"the workers see no GPU, as {reason} (see --gpus auto).", stream="stdout")
        with cluster:
            results = cluster.wait()
        display.finish()
        return _report(cluster, results, display, options.only_chief, first)


def _environments(gpus: Sequence[str], own: OwnWorkers | None) -> list[dict[str, str]] | None:
    environments = [environment_of(gpu) for gpu in gpus]
    for environment, text in zip(environments, own.tf_configs if own else (), strict=False):
        environment[TF_CONFIG] = text
    return environments or None


def _run_on_ray(options: argparse.Namespace, display: Display) -> int:
    for name, text in QUIET_TENSORFLOW.items():  # Ray Train imports TensorFlow here, too
        os.environ.setdefault(name, text)
    try:
        from keras_het.ray import LostTooOftenError, ScriptError
        from keras_het.ray.script import run_on_ray
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        display.say("--ray needs Ray: pip install '.[ray]' in the checkout of keras_het")
        return 2
    target = script_command(options)[1:]
    try:
        run_on_ray(target, options.workers, options.ray, options.resources)
    except ConnectionError as error:
        display.say(f"{error} To start a cluster on this machine: ray start --head")
        return 1
    except (ScriptError, LostTooOftenError) as error:
        display.say(str(error))
        if cause := uncaught_error(str(error).splitlines()):
            display.say(f"a worker failed: {cause}")
        return 1
    except SystemExit:  # how Ray leaves after Ctrl-C
        display.say("interrupted; the same command goes on from the newest backup of Elastic.")
        return 128 + signal.SIGINT
    return 0


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


def _emulation(options: argparse.Namespace) -> Emulation | None:
    if options.speeds is None:
        return None
    times: dict[str, float] = {}
    if options.sample_milliseconds is not None:
        times["seconds_per_sample"] = options.sample_milliseconds / 1000
    if options.fixed_milliseconds is not None:
        times["fixed_seconds"] = options.fixed_milliseconds / 1000
    return Emulation(options.speeds, **times, asynchronous=options.asynchronous)


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
    cluster: LocalCluster,
    results: Sequence[WorkerResult],
    display: Display,
    only_chief: bool,
    first_index: int,
) -> int:
    if cluster.stopped_by is not None:
        display.say(f"stopped by {signal_name(cluster.stopped_by)}; all workers have ended.")
        return 128 + cluster.stopped_by
    if not cluster.failures:
        return 0
    first = first_to_fail(results)
    numbered = [replace(result, index=first_index + result.index) for result in results]
    display.say(describe_failures(numbered, only_chief and first_index + first.index != 0))
    ended_training = [result for result in cluster.failures if cluster.is_needed(result)]
    if not ended_training:
        display.say("the other workers have trained to the end without it, which is no failure.")
        return 0
    return (first if first in ended_training else ended_training[0]).shell_exit_code


def _workers(text: str) -> int | tuple[int, int]:
    least, colon, most = text.partition(":")
    if not colon:
        return positive_integer(text)
    found = positive_integer(least), positive_integer(most)
    if found[0] > found[1]:
        raise argparse.ArgumentTypeError(f"expected the least before the most, received {text!r}")
    return found


def _resources(text: str) -> dict[str, float]:
    found = {}
    for part in text.split(","):
        name, equals, amount = part.partition("=")
        if not (name.strip() and equals and number(amount) > 0):
            raise argparse.ArgumentTypeError(f"expected such as GPU=1,het=1, received {text!r}")
        found[name.strip()] = number(amount)
    return found
