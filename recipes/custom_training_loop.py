"""A custom training loop, in the manner of tf.distribute.

    keras-het run --workers 2 recipes/custom_training_loop.py
    python recipes/custom_training_loop.py

Within `strategy.run` nothing is weighted behind your back: the sum of all replicas' gradients is
applied, so each replica divides its losses by the size of the *global* batch. That is correct for
shares of any size, and both lines print the same losses.
"""

import argparse

import keras
import tensorflow as tf
from digits import load_digits, make_model

import keras_het

BATCH_SIZE = 56  # Over all workers.
SHARES = [3, 1]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=3)
    options = parser.parse_args()

    strategy = keras_het.HeterogeneousStrategy()
    if strategy.num_workers == len(SHARES):
        strategy.set_share_weights(SHARES)
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = make_model()
        optimizer = keras.optimizers.SGD(learning_rate=0.1, momentum=0.9)
        optimizer.build(model.trainable_variables)
    # No reduction: a mean here would be over the replica's samples, not over the global batch.
    losses_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)

    def replica_step(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            losses = losses_of(labels, model(images, training=True))
            loss = tf.nn.compute_average_loss(losses, global_batch_size=BATCH_SIZE)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    @tf.function
    def train_step(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        losses = strategy.run(replica_step, args=(images, labels))
        return strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)

    (images, labels), _ = load_digits()
    samples = tf.data.Dataset.from_tensor_slices((images, labels)).shuffle(len(labels), seed=0)
    # Single samples in, each replica's share of every global batch out. The last, smaller batch is
    # dropped because `BATCH_SIZE` above is a constant.
    num_steps = len(labels) // BATCH_SIZE
    batches = strategy.distribute(samples.take(num_steps * BATCH_SIZE), BATCH_SIZE)
    for epoch in range(options.epochs):
        total = 0.0
        for batch in batches:
            total += float(train_step(*batch))
        if strategy.is_chief:
            print(f"epoch {epoch + 1}: loss {total / num_steps:.5f}")


if __name__ == "__main__":
    main()
