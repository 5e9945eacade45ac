"""Data and model of all recipes: handwritten digits and a small convnet.

scikit-learn ships the 1797 images of 8 x 8 pixels, so nothing is downloaded.
"""

import keras
import numpy as np
import tensorflow as tf
from extras import MISSING

try:
    import sklearn.datasets
except ImportError as error:
    raise ImportError(MISSING) from error

NUM_TRAIN = 1437
NUM_CLASSES = 10


def load_digits() -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Return (images, labels) to train with and (images, labels) to test with.

    Images are float32 of shape [samples, 8, 8, 1] from 0 to 1, labels int64 of shape [samples].
    """
    digits = sklearn.datasets.load_digits()
    images = (digits.images[..., None] / 16).astype("float32")
    labels = digits.target.astype("int64")
    order = np.random.default_rng(0).permutation(len(labels))
    train, test = order[:NUM_TRAIN], order[NUM_TRAIN:]
    return (images[train], labels[train]), (images[test], labels[test])


def global_batches(images: np.ndarray, labels: np.ndarray, batch_size: int) -> tf.data.Dataset:
    """Make shuffled batches, the same on every worker; the strategy cuts them up.

    Args:
        images: float32 of shape [samples, 8, 8, 1].
        labels: int64 of shape [samples].
        batch_size: samples of a step over all replicas.
    """
    samples = tf.data.Dataset.from_tensor_slices((images, labels))
    # The seed makes the order the same on every worker and in every run that is compared.
    return samples.shuffle(len(labels), seed=0).batch(batch_size)


def make_model() -> keras.Model:
    """Return a compiled convnet of about 10,000 weights.

    Its layers are deliberately smooth: at a tie in ReLU or max pooling, a difference in the last
    bit decides which way the gradient goes, and two runs that are equal to 1e-7 drift apart.
    """
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(16, 3, padding="same", activation="gelu"),
            keras.layers.AveragePooling2D(2),
            keras.layers.Conv2D(32, 3, padding="same", activation="gelu"),
            keras.layers.Flatten(),
            keras.layers.Dense(NUM_CLASSES),
        ]
    )
    model.compile(
        keras.optimizers.SGD(learning_rate=0.1, momentum=0.9),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model
