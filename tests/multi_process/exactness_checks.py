"""The checks that run on every worker of a cluster, and on one device to compare with.

Each takes a `Recording` and does what a user's script would do. Shares are those of three
replicas; where a cluster has more, the others get the share 1.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import compiled_checks  # noqa: F401 - they are registered
import keras
import numpy as np
import tensorflow as tf
from recorded import ONLY_WORKERS, OWN, arrays
from recording import Recording, batches, check, in_buckets, in_parts, small_model

import keras_het
from keras_het.strategy import hierarchical_all_reduce
from keras_het.strategy.exact import step as exact_step

NUM_REPLICAS = 3
exact_step._BYTES_TO_TRAVEL_ALONE = 64  # some gradients travel alone, as only large ones do
exact_step._BYTES_OF_A_BUFFER = 64  # others in several buffers
if os.environ.get("SUM_AS_GPUS"):
    # on CPUs, TensorFlow's ring takes the place of NCCL
    hierarchical_all_reduce.is_joined_by_nccl = lambda devices, _: len(devices) > 1


@check
def unseeded_numpy_shuffle(run: Recording) -> None:
    # First, before anything here has set a seed: the workers agree on the order by themselves.
    run.set_share_weights([4, 2, 1])
    x, y = arrays()
    with run.scope():
        still = small_model("sgd", keras.layers.Dense(4, kernel_initializer="ones"))
        still.layers[-1].kernel.assign(tf.ones([4, 1]))
        still.compile(keras.optimizers.SGD(0.0), "mse")
        model = small_model(keras.optimizers.SGD(0.1), keras.layers.Dropout(0.5))
    # Without learning, the mean loss of an epoch does not depend on the order: each sample once.
    means: list[float] = []
    end = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda _, logs: means.append(logs["loss"])
    )
    history = still.fit(x, y, batch_size=8, epochs=2, verbose=0, callbacks=[end])
    run.keep("history_without_learning", np.array(history.history["loss"]))
    first, second = np.split(np.array(means), 2)
    run.keep("epochs_differ", np.any(np.abs(first[:-1] - second[:-1]) > 1e-5))
    run.keep(ONLY_WORKERS + "orders", np.array(means))
    # The user's own seed means what it means on one device.
    order = [int(number) for number in tf.data.Dataset.range(20).shuffle(20, seed=3)]
    run.keep("seeded_order", np.array(order))
    losses = model.fit(x, y, batch_size=8, epochs=2, verbose=0).history["loss"]
    run.keep(ONLY_WORKERS + "history", np.array(losses))
    for position, variable in enumerate(model.weights):
        run.keep(f"{ONLY_WORKERS}weight_{position}", variable)


@check
def built_by_fit(run: Recording) -> None:
    """Each worker's own values, before the chief's replace them."""
    run.set_share_weights([4, 2, 1])
    worker = 0 if run.strategy is None else run.strategy.worker_index

    def own_values(shape: Any, dtype: Any = None) -> tf.Tensor:
        return tf.ones(shape, dtype) / (2.0 + worker)

    def make_model() -> Any:
        hidden = keras.layers.Dense(4, "tanh", kernel_initializer=own_values)
        model = keras.Sequential([hidden, keras.layers.LayerNormalization(), keras.layers.Dense(1)])
        model.compile(keras.optimizers.Adam(0.05), "mse", metrics=["mae"])
        return model

    run.fit(run.build(make_model), batches())


@check
def shares_and_partial_batch(run: Recording) -> None:
    run.set_share_weights([4, 2, 1])
    model = run.build(
        lambda: small_model(
            keras.optimizers.AdamW(0.05, weight_decay=0.01),
            # Normalisation takes a bias out again: its gradient would be rounding errors.
            keras.layers.Dense(4, use_bias=False, kernel_regularizer="l2"),
            keras.layers.BatchNormalization(momentum=0.5, synchronized=True),
            metrics=["mae", keras.metrics.RootMeanSquaredError()],
        )
    )
    run.fit(model, batches(), validation_data=batches(15, 6))
    run.keep("evaluate", model.evaluate(batches(), verbose=0))
    run.keep("predict", model.predict(batches(), verbose=0))
    run.keep("predict_arrays", model.predict(arrays(19)[0], batch_size=7, verbose=0))


@check
def zero_share(run: Recording) -> None:
    run.set_share_weights([3, 0, 1])
    model = run.build(lambda: small_model(keras.optimizers.SGD(0.1, momentum=0.9)))
    run.fit(model, batches())
    run.set_share_weights([0, 0, 1])
    run.keep("evaluate", model.evaluate(batches(), verbose=0))
    run.keep("predict", model.predict(batches(), verbose=0))


@check
def micro_batches(run: Recording) -> None:
    """Workers take different numbers of parts, one of them none."""

    def words() -> Any:
        inputs = keras.Input((4,), dtype="int32")
        embedded = keras.layers.Embedding(9, 3, mask_zero=True)(inputs)
        each = keras.layers.Dense(1, name="each")(embedded)
        whole = keras.layers.Dense(1, kernel_regularizer="l2", name="whole")(embedded[:, 0])
        model = keras.Model(inputs, [each, whole])
        model.compile(keras.optimizers.Adam(0.05), ["mse", "mae"])
        return model

    random = np.random.default_rng(5)
    x = random.integers(0, 9, (22, 4)).astype("int32")
    y = random.normal(size=(22, 4, 1)).astype("float32")
    data = tf.data.Dataset.from_tensor_slices((x, (y, y[:, 0]))).batch(8)
    run.set_share_weights([5, 0, 2])
    with in_parts(run, 2, 2, 1):
        model = run.build(words)
        run.fit(model, data)
        run.keep("evaluate", model.evaluate(data, verbose=0))
        for name, rows in zip(("each", "whole"), model.predict(data, verbose=0), strict=True):
            run.keep(f"predict_{name}", rows)


@check
def zero_share_from_the_start(run: Recording) -> None:
    def lazy() -> Any:
        hidden = keras.layers.Dense(4, "tanh", kernel_regularizer="l2", activity_regularizer="l2")
        normalization = keras.layers.BatchNormalization(synchronized=True, epsilon=0.1)
        model = keras.Sequential([hidden, normalization, keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse", metrics=["mae"])
        return model

    # each as the first thing that a model does, and each replica without samples in one of them
    run.set_share_weights([0, 1, 0])
    run.fit(run.build(lazy), batches())
    run.set_share_weights([1, 0, 0])
    model = run.build(lazy)
    run.keep("evaluate", model.evaluate(batches(), verbose=0))
    run.keep("built", [np.array(variable) for variable in model.weights])
    run.set_share_weights([0, 0, 1])
    run.keep("predict", run.build(lazy).predict(batches(), verbose=0))


@check
def state_of_ones_own(run: Recording) -> None:
    class Own(keras.layers.Layer):
        def __init__(self) -> None:
            super().__init__(name="own")
            for name, kind in (("steps", "int32"), ("rows", "int64"), ("top", "float32")):
                setattr(self, name, self.add_weight((), "zeros", kind, trainable=False, name=name))
            self.total = self.add_weight((5,), "zeros", trainable=False, name="total")
            self.moving = self.add_weight((5,), "zeros", trainable=False, name="moving")

        def call(self, inputs: Any, training: bool = False) -> Any:
            if training:
                self.steps.assign_add(1)
                self.rows.assign_add(keras.ops.cast(keras.ops.shape(inputs)[0], "int64"))
                self.top.assign(keras.ops.maximum(self.top, keras.ops.max(inputs)))
                self.total.assign_add(keras.ops.sum(inputs, axis=0))
                self.moving.assign(0.5 * self.moving + keras.ops.mean(inputs, axis=0))
            return inputs

    run.set_share_weights([3, 0, 1])
    model = run.build(lambda: small_model("sgd", Own(), keras.layers.Dense(4, "tanh")))
    run.fit(model, batches())


@check
def sharpness_aware_steps_with_vectors_in_logs(run: Recording) -> None:
    class Sam(keras.Sequential):
        def gradients(self, x: Any, y: Any) -> tuple[Any, Any]:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(y - self(x, training=True)))
            return loss, tape.gradient(loss, self.trainable_variables)

        def train_step(self, data: Any) -> Any:
            x, y = data
            weights = self.trainable_variables
            loss, gradients = self.gradients(x, y)
            gradients = keras_het.reduce_over_replicas(gradients)
            moves = [0.05 * each / tf.linalg.global_norm(gradients) for each in gradients]
            for weight, move in zip(weights, moves, strict=True):
                weight.assign_add(move)
            _, gradients = self.gradients(x, y)
            for weight, move in zip(weights, moves, strict=True):
                weight.assign_sub(move)
            self.optimizer.apply_gradients(zip(gradients, weights, strict=True))
            return {"loss": loss, "mean_of_rows": tf.reduce_mean(x, axis=0)}

    def model() -> Any:
        made = Sam([keras.Input((5,)), keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)])
        made.compile(keras.optimizers.SGD(0.1, momentum=0.9))
        return made

    run.set_share_weights([3, 0, 1])
    run.fit(run.build(model), batches())


@check
def batch_normalization(run: Recording) -> None:
    # The statistics of each replica's own share: equal on all workers, but not one device's.
    run.set_share_weights([4, 2, 1])
    model = run.build(
        lambda: small_model(
            keras.optimizers.SGD(0.1), keras.layers.Dense(4), keras.layers.BatchNormalization()
        )
    )
    model.fit(batches(), epochs=2, verbose=0)
    for position, variable in enumerate(model.weights):
        run.keep(f"{ONLY_WORKERS}weight_{position}", variable)


@check
def steps_per_execution_with_pydataset(run: Recording) -> None:
    class Source(keras.utils.PyDataset):
        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
            x, y = arrays()
            return x[8 * index : 8 * index + 8], y[8 * index : 8 * index + 8]

    run.set_share_weights([2, 1, 4])
    model = run.build(lambda: small_model("adam", steps_per_execution=2))
    run.fit(model, Source(workers=1), shuffle=False)
    run.keep("predict", model.predict(batches(), verbose=0))


@check
def executions_of_several_steps(run: Recording) -> None:
    run.set_share_weights([3, 0, 1])
    hidden = keras.layers.BatchNormalization(momentum=0.5, synchronized=True)
    model = run.build(lambda: small_model("adam", hidden, steps_per_execution=2, metrics=["mae"]))
    change = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: run.set_share_weights([1, 1 + batch, 4])
    )
    run.fit(model, batches(), validation_data=batches(15, 6), callbacks=[change])
    run.keep("evaluate", model.evaluate(batches(), verbose=0))
    run.keep("predict", model.predict(batches(), verbose=0))


@check
def unknown_cardinality(run: Recording) -> None:
    def rows() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        yield from zip(*arrays(), strict=True)

    specs = (tf.TensorSpec([5], tf.float32), tf.TensorSpec([1], tf.float32))
    run.set_share_weights([4, 2, 1])
    model = run.build(lambda: small_model(keras.optimizers.SGD(0.1, momentum=0.9)))
    run.fit(model, tf.data.Dataset.from_generator(rows, output_signature=specs).batch(8))
    # On one device Keras counts an iteration when it finds the end of the data.
    run.keep(ONLY_WORKERS + "iterations", run.results.pop("optimizer_0"))


@check
def seeded_numpy_shuffle(run: Recording) -> None:
    run.set_share_weights([1, 5, 1])
    model = run.build(lambda: small_model("nadam"))
    keras.utils.set_random_seed(11)
    run.fit(model, *arrays(), batch_size=8, validation_split=0.25)


@check
def loss_scale_optimizer(run: Recording) -> None:
    def make_model() -> Any:
        inner = keras.optimizers.SGD(0.1, momentum=0.9)
        return small_model(
            keras.optimizers.LossScaleOptimizer(inner, initial_scale=2.0**8, dynamic_growth_steps=2)
        )

    run.set_share_weights([4, 2, 1])
    run.fit(run.build(make_model), batches())


@check
def gradient_accumulation_and_clipping(run: Recording) -> None:
    optimizer = keras.optimizers.SGD
    run.set_share_weights([4, 0, 1])
    model = run.build(
        lambda: small_model(
            optimizer(0.1, momentum=0.9, gradient_accumulation_steps=2, clipnorm=0.05)
        )
    )
    run.fit(model, batches())


@check
def gradients_in_buckets(run: Recording) -> None:
    run.set_share_weights([4, 0, 1])
    with in_buckets(run):
        run.fit(run.build(lambda: small_model(keras.optimizers.Adam(0.05))), batches())


@check
def sample_weights_and_masks(run: Recording) -> None:
    random = np.random.default_rng(3)
    tokens = random.integers(1, 7, size=(22, 4))
    tokens *= np.arange(4)[None, :] < random.integers(1, 5, size=(22, 1))
    targets = random.normal(size=(22, 4, 1)).astype("float32")
    weights = random.uniform(0.0, 2.0, size=(22, 4)).astype("float32")

    def make_model() -> Any:
        model = keras.Sequential(
            [
                keras.Input((4,), dtype="int32"),
                keras.layers.Embedding(7, 3, mask_zero=True),
                keras.layers.Dense(1),
            ]
        )
        model.compile("adam", "mse", metrics=["mae"], weighted_metrics=["mse"])
        return model

    run.set_share_weights([4, 2, 1])
    model = run.build(make_model)
    data = tf.data.Dataset.from_tensor_slices((tokens, targets, weights)).batch(8)
    run.fit(model, data)
    run.keep("evaluate", model.evaluate(data, verbose=0))


@check
def shares_change_within_the_epoch(run: Recording) -> None:
    class ChangeShares(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            run.set_share_weights([batch % 3, 1 + batch % 2, 3])

    run.set_share_weights([4, 2, 1])
    model = run.build(lambda: small_model("adam"))
    run.fit(model, batches(44), callbacks=[ChangeShares()])
    run.set_share_weights([1, 1, 1])
    if run.strategy is None:
        return
    local = run.strategy.extended.layout.local_replicas
    sizes = []
    for step, (x, _) in enumerate(run.strategy.distribute(batches(64))):
        rows = [int(part.shape[0]) for part in run.strategy.experimental_local_results(x)]
        sizes.append([0] * local[0] + rows + [0] * (NUM_REPLICAS - local[-1] - 1))
        if step == 2:
            run.set_share_weights([0, 5, 3])
    run.keep(OWN + "sizes", np.array(sizes))


@check
def train_on_batch(run: Recording) -> None:
    run.set_share_weights([4, 2, 1])
    model = run.build(lambda: small_model("sgd"))
    x, y = arrays(6)
    run.keep("logs", [model.train_on_batch(x, y), model.train_on_batch(x, y)])
    run.keep("test", model.test_on_batch(x, y))
    run.keep("predict", model.predict_on_batch(x[:2]))
    run.keep_model(model)


def model_of_a_loop() -> Any:
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)])
    model.optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    model.optimizer.build(model.trainable_variables)
    return model


@check
def custom_training_loop(run: Recording) -> None:
    run.set_share_weights([4, 2, 1])
    strategy = run.strategy or tf.distribute.get_strategy()

    model = run.build(model_of_a_loop)

    def replica_step(batch: Any, size: Any) -> Any:
        x, y = batch
        with tf.GradientTape() as tape:
            errors = tf.reduce_sum(tf.square(model(x, training=True) - y), axis=1)
            loss = tf.reduce_sum(errors) / tf.cast(size, tf.float32)
        gradients = tape.gradient(loss, model.trainable_variables)
        model.optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss, errors

    @tf.function(reduce_retracing=True)
    def step(batch: Any, size: Any) -> Any:
        loss, errors = strategy.run(replica_step, args=(batch, size))
        return strategy.reduce("SUM", loss, axis=None), strategy.gather(errors, axis=0)

    for position, (batch, size) in enumerate(
        zip(strategy.experimental_distribute_dataset(batches()), (8, 8, 6), strict=True)
    ):
        loss, errors = step(batch, tf.constant(size))
        run.keep(f"loss_{position}", loss)
        run.keep(f"gathered_{position}", errors)
    run.keep_model(model)


@check
def loops_in_functions(run: Recording) -> None:
    """The ways of TensorFlow's guides to iterate, one after the other, on one model."""
    run.set_share_weights([4, 0, 1])
    strategy = run.strategy or tf.distribute.get_strategy()

    model = run.build(model_of_a_loop)

    def replica_step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            errors = tf.reduce_sum(tf.square(model(x, training=True) - y), axis=1)
            loss = tf.nn.compute_average_loss(errors)
        gradients = tape.gradient(loss, model.trainable_variables)
        model.optimizer.apply(gradients, model.trainable_variables)
        return loss

    def step(batch: Any) -> Any:
        return strategy.reduce("SUM", strategy.run(replica_step, args=batch), axis=None)

    @tf.function
    def epoch(dataset: Any) -> Any:
        total = 0.0
        for batch in dataset:
            total += step(batch)
        return total

    @tf.function
    def two_epochs(dataset: Any) -> Any:
        first = second = 0.0
        for batch in dataset:
            first += step(batch)
        for batch in dataset:  # nothing of it may run before the first loop ends
            second += step(batch)
        return first, second

    @tf.function
    def step_of(iterator: Any) -> Any:
        return step(next(iterator))

    @tf.function
    def rest(iterator: Any) -> Any:
        total = 0.0
        for _ in tf.range(100):
            optional = iterator.get_next_as_optional()
            if not optional.has_value():
                break
            total += step(optional.get_value())
        return total

    dataset = strategy.experimental_distribute_dataset(batches())
    run.keep("epochs", [epoch(dataset), epoch(dataset)])
    run.keep("two_epochs", two_epochs(dataset))
    iterator = iter(dataset)
    run.keep("steps", [step_of(iterator), rest(iterator)])
    by_signature = tf.function(step, input_signature=[dataset.element_spec])
    run.keep("by_signature", [by_signature(batch) for batch in dataset])
    run.keep_model(model)


