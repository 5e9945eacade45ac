"""Small versions of TensorFlow's tutorials on distribution, with one line changed: the strategy.

Each runs with generated data under TensorFlow's strategy of one device and under ours with unequal
shares, and must give the same.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from equivalence import DEVICES, assert_all_close, three_replicas

BATCH, SAMPLES, EPOCHS = 6, 29, 2
# No share of nothing: of 0 rows the gradient of a convolution fails on CPUs, under any strategy.
SHARES = ((4, 1, 1), (2, 3, 1))


def ours(shares):
    strategy = three_replicas()
    strategy.set_share_weights(shares)
    return strategy


def one_device():
    return tf.distribute.OneDeviceStrategy(DEVICES[0])


def images(samples=SAMPLES):
    random = np.random.default_rng(3)
    return random.normal(size=(samples, 6, 6, 1)).astype("float32"), random.integers(0, 4, samples)


def create_model():
    keras.utils.set_random_seed(11)
    regularizer = keras.regularizers.L2(1e-3)
    return keras.Sequential(
        [
            keras.Input((6, 6, 1)),
            keras.layers.Conv2D(4, 3, activation="relu", kernel_regularizer=regularizer),
            keras.layers.Flatten(),
            keras.layers.Dense(4),
        ]
    )


def custom_training(strategy, folder):
    """`custom_training`: losses and metrics of one's own, checkpoints, several loops."""
    x, y = images()
    train = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)
    test = tf.data.Dataset.from_tensor_slices((x[:10], y[:10])).batch(BATCH)
    train_dist_dataset = strategy.experimental_distribute_dataset(train)
    test_dist_dataset = strategy.experimental_distribute_dataset(test)

    with strategy.scope():
        loss_object = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")

        def compute_loss(labels, predictions, model_losses):
            per_example_loss = loss_object(labels, predictions)
            loss = tf.nn.compute_average_loss(per_example_loss)
            if model_losses:
                loss += tf.nn.scale_regularization_loss(tf.add_n(model_losses))
            return loss

        test_loss = keras.metrics.Mean(name="test_loss")
        train_accuracy = keras.metrics.SparseCategoricalAccuracy(name="train_accuracy")
        model = create_model()
        optimizer = keras.optimizers.Adam(learning_rate=0.01)
        checkpoint = tf.train.Checkpoint(optimizer=optimizer, model=model)

    def train_step(inputs):
        samples, labels = inputs
        with tf.GradientTape() as tape:
            predictions = model(samples, training=True)
            loss = compute_loss(labels, predictions, model.losses)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        train_accuracy.update_state(labels, predictions)
        return loss

    def test_step(inputs):
        samples, labels = inputs
        test_loss.update_state(loss_object(labels, model(samples, training=False)))

    @tf.function
    def distributed_train_step(dataset_inputs):
        per_replica_losses = strategy.run(train_step, args=(dataset_inputs,))
        return strategy.reduce(tf.distribute.ReduceOp.SUM, per_replica_losses, axis=None)

    @tf.function
    def distributed_test_step(dataset_inputs):
        return strategy.run(test_step, args=(dataset_inputs,))

    @tf.function
    def distributed_train_epoch(dataset):
        total_loss, num_batches = 0.0, 0
        for batch in dataset:
            per_replica_losses = strategy.run(train_step, args=(batch,))
            total_loss += strategy.reduce(tf.distribute.ReduceOp.SUM, per_replica_losses, axis=None)
            num_batches += 1
        return total_loss / tf.cast(num_batches, tf.float32)

    results = []
    for _ in range(EPOCHS):  # iterating over the dataset outside of a function
        total_loss, num_batches = 0.0, 0
        for batch in train_dist_dataset:
            total_loss += distributed_train_step(batch)
            num_batches += 1
        for batch in test_dist_dataset:
            distributed_test_step(batch)
        results += [total_loss / num_batches, train_accuracy.result(), test_loss.result()]
        test_loss.reset_state()
        train_accuracy.reset_state()
    prefix = checkpoint.save(str(folder / "ckpt"))
    results.append(distributed_train_epoch(train_dist_dataset))  # inside of one
    iterator = iter(train_dist_dataset)  # using iterators
    results += [distributed_train_step(next(iterator)) for _ in range(2)]
    weights = [np.array(weight) for weight in model.get_weights()]

    new_model = create_model()  # restoring without a strategy
    new_optimizer = keras.optimizers.Adam()
    tf.train.Checkpoint(optimizer=new_optimizer, model=new_model).restore(prefix)
    results.append(np.mean(new_model.predict(x, verbose=0)))
    return [*map(float, results), *weights]


def save_and_load(strategy, folder):
    """`save_and_load`: trained, saved and loaded under strategies, by Keras and by TensorFlow."""
    x, y = images()
    train = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)
    predict = tf.data.Dataset.from_tensor_slices(x[:10]).batch(BATCH)
    with strategy.scope():
        model = create_model()
        model.compile(
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            optimizer=keras.optimizers.Adam(0.01),
            metrics=["accuracy"],
        )
    model.fit(train, epochs=2, verbose=0, shuffle=False)
    model.save(folder / "model.keras")
    model.export(folder / "exported", verbose=False)
    restored = keras.models.load_model(folder / "model.keras")
    history = restored.fit(train, epochs=1, verbose=0, shuffle=False).history
    with strategy.scope():
        within = keras.models.load_model(folder / "model.keras")
        within_history = within.fit(train, epochs=1, verbose=0, shuffle=False).history
        loaded = tf.saved_model.load(str(folder / "exported"))
        inference = loaded.signatures["serving_default"]
        found = []
        for batch in strategy.experimental_distribute_dataset(predict):
            outputs = strategy.run(lambda part: next(iter(inference(part).values())), args=(batch,))
            found.append(strategy.gather(outputs, axis=0))
    return [
        history["loss"][0],
        within_history["loss"][0],
        within_history["accuracy"][0],
        np.concatenate(found),
        *within.get_weights(),
    ]


TUTORIALS = (custom_training, save_and_load)


@pytest.mark.full
@pytest.mark.parametrize("tutorial", TUTORIALS, ids=lambda tutorial: tutorial.__name__)
@pytest.mark.parametrize("shares", SHARES, ids=lambda shares: "_".join(map(str, shares)))
def test_a_tutorial_gives_what_one_device_gives(logical_devices, tutorial, shares, tmp_path):
    (tmp_path / "one").mkdir()
    (tmp_path / "ours").mkdir()
    want = tutorial(one_device(), tmp_path / "one")
    got = tutorial(ours(shares), tmp_path / "ours")
    assert_all_close(got, want, rtol=1e-4, atol=1e-5)
