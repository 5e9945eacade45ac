"""The command `keras-het run`: a script as several workers, on this machine or by ssh."""

import argparse
import contextlib
import functools
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

from keras_het.launch.cluster_environment import OwnWorkers, own_workers, read_hosts
from keras_het.launch.doctor.facts import HOW_TO_CLOSE, open_to, public_addresses
from keras_het.launch.grammar import (
    CLUSTER_OPTIONS,
    GRACE_OPTION,
    Commands,
    Option,
    add_command,
    add_options,
    add_script,
    argument,
    check_script,
    not_negative,
    positive_integer,
    script_command,
    speeds_of,
)
from keras_het.launch.local.display import Display, WorkerLogs
from keras_het.launch.local.failure_report import describe_failures, first_to_fail, save_output
from keras_het.launch.local.local_cluster import LocalCluster
from keras_het.launch.local.tracebacks import uncaught_error
from keras_het.launch.local.worker_environment import (
    AUTO,
    QUIET_TENSORFLOW,
    Emulation,
    choose_gpus,
    environment_of,
    present_gpus,
    secret_names,
)
from keras_het.launch.local.worker_process import (
    OutputLine,
    Stream,
    WorkerResult,
    signal_name,
)
from keras_het.launch.ssh_cluster import SshCluster
from keras_het.seen_versions import KERAS_BACKEND, NEEDED_BACKEND
from keras_het.strategy.cluster.cluster_config import TF_CONFIG
from keras_het.telemetry.hardware import NvmlMissingError

_KEEP_LINES = 2000
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_REPLACED = "TF_CONFIG of the environment is replaced by one of the workers that are started here."
_EPILOG = """\
examples:
  keras-het run --gpus auto train.py            a worker on each GPU
  keras-het run --workers 3 train.py --epochs 5
  keras-het run --emulate-speeds 4,2,1 train.py    three emulated devices, 4 : 2 : 1
  keras-het run --workers 2 -m package.train
  keras-het run --hosts hosts.txt train.py      workers on other machines, by ssh
  keras-het run --ray --workers 2:4 train.py    on a Ray cluster, with the machines it has
  keras-het run --emulate-speeds 4,4,1 --async-workers 1 train.py    the slow one trains alone

Options of keras-het stand before the script; everything after it belongs to the script.

Security: workers meet on 127.0.0.1, but TensorFlow's servers listen on every interface of this
machine, and cannot be bound to one. Anyone who can reach these ports can read and
write files and read the environment: close them with a firewall, or run the command in its own
network namespace:
unshare --map-root-user --net sh -c 'ip link set lo up; keras-het run ...'
"""

# An option, what cannot be given beside it, and why.
_EXCLUDED = (
    (
        "ray",
        "gpus hosts emulate_speeds async_workers cpus_per_worker pin log_dir only_chief tf_logs "
        "pass_env python",
        "with --ray, Ray starts the workers",
    ),
    (
        "hosts",
        "workers emulate_speeds cpus_per_worker pin",
        "--hosts lists the workers, on other machines",
    ),
    ("gpus", "workers emulate_speeds", "--gpus starts one worker for each GPU"),
)
# Options, and what they make no sense without.
_NEEDED = (
    (("emulate_ms_per_sample", "emulate_ms_per_step", "emulate_async_devices"), "emulate_speeds"),
    (("resources",), "ray"),
    (("port",), "hosts"),
)


def _number_of_workers(text: str) -> int | tuple[int, int]:
    least, colon, most = text.partition(":")
    return (int(least), int(most)) if colon else int(least)


_workers = argument(
    "a whole number of at least 1, or the least before the most of them, such as 2:4",
    _number_of_workers,
    lambda number: 1 <= number[0] <= number[1] if isinstance(number, tuple) else number >= 1,
)
_resources = argument(
    "for example GPU=1,het=1",
    lambda text: {
        name.strip(): float(amount)
        for name, _, amount in (part.partition("=") for part in text.split(","))
    },
    lambda found: all(name and amount > 0 for name, amount in found.items()),
)


