"""A cluster of worker processes on this machine: started, watched and ended together."""

import contextlib
import itertools
import math
import os
import queue
import resource
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal

from keras_het.launch.local import watchdog
from keras_het.launch.local.free_ports import ReservedPorts
from keras_het.launch.local.worker_environment import (
    Emulation,
    deal_gpus,
    environment_of,
    service_environment,
    worker_environment,
)
from keras_het.launch.local.worker_process import (
    STREAMS,
    OnLine,
    WorkerProcess,
    WorkerResult,
)
from keras_het.strategy.cluster.cluster_config import GROUP_PROCESSES, SERVICE_ADDRESS
from keras_het.usable_cpus import own_cpus, usable_cpus

_TIMEOUT_LINES = 15
_OTHER_FILES = 64


class LocalCluster:
    """The same command as several workers, with TF_CONFIG on 127.0.0.1 and free ports.

    Every worker leads a process group. All groups are killed when the cluster closes, and by a
    small watchdog program if this process is killed before it can.

    Example:
    ```python
    with LocalCluster([sys.executable, "script.py"], num_workers=3) as cluster:
        results = cluster.wait(timeout=600)
    ```

    Args:
        command: Program and arguments of each worker.
        num_workers: Number of workers. Defaults to the number of emulated devices.
        num_async_workers: How many of them, the last ones, train outside of the sync group (job
            `async`). They get a secret; the failure of one ends no other worker. Defaults to 0.
        env: Variables for all workers, in addition to those of this process.
        withheld: Names of variables of this process that workers do not get. Defaults to none.
        worker_env: Additional variables, one mapping per worker; a TF_CONFIG among them is used
            instead of ours. Defaults to a part of this machine's GPUs for each worker, and to none
            of them for emulated devices, or if there are fewer than workers of the group.
        cwd: Working directory of the workers. Defaults to this process's.
        emulation: Emulated devices, one per worker. Defaults to none.
        cpus_per_worker: CPUs of each worker. Defaults to an even division.
        pin: Whether to bind workers to their CPUs. Defaults to yes if no CPU has to be shared.
        on_line: Called in reader threads for each line of output; must not raise.
        on_stop: Called in `wait` with the signal when a stop was requested. Defaults to nothing.
        keep_lines: Number of last lines of each stream to keep. Defaults to `None`, all.
        end_on_failure: Whether to end all workers when one fails. Defaults to `True`.
        grace_seconds: Time to obey a signal before the next, stronger one. Defaults to 10.

    Raises:
        ValueError: If the numbers of workers contradict each other.
    """

    def __init__(
        self,
        command: Sequence[str],
        num_workers: int | None = None,
        *,
        num_async_workers: int = 0,
        env: Mapping[str, str] | None = None,
        withheld: Collection[str] = (),
        worker_env: Sequence[Mapping[str, str]] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        emulation: Emulation | None = None,
        cpus_per_worker: int | None = None,
        pin: bool | None = None,
        on_line: OnLine | None = None,
        on_stop: Callable[[int], None] | None = None,
        keep_lines: int | None = None,
        end_on_failure: bool = True,
        grace_seconds: float = 10.0,
    ) -> None:
        self.num_workers = _number_of_workers(num_workers, emulation, worker_env)
        if not 0 <= num_async_workers < self.num_workers:
            raise ValueError(
                "Some of the workers, but not all, may be async. Received: num_async_workers="
                f"{num_async_workers} of {self.num_workers} workers. Leave at least one for the "
                "sync group."
            )
        self.num_async_workers = num_async_workers
        self.stopped_by: int | None = None
        self._command = list(command)
        self._env = dict(env or {})
        self._withheld = withheld
        self.gpus: list[str] = []
        if worker_env is None:
            environment = {**os.environ, **self._env}
            number, is_emulated = self.num_workers, emulation is not None
            self.gpus = deal_gpus(environment, number, num_async_workers, is_emulated)
            worker_env = [environment_of(each) for each in self.gpus]
        self._worker_env = worker_env or [{}] * self.num_workers
        self._cwd = None if cwd is None else str(cwd)
        self._emulation = emulation
        cpus = sorted(own_cpus())
        self._cpu_sets, self._threads = assign_cpus(
            self.num_workers, cpus, cpus_per_worker, pin, usable_cpus()
        )
        self._on_line = on_line or (lambda index, stream, line: None)
        self._on_stop = on_stop or (lambda signal_number: None)
        self._keep_lines = keep_lines
        self._end_on_failure = end_on_failure
        self._grace_seconds = grace_seconds
        # Signals that are left to send until no worker is left, once it has begun, and when.
        self._escalation: list[int] | None = None
        self._due = math.inf
        # SimpleQueue because a signal handler may put while the main thread gets.
        self._events: queue.SimpleQueue[tuple[Literal["exit", "stop"], int]] = queue.SimpleQueue()
        self._workers: list[WorkerProcess] = []
        self._results: dict[int, WorkerResult] = {}
        self._ports: ReservedPorts | None = None
        self._watchdog: subprocess.Popen[bytes] | None = None
        self._secret = secrets.token_hex(32)

    @property
    def addresses(self) -> tuple[str, ...]:
        """`127.0.0.1:port` of each worker; empty before `start`."""
        return self._addresses if self._ports else ()

    @property
    def failures(self) -> tuple[WorkerResult, ...]:
        """Workers that failed by themselves, the first one first; empty after a stop request."""
        if self.stopped_by is not None:
            return ()
        own = [result for result in self._results.values() if result.has_failed]
        return tuple(sorted(own, key=lambda result: result.exited_at))

    def start(self) -> None:
        """Start all workers.

        Raises:
            ValueError: If the command cannot be started, or the cluster was started before.
            OSError: If there are not enough free ports.
        """
        if self._ports is not None:
            raise ValueError("A LocalCluster starts once. Make a new one to run the command again.")
        # one more for the parameter service
        self._ports = ReservedPorts(self.num_workers + bool(self.num_async_workers))
        self._addresses = self._ports.addresses[: self.num_workers]
        try:
            # -I -S: the standard library only, so it starts at once. In its own session:
            # Ctrl-C in the terminal must not end it before the workers.
            self._watchdog = subprocess.Popen(
                [sys.executable, "-I", "-S", watchdog.__file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                start_new_session=True,
            )
            self._ports.release()
            for index in range(self.num_workers):
                self._start_worker(index)
        except BaseException:
            self.close()
            raise

    def wait(self, timeout: float | None = None) -> tuple[WorkerResult, ...]:
        """Wait until all workers have ended, and end them all when one fails.

        Args:
            timeout: Longest wait in seconds. Defaults to `None`, forever.

        Returns:
            How each worker ended, in their order.

        Raises:
            TimeoutError: If workers still run after `timeout`, with their last lines; they continue
                until the cluster closes.
        """
        end = math.inf if timeout is None else time.monotonic() + timeout
        while len(self._results) < len(self._workers):
            due = min(end, self._due)
            try:
                left = None if due == math.inf else max(0.0, due - time.monotonic())
                kind, value = self._events.get(timeout=left)
            except queue.Empty:
                if time.monotonic() >= end:
                    raise TimeoutError(self._timeout_message(timeout)) from None
                self._escalate()
            else:
                self._handle(kind, value)
        return tuple(self._results[index] for index in range(len(self._workers)))

    def request_stop(self, signal_number: int = signal.SIGINT) -> None:
        """Ask `wait` to forward a signal to all workers and then end them.

        A second request skips the grace period. Safe in signal handlers and other threads.

        Args:
            signal_number: The signal to forward first.
        """
        self._events.put(("stop", signal_number))

    def kill(self, worker_index: int, signal_number: int = signal.SIGKILL) -> None:
        """Send a signal to one worker and everything it started, as a failure would.

        Args:
            worker_index: The worker.
            signal_number: The signal. Defaults to SIGKILL.
        """
        self._workers[worker_index].send_signal(signal_number)

    def wait_for_output(self, worker_index: int, text: str, timeout: float) -> None:
        """Wait until a line of one worker's output contains a text.

        Args:
            worker_index: The worker.
            text: Plain text to look for; progress-bar states that were overwritten do not count.
            timeout: Longest wait in seconds.

        Raises:
            TimeoutError: If it did not appear in time, or the worker ended without it.
        """
        worker = self._workers[worker_index]
        if not worker.wait_for_output(text, timeout):
            state = "ended" if worker.has_exited else f"ran for {timeout:g} s"
            raise TimeoutError(
                f"Worker {worker_index} {state} without printing {text!r}. Its last lines:\n"
                f"{self._last_lines(worker)}"
            )

    def close(self) -> None:
        """Kill remaining processes, wait for them and return the ports."""
        self._end_running(signal.SIGKILL)
        for worker in self._workers:
            worker.join()
        if self._watchdog is not None:
            self._watchdog.communicate()
        if self._ports is not None:
            self._ports.close()

    def __enter__(self) -> "LocalCluster":
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _start_worker(self, index: int) -> None:
        environment = worker_environment(
            index,
            self._addresses,
            self._threads[index],
            self._inherited_environment(index),
            self._emulation,
            self.num_async_workers,
        )
        num_sync = self.num_workers - self.num_async_workers
        if index >= num_sync:
            group = [str(worker.process_id) for worker in self._workers[:num_sync]]
            environment[GROUP_PROCESSES] = ",".join(group)
        if given := self._worker_env[index].get("TF_CONFIG"):
            environment["TF_CONFIG"] = given
        cpus = self._cpu_sets[index] if self._cpu_sets else None
        self._add(index, self._command, environment, cpus=cpus, cwd=self._cwd)

    def _add(
        self, index: int, command: Sequence[str], environment: Mapping[str, str], **options: Any
    ) -> None:
        worker = WorkerProcess(
            index,
            command,
            environment,
            on_line=self._on_line,
            on_exit=lambda index: self._events.put(("exit", index)),
            keep_lines=self._keep_lines,
            **options,
        )
        self._workers.append(worker)
        self._tell_watchdog("+", worker)

    def _inherited_environment(self, index: int) -> dict[str, str]:
        own = {**self._env, **self._worker_env[index]}
        passed = {name: os.environ[name] for name in os.environ if name not in self._withheld}
        inherited = passed | own
        if self._ports is not None and self.num_async_workers:
            address = own.get(SERVICE_ADDRESS, self._ports.addresses[-1])
            inherited |= service_environment(address, inherited, self._secret)
        return inherited

    def _handle(self, kind: Literal["exit", "stop"], value: int) -> None:
        if kind == "exit":
            self._tell_watchdog("-", self._workers[value])
            self._results[value] = self._workers[value].result()
            is_over = self._end_on_failure and any(map(self.is_needed, self.failures))
            if is_over and self._escalation is None:
                self._escalate(signal.SIGTERM, signal.SIGKILL)
        elif self._escalation is not None:
            self._escalate()
        else:
            self.stopped_by = value
            self._on_stop(value)
            gentler = [] if value == signal.SIGTERM else [value]
            self._escalate(*gentler, signal.SIGTERM, signal.SIGKILL)

    def _escalate(self, *signals: int) -> None:
        """Send the next of the signals that are left, after adding some."""
        self._escalation = [*(self._escalation or []), *signals]
        self._due = math.inf
        if self._escalation:
            self._end_running(self._escalation.pop(0))
        if self._escalation:
            self._due = time.monotonic() + self._grace_seconds

    def is_needed(self, result: WorkerResult) -> bool:
        """Tell whether the others cannot continue without this worker: it is no async one."""
        return result.index < self.num_workers - self.num_async_workers

    def _end_running(self, signal_number: int) -> None:
        for worker in self._workers:
            if not worker.has_exited:
                worker.was_ended = True
                worker.send_signal(signal_number)

    def _tell_watchdog(self, change: Literal["+", "-"], worker: WorkerProcess) -> None:
        if self._watchdog is not None and self._watchdog.stdin is not None:
            # if it was killed, the workers are still ended with the cluster
            with contextlib.suppress(OSError):
                self._watchdog.stdin.write(f"{change}{worker.process_id}\n".encode())

    def _timeout_message(self, timeout: float | None) -> str:
        running = [worker for worker in self._workers if worker.index not in self._results]
        details = "\n".join(
            f"worker {worker.index}, last lines:\n{self._last_lines(worker)}" for worker in running
        )
        indices = [worker.index for worker in running]
        return f"Workers {indices} still run after {timeout:g} s.\n{details}"

    def _last_lines(self, worker: WorkerProcess) -> str:
        return "\n".join(
            f"  {stream}: {line}"
            for stream in STREAMS
            for line in worker.text(stream).splitlines()[-_TIMEOUT_LINES:]
        )


def _number_of_workers(
    num_workers: int | None,
    emulation: Emulation | None,
    worker_env: Sequence[Mapping[str, str]] | None,
) -> int:
    if num_workers is None:
        num_workers = len(emulation.speeds) if emulation else 1
    if num_workers < 1:
        raise ValueError(f"A cluster needs at least 1 worker. Received: num_workers={num_workers}.")
    # Each worker takes three: its two streams and its port.
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    most = (files - _OTHER_FILES) // 3
    if files != resource.RLIM_INFINITY and num_workers > most:
        raise ValueError(
            f"This process may open {files} files, which is enough for at most {most} workers. "
            f"Received: {num_workers} workers. Give fewer, or raise the limit with `ulimit -n`."
        )
    if emulation and len(emulation.speeds) != num_workers:
        raise ValueError(
            "Emulation needs one speed for each worker. Received: "
            f"{len(emulation.speeds)} speeds {emulation.speeds} and {num_workers} workers. Give as "
            "many speeds as workers, or leave out the number of workers."
        )
    if worker_env is not None and len(worker_env) != num_workers:
        raise ValueError(
            f"`worker_env` needs one mapping for each worker. Received: {len(worker_env)} mappings "
            f"and {num_workers} workers."
        )
    return num_workers


def assign_cpus(
    num_workers: int,
    cpus: Sequence[int],
    cpus_per_worker: int | None = None,
    pin: bool | None = None,
    usable: float = math.inf,
) -> tuple[tuple[tuple[int, ...], ...] | None, tuple[int, ...]]:
    """Return the CPUs that each worker is bound to, None for unbound ones, and its threads."""
    # A quota below the number of CPUs is divided into threads: the system would throttle more.
    if cpus_per_worker is not None and not 1 <= cpus_per_worker <= len(cpus):
        raise ValueError(
            "Each worker needs at least one CPU and at most all of them. Received: "
            f"cpus_per_worker={cpus_per_worker}; expected 1 to {len(cpus)}."
        )
    can_pin = hasattr(os, "sched_setaffinity")
    if pin and not can_pin:
        raise ValueError(
            "This operating system cannot bind processes to CPUs. Received: pin=True. Leave it out."
        )
    if cpus_per_worker is None:
        dealt = [cpus[at::num_workers] or [cpus[at % len(cpus)]] for at in range(num_workers)]
    else:
        endless = itertools.cycle(cpus)
        dealt = [list(itertools.islice(endless, cpus_per_worker)) for _ in range(num_workers)]
    sets = tuple(map(tuple, dealt))
    if pin is None:
        pin = can_pin and sum(len(own) for own in sets) <= len(cpus)
    threads = [len(own) for own in sets]
    if cpus_per_worker is None and usable < len(cpus):
        most = max(1, math.floor(usable / num_workers))
        threads = [min(number, most) for number in threads]
    return sets if pin else None, tuple(threads)