@check
def every_way_to_iterate(run: Recording) -> None:
    import iteration_ways

    run.set_share_weights([3, 0, 1])
    strategy = run.strategy or tf.distribute.get_strategy()
    numbers = tf.data.Dataset.range(7).batch(3)
    for way in iteration_ways.WAYS:
        dataset = strategy.experimental_distribute_dataset(numbers)
        run.keep(way.__name__, np.array([way(strategy, dataset), way(strategy, dataset)]))


@check
def collectives_in_replica_context(run: Recording) -> None:
    if run.strategy is None:
        return

    def replica_function(value: Any) -> Any:
        context = tf.distribute.get_replica_context()
        number = tf.cast(context.replica_id_in_sync_group, tf.float32)
        summed = context.all_reduce("SUM", number + 1.0)
        mean = context.all_reduce("MEAN", number + 1.0)
        average = tf.nn.compute_average_loss(tf.fill([2], number), global_batch_size=6)
        rows = context.all_gather(tf.fill([1, 2], number), axis=0)
        return summed, mean, context.all_reduce("SUM", average), rows, value

    run.set_share_weights([4, 0, 1])

    step = tf.function(lambda: run.strategy.run(replica_function, args=(tf.constant(3.0),)))

    summed, mean, average, rows, value = [
        run.strategy.experimental_local_results(item)[0] for item in step()
    ]
    run.keep(ONLY_WORKERS + "sum", summed)
    run.keep(ONLY_WORKERS + "mean", mean)
    run.keep(ONLY_WORKERS + "average_loss", average)
    run.keep(ONLY_WORKERS + "gathered", rows)
    run.keep(ONLY_WORKERS + "untouched", value)


