"""Input from other machines and processes: a tf.data service and its consumers' data sets."""

from __future__ import annotations

import atexit
from pathlib import Path

import tensorflow as tf

from keras_het.loader import tf_data_adapter as adapter
from keras_het.loader.data_service.addresses import (
    check_host,
    check_reachable,
    is_reachable,
    split_address,
)
from keras_het.loader.data_service.servers import Server, start_dispatcher, start_worker

_CONNECT_SECONDS = 10.0
_PYTHON = adapter.GENERATOR_OPERATIONS | adapter.PYTHON_OPERATIONS


def service(
    address: str | None = None,
    *,
    workers: int | None = None,
    host: str = "127.0.0.1",
    port: int = 0,
    work_dir: str | Path | None = None,
) -> DataService:
    """Start a tf.data service, or join one.

        # on the machine that others can reach
        with keras_het.loader.service(host="10.0.0.5", port=5050) as data:
            model.fit(data.distribute(dataset, job="train"))
            input("Enter, when the others have ended too: ")

        # on every other one, with the same dataset
        data = keras_het.loader.service("10.0.0.5:5050")
        model.fit(data.distribute(dataset, job="train"))

    Spare CPU machines help with `keras-het loader-worker --dispatcher 10.0.0.5:5050 --host ...`.
    TensorFlow's servers neither encrypt nor authenticate, and their ports are open on all
    interfaces whatever `host` is: use them only in networks you trust.

    Args:
        address: "host:port" of a running dispatcher; None starts one in this process.
        workers: how many workers to start in this process: by default 1 with a new dispatcher, 0
            otherwise.
        host: name or address under which others reach what is started here; with the default only
            processes of this machine do.
        port: port of the new dispatcher; 0 takes a free one.
        work_dir: folder in which the new dispatcher keeps a journal. A dispatcher restarted with
            the same folder and `port` continues where the last one stopped; run the workers in
            separate processes then (`workers=0`). None keeps no journal.

    Returns:
        The service, a context manager that stops what it started.

    Raises:
        ValueError: if an argument is not valid.
        ConnectionError: if no dispatcher answers at `address`, or at `host`.
    """
    _check(address, workers, host, port, work_dir)
    if address is not None:
        split_address(address)
        address = address.removeprefix("grpc://")
        check_reachable(address, _CONNECT_SECONDS)
        return DataService(address, None, workers or 0, host)
    dispatcher, bound_port = start_dispatcher(port, None if work_dir is None else str(work_dir))
    workers = 1 if workers is None else workers
    # a worker would retry for an hour
    if workers and not is_reachable(f"{host}:{bound_port}", _CONNECT_SECONDS):
        dispatcher.stop()
        raise ConnectionError(
            "The dispatcher that was started here cannot be reached under the name that workers "
            f"and consumers are told. Received: host={host!r}. Give a name or an address of this "
            "machine."
        )
    return DataService(f"{host}:{bound_port}", dispatcher, workers, host)


