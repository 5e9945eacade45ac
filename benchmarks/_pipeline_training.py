"""Trainings of the pipeline benchmark: models, and one process of one mode.

A process builds its model, trains a few steps, and then runs blocks of steps on request. All modes
train the same model on the same global batches from the same weights; `weights` lets the benchmark
check that. Devices are emulated: a replica, or a pass of a pipeline, takes at least the time that
its device would take for its samples.
"""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import time
from collections.abc import Callable
from typing import Any

NUM_CLASSES = 10
RATE, MOMENTUM = 0.01, 0.9
WARM_UP_STEPS = 4
INTER_OP_THREADS = 32  # an emulated device keeps one while it waits


@dataclasses.dataclass(frozen=True)
class Case:
    """What is trained, and on what.

    Args:
        model: name of a model.
        batch: samples of a global batch.
        micro_batches: of a pipeline.
        speeds: speed of each device, host by host.
        hosts: number of hosts; each has as many of the devices.
        seconds_per_sample: of a device of speed 1, forward and backward.
        memory_bytes: limit of each device, None for none.
        links: rate of each host's link in Mbit/s, None for equal ones.
        recompute: what a pipeline computes again in the backward pass.
        split_after: the last layer of each stage but the last, None for the planner's choice.
    """

    model: str
    batch: int
    micro_batches: int
    speeds: tuple[float, ...]
    hosts: int
    seconds_per_sample: float
    memory_bytes: float | None = None
    links: tuple[float, ...] | None = None
    recompute: str = "auto"
    split_after: tuple[str, ...] | None = None

    @property
    def devices_per_host(self) -> int:
        """Number of devices of a host."""
        return len(self.speeds) // self.hosts

    def emulation(self, first: int, number: int) -> str:
        """Return the environment variable that describes some of the devices."""
        return json.dumps(
            [
                {
                    "speed": speed,
                    "fixed_seconds": 0.0,
                    "seconds_per_sample": self.seconds_per_sample / speed,
                }
                for speed in self.speeds[first : first + number]
            ]
        )


def vgg(layers: Any) -> list[Any]:
    """Few weights in the convolutions, most in the dense head; 6.4 MB."""
    result = []
    for filters in (8, 16, 32):
        result += [layers.Conv2D(filters, 3, padding="same", activation="relu") for _ in range(2)]
        result.append(layers.MaxPooling2D())
    head = [layers.Dense(1024, activation="relu") for _ in range(2)]
    return [*result, layers.Flatten(), *head, layers.Dense(NUM_CLASSES)]


def wide(layers: Any) -> list[Any]:
    """Wide activations everywhere and few weights; 11 kB."""
    convolutions = [
        layers.Conv2D(8, 3, padding="same", activation="relu", name=f"wide_{i}") for i in range(5)
    ]
    return [*convolutions, layers.GlobalAveragePooling2D(), layers.Dense(NUM_CLASSES)]