@check
def sums_of_all_types(run: Recording) -> None:
    """Of whole numbers, which have the same sum in whatever order they are added."""
    random = np.random.default_rng(0)
    shapes = {"large": ((600_001,), "float32"), "matrix": ((7, 3), "float32")}
    shapes |= {"scalar": ((), "float32"), "double": ((5,), "float64"), "half": ((9,), "float16")}
    shapes["whole"] = ((4,), "int64")
    of_replicas = {
        name: random.integers(-9, 9, (NUM_REPLICAS, *shape)).astype(kind)
        for name, (shape, kind) in shapes.items()
    }
    sums = {name: values.sum(axis=0) for name, values in of_replicas.items()}
    means = [sums[name] / NUM_REPLICAS for name in ("matrix", "double")]
    packed = [sums["matrix"], sums["large"]]

    def replica_function() -> Any:
        context = tf.distribute.get_replica_context()
        own = {
            name: tf.gather(values, context.replica_id_in_sync_group)
            for name, values in of_replicas.items()
        }
        sums = {name: context.all_reduce("SUM", value) for name, value in own.items()}
        means = [context.all_reduce("MEAN", own[name]) for name in ("matrix", "double")]
        return sums, means, context.all_reduce("SUM", [own["matrix"], own["large"]])

    found, of_workers = (sums, means, packed), sums["large"]
    if run.strategy is not None:
        step = tf.function(lambda: run.strategy.run(replica_function))
        results = run.strategy.experimental_local_results
        found = tf.nest.map_structure(lambda value: results(value)[0], step())
        own = of_replicas["large"][run.strategy.extended.layout.local_replicas].sum(axis=0)
        of_workers = tf.function(run.strategy.extended.sum_over_workers)(tf.constant(own))
    run.keep("reduced", (found, of_workers))