class DataService:
    """A tf.data service as one process sees it; made by `service`.

    Args:
        address: "host:port" of the dispatcher.
        dispatcher: the dispatcher, if this process runs it.
        workers: how many workers to start here.
        host: name or address under which others reach them.

    Attributes:
        address: address at which others join.
    """

    def __init__(self, address: str, dispatcher: Server | None, workers: int, host: str) -> None:
        self.address = address
        self._is_closed = False
        self._servers: list[Server] = [] if dispatcher is None else [dispatcher]
        atexit.register(self.close)
        try:
            for _ in range(workers):
                self._servers.append(start_worker(address, host))
        except BaseException:
            self.close()
            raise

    def distribute(
        self,
        dataset: tf.data.Dataset,
        job: str,
        *,
        max_outstanding_requests: int = 1,
        compression: bool = True,
    ) -> tf.data.Dataset:
        """Return this consumer's part of a data set that all consumers of a job share.

        Every consumer calls it with the same data set and job. In each epoch an element goes to
        the consumer that asks first: one that trains faster takes more. Together, the consumers get
        every element of the data set once, in no fixed order; a consumer that is lost takes with it
        those it had asked for.

        Args:
            dataset: `tf.data.Dataset` of batches. Its functions run in the workers' processes, so
                they must not call Python.
            job: name of the shared reading. Another name is a separate reading of the data set.
            max_outstanding_requests: elements that may be in transit to this consumer. With 1 the
                split follows the speeds closely; more hide the transfer time, but then a slow
                consumer holds more when an epoch ends.
            compression: whether elements are compressed in transit; not between processes of one
                machine.

        Returns:
            A `tf.data.Dataset` of unknown cardinality for `fit`.

        Raises:
            TypeError: if `dataset` is not a `tf.data.Dataset`.
            ValueError: if it calls Python, or an argument is wrong.
            RuntimeError: after `close`.
        """
        if self._is_closed:
            raise RuntimeError("The data service was closed. Call keras_het.loader.service again.")
        _check_job(dataset, job, max_outstanding_requests)
        shared = dataset.apply(
            tf.data.experimental.service.distribute(
                processing_mode=tf.data.experimental.service.ShardingPolicy.DYNAMIC,
                service=f"grpc://{self.address}",
                job_name=job,
                max_outstanding_requests=max_outstanding_requests,
                compression="AUTO" if compression else None,
            )
        )
        options = tf.data.Options()
        # a buffer that TensorFlow adds would take more than this consumer uses
        options.experimental_optimization.inject_prefetch = False
        return shared.with_options(options)

    def close(self) -> None:
        """Stop the workers and the dispatcher that this process runs.

        Consumers elsewhere continue without these workers, but not without their dispatcher: they
        wait for another one at its address. Close it when they have ended.
        """
        self._is_closed = True
        atexit.unregister(self.close)
        # a worker that has lost its dispatcher takes longer to stop
        while self._servers:
            self._servers.pop().stop()

    def __enter__(self) -> DataService:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _check(
    address: str | None, workers: int | None, host: str, port: int, work_dir: str | Path | None
) -> None:
    if not isinstance(host, str) or not host:
        raise ValueError(f"host must be a name or an address of this machine. Received: {host!r}.")
    check_host(host)
    if workers is not None and (not isinstance(workers, int) or workers < 0):
        raise ValueError(f"workers must be a whole number of at least 0. Received: {workers!r}.")
    if not isinstance(port, int) or not 0 <= port < 65536:
        raise ValueError(f"port must be from 0 (a free one) to 65535. Received: {port!r}.")
    if address is not None and port != 0:
        raise ValueError(
            "port is that of a new dispatcher: leave it out to join one at an address. Received: "
            f"address={address!r}, port={port!r}."
        )
    if work_dir is not None and port == 0:
        raise ValueError(
            "A dispatcher with a journal needs a fixed port, at which others find it when it is "
            "started again: give service a port. It takes no work_dir to join one at an address. "
            f"Received: work_dir={str(work_dir)!r}, port=0, address={address!r}."
        )


def _check_job(dataset: tf.data.Dataset, job: str, max_outstanding_requests: int) -> None:
    if not isinstance(dataset, tf.data.Dataset):
        raise TypeError(
            "distribute needs a tf.data.Dataset. Received: "
            f"{dataset!r} of type {type(dataset)}. Arrays: tf.data.Dataset.from_tensor_slices(...)."
        )
    if not isinstance(job, str) or not job:
        raise ValueError(
            f"job must be a name that all consumers share, such as 'train'. Received: {job!r}."
        )
    if not isinstance(max_outstanding_requests, int) or max_outstanding_requests < 1:
        raise ValueError(
            "max_outstanding_requests must be a whole number of at least 1. Received: "
            f"{max_outstanding_requests!r}."
        )
    for node in adapter.upstream_of(dataset):
        if adapter.operations_in_functions(node) & _PYTHON:
            raise ValueError(
                "The data set calls Python (from_generator, py_function or numpy_function), which "
                "does not exist in the workers of a data service. Write it in TensorFlow "
                "operations, or map it after distribute. Received: "
                f"{type(node).__name__} with element_spec={node.element_spec}."
            )