def transformer(keras: Any, length: int = 16, width: int = 128, blocks: int = 6) -> Any:
    """Blocks of attention and a dense part, 128 wide; 5.3 MB."""
    layers = keras.layers
    tokens = keras.Input((length,), dtype="int32")
    x = layers.Embedding(1000, width)(tokens)
    for _ in range(blocks):
        normal = layers.LayerNormalization()(x)
        x = layers.Add()([x, layers.MultiHeadAttention(4, width // 4)(normal, normal)])
        inner = layers.Dense(4 * width, activation="gelu")(layers.LayerNormalization()(x))
        x = layers.Add()([x, layers.Dense(width)(inner)])
    x = layers.GlobalAveragePooling1D()(layers.LayerNormalization()(x))
    return keras.Model(tokens, layers.Dense(NUM_CLASSES)(x))


def make_model(name: str) -> Any:
    """Build a model with weights that are the same everywhere."""
    import keras

    keras.utils.set_random_seed(7)
    if name == "transformer":
        return transformer(keras)
    build = {"vgg": vgg, "wide": wide}[name]
    return keras.Sequential([keras.Input((32, 32, 3)), *build(keras.layers)])


def make_batch(case: Case) -> tuple[Any, Any]:
    """Return the global batch: reading data is the subject of benchmarks/data.py."""
    import numpy as np

    rng = np.random.default_rng(0)
    y = rng.integers(0, NUM_CLASSES, case.batch)
    if case.model == "transformer":
        return rng.integers(0, 1000, (case.batch, 16)).astype("int32"), y
    return rng.normal(size=(case.batch, 32, 32, 3)).astype("float32"), y


def run_process(case: Case, mode: str, forced: Any, process: int, pipe: Any) -> None:
    """Serve the benchmark: "info", "weights", or a number of steps, whose seconds are answered.

    Args:
        case: the case.
        mode: the mode.
        forced: a plan that is not to be chosen, with the times of the layers that the processes
            measured for it; or None.
        process: number of this process.
        pipe: the connection to the benchmark.
    """
    try:
        _set_up_devices(case, mode, process)
        training = Training(case, mode, forced, process)
        training.run(WARM_UP_STEPS)
        pipe.send(training.info())
        while (request := pipe.recv()) != "end":
            pipe.send(training.weights() if request == "weights" else training.run(request))
    except Exception as error:
        pipe.send(error)


def _set_up_devices(case: Case, mode: str, process: int) -> None:
    import tensorflow as tf

    # stock strategies use one CPU device of a process that is not alone
    number = 1 if mode == "stock" and case.hosts > 1 else case.devices_per_host
    os.environ["KERAS_HET_EMULATED_DEVICES"] = case.emulation(process * number, number)
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(INTER_OP_THREADS)
    cpu = tf.config.list_physical_devices("CPU")[0]
    logical = [tf.config.LogicalDeviceConfiguration()] * number
    tf.config.set_logical_device_configuration(cpu, logical)


class Training:
    """A model under one mode's strategy.

    Args:
        case: the case.
        mode: the mode.
        forced: as in `run_process`.
        process: number of this process.
    """

    def __init__(self, case: Case, mode: str, forced: Any = None, process: int = 0) -> None:
        plan, measured = forced or (None, None)
        self._measured: list[Any] = [] if measured is None else [measured[process]]
        _keep_measurements(self._measured)
        self._case, self._known = case, _record_plans()
        self.strategy = _strategy(case, mode, plan)
        make = _loop if mode == "stock" else _fit
        self.model, self._run = make(self.strategy, case)

    def run(self, steps: int) -> float:
        """Return the seconds of a step; one more step comes first."""
        return self._run(steps)

    def weights(self) -> list[Any]:
        """Return the weights."""
        return list(self.model.get_weights())

    def info(self) -> dict[str, Any]:
        """Return the plan, other plans to compare it with, and the memory used so far."""
        plan = getattr(self.strategy, "plan", None)
        return {
            "plan": plan,
            "measured": self._measured[0] if self._measured else None,
            "others": _other_plans(self._case, *self._known[0]) if self._known else {},
            "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        }


def _strategy(case: Case, mode: str, plan: Any) -> Any:
    import tensorflow as tf

    import keras_het

    devices = [f"CPU:{i}" for i in range(case.devices_per_host)]
    if mode == "stock":
        if case.hosts == 1:
            return tf.distribute.MirroredStrategy(devices)
        return tf.distribute.MultiWorkerMirroredStrategy()
    if mode in ("all_reduce", "summation"):
        return keras_het.HeterogeneousStrategy(
            devices, share_weights=case.speeds, gradient_reduction=mode
        )
    return keras_het.PipelineStrategy(
        None if plan else case.split_after,
        case.micro_batches,
        devices,
        plan=plan,
        device_memory_bytes=case.memory_bytes,
        recompute=case.recompute,
    )


def _keep_measurements(known: list[Any]) -> None:
    """Measure once: the layers' parts of an emulated device's time must not change with the plan.

    Args:
        known: gets what is measured, and has priority over it.
    """
    from keras_het.strategy.pipeline import pipeline_strategy

    original = pipeline_strategy.measure

    def measure(*arguments: Any) -> Any:
        if not known:
            known.append(original(*arguments))
        return known[0]

    pipeline_strategy.measure = measure  # type: ignore[assignment]


def _record_plans() -> list[Any]:
    """Keep what the planner is given: nobody else knows the measurements."""
    from keras_het.strategy.pipeline import measured_plan

    known: list[Any] = []
    original = measured_plan.plan_pipeline

    def recording(profile: Any, devices: Any, *arguments: Any) -> Any:
        known.append((profile, devices))
        return original(profile, devices, *arguments)

    measured_plan.plan_pipeline = recording  # type: ignore[assignment]
    return known


def _other_plans(case: Case, profile: Any, devices: Any) -> dict[str, Any]:
    """Return one stage on all devices, and the best cut in two stages, as the planner sees them."""
    from keras_het.planning.pipeline import PipelinePlan, Stage, plan_with_cuts, routes, simulate

    everyone = range(devices.num_devices)
    seconds = (profile.forward_seconds + profile.backward_seconds).sum(axis=0)
    result: dict[str, Any] = {}
    if case.memory_bytes is None:
        taken = routes(seconds, case.micro_batches)
        stage = Stage(0, profile.num_units, tuple(everyone), taken)
        plan = PipelinePlan((stage,), case.micro_batches, "1f1b", 0.0, (0.0,) * len(everyone))
        predicted = simulate(profile, devices, plan).step_seconds
        result["one stage"] = dataclasses.replace(plan, step_seconds=predicted)
    cut_in_two = []
    for cut in profile.allowed_cuts()[1:-1]:
        try:
            cut_in_two.append(plan_with_cuts(profile, devices, [cut], case.micro_batches))
        except ValueError:
            continue  # does not fit into memory
    if cut_in_two:
        result["two stages"] = min(cut_in_two, key=lambda each: each.step_seconds)
    return result


def _fit(strategy: Any, case: Case) -> tuple[Any, Callable[[int], float]]:
    """Return a model, and a function that trains it by stock `fit`."""
    import keras
    import tensorflow as tf

    class Clock(keras.callbacks.Callback):
        """Timer of all steps of an epoch except the first."""

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == 0:
                self.start = time.perf_counter()
            self.seconds = (time.perf_counter() - self.start) / max(batch, 1)

    with strategy.scope():
        model = make_model(case.model)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(RATE, MOMENTUM), loss)
    dataset = tf.data.Dataset.from_tensors(make_batch(case)).repeat()

    def run(steps: int) -> float:
        clock = Clock()
        model.fit(dataset, steps_per_epoch=steps + 1, verbose=0, callbacks=[clock], shuffle=False)
        return float(clock.seconds)

    return model, run


def _loop(strategy: Any, case: Case) -> tuple[Any, Callable[[int], float]]:
    """Return a model, and a function that trains it by the custom loop of TensorFlow's guide."""
    import keras
    import tensorflow as tf

    emulated = [each["seconds_per_sample"] for each in _emulated()]
    with strategy.scope():
        model = make_model(case.model)
        loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
        optimizer = keras.optimizers.SGD(RATE, MOMENTUM)
        optimizer.build(model.trainable_variables)

    def replica_step(x: Any, y: Any) -> Any:
        with tf.control_dependencies([x, y]):
            start = tf.timestamp()
        with tf.GradientTape() as tape:
            losses = loss_of(y, model(x, training=True))
            loss = tf.nn.compute_average_loss(losses, global_batch_size=case.batch)
        found = tape.gradient(loss, model.trainable_variables)
        place = tf.distribute.get_replica_context().replica_id_in_sync_group % len(emulated)
        seconds = tf.cast(tf.shape(x)[0], tf.float64) * tf.constant(emulated, tf.float64)[place]
        with tf.control_dependencies([tf.convert_to_tensor(each) for each in found]):
            waited = tf.numpy_function(_sleep, [start, seconds], tf.float64, stateful=False)
        late = [tf.convert_to_tensor(each) + tf.cast(0 * waited, each.dtype) for each in found]
        optimizer.apply_gradients(zip(late, model.trainable_variables, strict=True))
        return loss

    @tf.function
    def step(batch: Any) -> Any:
        losses = strategy.run(replica_step, args=batch)
        return strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)

    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    dataset = tf.data.Dataset.from_tensor_slices(make_batch(case)).repeat().batch(case.batch)
    batches = iter(strategy.experimental_distribute_dataset(dataset.with_options(options)))

    def run(steps: int) -> float:
        step(next(batches)).numpy()
        start = time.perf_counter()
        for _ in range(steps):
            step(next(batches)).numpy()
        return (time.perf_counter() - start) / steps

    return model, run


def _emulated() -> list[dict[str, float]]:
    return list(json.loads(os.environ["KERAS_HET_EMULATED_DEVICES"]))


def _sleep(start: Any, seconds: Any) -> Any:
    import numpy as np

    time.sleep(max(float(start) + float(seconds) - time.time(), 0.0))
    return np.float64(0.0)