@check
def ragged_predictions(run: Recording) -> None:
    class Ragged(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.dense = keras.layers.Dense(2, kernel_initializer="ones")

        def call(self, x: Any) -> Any:
            return self.dense(x)

        def predict_step(self, data: Any) -> Any:
            lengths = tf.cast(tf.math.floormod(tf.cast(data[:, 0], tf.int32), 4), tf.int64)
            values = tf.repeat(self(data, training=False), lengths, axis=0)
            # as wide as the rows, so that a replica without samples has the width zero
            width = 2 * tf.cast(data[:, 1] > 0, tf.int64)
            wide = tf.RaggedTensor.from_row_lengths(tf.repeat(data, width, axis=0), width)
            return {
                "ragged": tf.RaggedTensor.from_row_lengths(values, lengths),
                "dense": data,
                "padded": wide.to_tensor(),
            }

    run.set_share_weights([4, 0, 1])
    model = run.build(Ragged)
    x = np.arange(22 * 3, dtype="float32").reshape(22, 3)
    predictions = model.predict(tf.data.Dataset.from_tensor_slices(x).batch(8), verbose=0)
    run.keep("row_splits", predictions["ragged"].row_splits)
    run.keep("values", predictions["ragged"].flat_values)
    run.keep("dense", predictions["dense"])
    run.keep("padded", predictions["padded"])


@check
def predictions_of_other_types(run: Recording) -> None:
    names = ("bfloat16", "bool", "int8", "int16", "uint8", "uint16", "uint32", "uint64", "float16")

    class Types(keras.Model):
        def predict_step(self, data: Any) -> Any:
            return {name: tf.cast(data, name) for name in names}

    run.set_share_weights([4, 2, 1])
    model = run.build(Types)
    x = np.arange(22 * 2, dtype="float32").reshape(22, 2) % 3
    predictions = model.predict(tf.data.Dataset.from_tensor_slices(x).batch(8), verbose=0)
    for name in names:
        run.keep(f"is_{name}", predictions[name].dtype == name)
        run.keep(name, predictions[name].astype("float32"))