_OPTIONS: dict[str, tuple[Option, ...]] = {
    "": (
        Option(
            "-w --workers N",
            "number of workers (default: the number of GPUs or speeds); with --ray also the least "
            "and the most, such as 2:4",
            _workers,
        ),
        Option(
            "--gpus WHICH",
            "one worker for each GPU: auto for all of this machine, a number, or indices such as "
            "0,2; each worker sees its own only",
        ),
        Option(
            "--hosts HOSTS",
            "start the workers by ssh, in this directory on other machines: a file with 'host "
            "[slots=N]' in each line, or hosts with commas, such as a,b:2,node[01-03]; with --gpus "
            "auto each sees the next GPU of its host only",
        ),
        *CLUSTER_OPTIONS,
        Option(
            "--pass-env NAME",
            "pass a variable that looks like a secret (TOKEN, SECRET, PASSWORD, API_KEY and the "
            "like in its name) to the workers anyway; may be a pattern such as 'AWS_*', and "
            "may come several times",
            default=[],
            more={"action": "append"},
        ),
    ),
    "Ray: workers that are lost are replaced, and new ones are added": (
        Option(
            "--ray ADDRESS",
            "start the workers on the Ray cluster of this machine, or that of an address (see "
            "keras_het.ray.KerasTrainer)",
            more={"nargs": "?", "const": "auto"},
        ),
        Option(
            "--resources NAME=AMOUNT,...",
            "with --ray, what each worker needs, in Ray's units: GPU=1, or a resource that its "
            "nodes were started with (default: CPU=1)",
            _resources,
        ),
    ),
    "emulation of devices of different speed": (
        Option(
            "--emulate-speeds A,B,...",
            "relative speed of each worker's device in samples per second, such as 4,2,1",
            speeds_of,
        ),
        Option(
            "--emulate-ms-per-sample MS",
            "time of one sample on a device of speed 1 (default: 4)",
            not_negative,
            4.0,
        ),
        Option(
            "--emulate-ms-per-step MS",
            "time of a step without samples, on every device (default: 0)",
            not_negative,
            0.0,
        ),
        Option("--emulate-async-devices", "devices compute while their hosts continue, as GPUs do"),
    ),
    "processors": (
        Option(
            "--cpus-per-worker N",
            "CPUs of each worker (default: all CPUs dealt out evenly)",
            positive_integer,
        ),
        Option(
            "--pin",
            "bind each worker to its CPUs (default: yes if no CPU has to be shared)",
            more={"action": argparse.BooleanOptionalAction},
        ),
    ),
    "output and end": (
        Option(
            "--only-chief",
            "show the output of worker 0 only; a failed worker's last lines are shown anyway",
        ),
        Option(
            "--tf-logs",
            "show also what TensorFlow logs of its start (its warnings are shown anyway)",
        ),
        Option("--log-dir DIRECTORY", "write worker-N.log for each worker", Path),
        GRACE_OPTION,
    ),
}


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
    for title, options in _OPTIONS.items():
        add_options(run.add_argument_group(title) if title else run, options)
    add_script(run)
    run.set_defaults(check=functools.partial(check_run, run))


