"""Train a model that is too large for each of three devices, over all three.

    python recipes/pipeline.py
    python recipes/pipeline.py --devices 1

Three logical CPU devices stand for GPUs of 24 MB each. The model with its gradients and the
optimizer's state needs about 50 MB: on one device the second line ends with an error that says how
much is missing. Over three, each device holds its stage only, and the weights after training are
one large device.
"""

import argparse

import keras
import tensorflow as tf
from digits import load_digits

import keras_het

MEMORY_BYTES = 24e6


def make_model() -> keras.Model:
    inputs = keras.Input([8, 8])
    hidden = keras.layers.Flatten()(inputs)
    hidden = keras.layers.Dense(512, activation="relu")(hidden)
    for number in range(12):
        block = keras.layers.Dense(512, activation="relu", name=f"block_{number}")(hidden)
        hidden = keras.layers.LayerNormalization()(hidden + block)
    model = keras.Model(inputs, keras.layers.Dense(10)(hidden))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(1e-3), loss, metrics=["accuracy"])
    return model


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--devices", type=int, default=3, help="number of logical devices")
    parser.add_argument("--epochs", type=int, default=3)
    options = parser.parse_args()

    # Real GPUs need neither this nor `devices` and `memory_bytes` below.
    (cpu,) = tf.config.list_physical_devices("CPU")
    parts = [tf.config.LogicalDeviceConfiguration()] * options.devices
    tf.config.set_logical_device_configuration(cpu, parts)

    strategy = keras_het.PipelineStrategy(
        num_micro_batches=8,
        devices=[f"CPU:{number}" for number in range(options.devices)],
        device_memory_bytes=MEMORY_BYTES,
    )
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = make_model()
    train_data, test_data = load_digits()
    model.fit(
        *train_data, batch_size=64, epochs=options.epochs, validation_data=test_data, verbose=2
    )
    print(strategy.plan)


if __name__ == "__main__":
    main()