def check_run(run: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Exit with code 2 if options contradict each other."""

    def given(*names: str) -> list[str]:
        found = [name for name in names if getattr(options, name) != run.get_default(name)]
        return [f"--{name.replace('_', '-')}" for name in found]

    for option, others, why in _EXCLUDED:
        if given(option) and (found := given(*others.split())):
            run.error(f"{why}: leave out {found[0]}")
    for names, needed in _NEEDED:
        if (found := given(*names)) and not given(needed):
            run.error(f"{found[0]} needs --{needed.replace('_', '-')}")
    if options.ray and os.path.isfile(options.ray):  # noqa: PTH113
        run.error(f"--ray takes an address, received {options.ray!r}: give --workers before it")
    if isinstance(options.workers, tuple) and not options.ray:
        run.error("the least and the most of --workers need --ray")
    if options.hosts and options.gpus not in (None, AUTO):
        run.error(
            f"with --hosts each worker takes the next GPU of its host: give --gpus {AUTO}, and as "
            "many slots of a host as it has GPUs"
        )
    if options.emulate_speeds and options.workers not in (None, len(options.emulate_speeds)):
        run.error(
            f"--emulate-speeds has {len(options.emulate_speeds)} speeds, but --workers is "
            f"{options.workers}: give as many speeds as workers, or leave out --workers"
        )
    if not given("workers", "gpus", "hosts", "emulate_speeds"):
        _refuse_options_after_the_script(run, options)
        run.error(
            "give --gpus auto for a worker on each GPU, --hosts FILE for other machines, "
            "--workers N, or --emulate-speeds A,B,... to emulate devices; with --ray, --workers 2:4"
        )
    check_script(run, options)


def _refuse_options_after_the_script(
    run: argparse.ArgumentParser, options: argparse.Namespace
) -> None:
    ours = ("-w", "--workers", "--gpus", "--hosts", "--ray", "--emulate-speeds")
    after = [each for each in options.script_arguments if each.partition("=")[0] in ours]
    if after:
        run.error(
            f"what follows the script belongs to it, received {after[0]} after {options.script}: "
            f"give options of keras-het first, keras-het run {after[0]} ... {options.script}"
        )


def run_workers(options: argparse.Namespace) -> int:
    display = Display(sys.stdout, sys.stderr, options.only_chief, options.tf_logs)
    _warn_of_another_backend(display)
    if options.ray:
        return _run_on_ray(options, display)
    if public := public_addresses():
        display.say(f"warning: {open_to(public)} {HOW_TO_CLOSE}")
    withheld = secret_names(os.environ, options.pass_env)
    if withheld:
        display.say(f"not passed to the workers: {', '.join(withheld)} (see --pass-env).")
    gpus: list[str] = []
    own: OwnWorkers | None = None
    if options.gpus is not None and not options.hosts:
        try:
            gpus = choose_gpus(options.gpus, present_gpus(), options.async_workers)
            own = own_workers(os.environ, len(gpus), options.async_workers)
        except (ValueError, NvmlMissingError) as error:
            raise ValueError(f"--gpus: {error}") from error
    environments = [environment_of(gpu) for gpu in gpus]
    if own is not None:
        pairs = zip(environments, own.tf_configs, strict=True)
        environments = [{**environment, TF_CONFIG: text} for environment, text in pairs]
    elif os.environ.get(TF_CONFIG, "").strip():
        display.say(_REPLACED)
    first = own.first_index if own else 0

    def on_line(worker_index: int, stream: Stream, line: OutputLine) -> None:
        logs.write(first + worker_index, line)
        display.show(first + worker_index, stream, line)

    def on_stop(number: int) -> None:
        display.say(
            f"forwarding {signal_name(number)} to all workers; send it again to skip the grace "
            "period."
        )

    times = options.emulate_ms_per_sample / 1e3, options.emulate_ms_per_step / 1e3
    emulation = (
        Emulation(options.emulate_speeds, *times, options.emulate_async_devices)
        if options.emulate_speeds
        else None
    )
    label = emulation.describe() if emulation else None
    quiet = {} if options.tf_logs else QUIET_TENSORFLOW
    common: dict[str, Any] = {
        "num_async_workers": options.async_workers,
        "env": {name: os.environ.get(name, value) for name, value in quiet.items()},
        "withheld": withheld,
        "on_line": on_line,
        "on_stop": on_stop,
        "keep_lines": _KEEP_LINES,
        "grace_seconds": options.grace_seconds,
    }
    if options.hosts:
        has_gpus = options.gpus is not None
        hosts = read_hosts(options.hosts)
        command = script_command(options)
        cluster: LocalCluster = SshCluster(command, hosts, options.port, has_gpus, **common)
    else:
        cluster = LocalCluster(
            script_command(options),
            len(gpus) or options.workers,
            worker_env=environments or None,
            emulation=emulation,
            cpus_per_worker=options.cpus_per_worker,
            pin=options.pin,
            end_on_failure=not (own and own.is_async),
            **common,
        )
    indices = range(first, first + cluster.num_workers)
    with WorkerLogs(options.log_dir, indices, label) as logs, _signals_forwarded(cluster):
        for line in _what_they_see(cluster, gpus, first, label):
            display.say(line, stream="stdout")
        with cluster:
            results = cluster.wait()
        return _report(cluster, results, display, options, first)


def _what_they_see(
    cluster: LocalCluster, gpus: Sequence[str], first: int, label: str | None
) -> Iterator[str]:
    if label:
        yield label
    if isinstance(cluster, SshCluster):
        for index, host in enumerate(cluster.hosts):
            yield f"worker {index} is on {host}."
    dealt = gpus or cluster.gpus
    if any(dealt):
        for index, gpu in enumerate(dealt, first):
            yield f"worker {index} sees {f'GPU {gpu} only' if gpu else 'no GPU'}."
    elif dealt:
        reason = "devices are emulated" if label else "there are fewer GPUs than workers"
        yield f"the workers see no GPU, as {reason} (see --gpus auto)."


def _run_on_ray(options: argparse.Namespace, display: Display) -> int:
    for name, text in QUIET_TENSORFLOW.items():  # Ray Train imports TensorFlow here, too
        os.environ.setdefault(name, text)
    try:
        from keras_het.ray import MaxFailuresExceededError, TrainFunctionError
        from keras_het.ray.trainer import run_on_ray
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
    except (TrainFunctionError, MaxFailuresExceededError) as error:
        display.say(str(error))
        if cause := uncaught_error(str(error).splitlines()):
            display.say(f"a worker failed: {cause}")
        return 1
    except SystemExit:  # how Ray leaves after Ctrl-C
        display.say(
            "interrupted; the same command continues from the newest backup of ElasticBackup."
        )
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
    options: argparse.Namespace,
    first_index: int,
) -> int:
    if cluster.stopped_by is not None:
        display.say(f"stopped by {signal_name(cluster.stopped_by)}; all workers have ended.")
        return 128 + cluster.stopped_by
    if not cluster.failures:
        return 0
    first = first_to_fail(results)
    numbered = [replace(result, index=first_index + result.index) for result in results]
    index, hidden = first_index + first.index, display.tracebacks.hidden
    if options.log_dir is None:
        display.say("\n".join(save_output(numbered, hidden)))
    is_hidden = index in hidden or (options.only_chief and index != 0)
    display.say(describe_failures(numbered, is_hidden))
    ended_training = [result for result in cluster.failures if cluster.is_needed(result)]
    if not ended_training:
        display.say("the other workers finished training; this is not counted as a failure.")
        return 0
    return (first if first in ended_training else ended_training[0]).shell_exit_code
