"""Check the data before the first step, and what a fast and a slow worker get of it.

    keras-het run --emulate-speeds 4,1 recipes/validate_data.py
    cd validation && keras-het validate one_after_the_other --schema schema.pbtxt

The first line starts two workers with EMULATED devices of speed 4:1; the slow one gets the last
fifth of each global batch. The second looks at what the first has written. Both need TensorFlow
Data Validation, see docs/guides/data.md.
"""

import argparse
import sys
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from digits import global_batches, load_digits, make_model

import keras_het
from keras_het.callbacks import DataValidation
from keras_het.loader import validation

FAST, SLOW = 48, 12  # Samples of a global batch.


def one_after_the_other(images: np.ndarray, labels: np.ndarray) -> tf.data.Dataset:
    """Concatenate batches from two sources: digits 0 to 4, then 5 to 9."""
    is_low = labels < 5
    low, high = (
        tf.data.Dataset.from_tensor_slices((images[rows], labels[rows])).batch(size, True)
        for rows, size in ((is_low, FAST), (~is_low, SLOW))
    )
    return tf.data.Dataset.zip(low, high).map(
        lambda a, b: (tf.concat([a[0], b[0]], 0), tf.concat([a[1], b[1]], 0))
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--directory", type=Path, default=Path("validation"))
    options = parser.parse_args()

    # The strategy comes first: a worker joins its cluster before it uses TensorFlow.
    strategy = keras_het.HeterogeneousStrategy()
    if strategy.num_workers != 2:
        sys.exit(
            "This recipe compares what a fast and a slow worker get, so it needs two. Received: "
            f"{strategy.num_workers}. Start them: keras-het run --emulate-speeds 4,1 {sys.argv[0]}"
        )
    strategy.set_share_weights([FAST, SLOW])
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = make_model()
    (images, labels), _ = load_digits()

    def say(text: str) -> None:
        if strategy.is_chief:
            print(text, flush=True)

    # What correct data looks like: types, shapes, the ten labels, pixels from 0 to 1.
    statistics = validation.statistics_of_dataset([(images, labels)], categorical=["label"])
    schema = validation.infer_schema(statistics, numeric_ranges=True)
    # Nearly all images have the same darkest and brightest pixels: docs/guides/data.md.
    extremes = {"x/minimum": None, "x/maximum": None}
    validation.set_comparison_thresholds(schema, categorical=0.2, numeric=0.2, of_features=extremes)
    if strategy.is_chief:
        options.directory.mkdir(parents=True, exist_ok=True)
        validation.write_schema(schema, options.directory / "schema.pbtxt")

    say("1. Somebody forgot to scale the pixels:")
    try:
        unscaled = global_batches(16 * images, labels, FAST + SLOW)
        model.fit(unscaled, verbose=0, callbacks=[DataValidation(schema)])
    except validation.DataAnomalyError as error:
        say(f"   {error}".replace("\n", "\n   "))
    say(f"   Steps trained: {int(keras.ops.convert_to_numpy(model.optimizer.iterations))}")

    batches = one_after_the_other(images, labels)
    shuffled = batches.unbatch().shuffle(len(labels), seed=0).batch(FAST + SLOW)
    for number, name, data in ((2, "one_after_the_other", batches), (3, "shuffled", shuffled)):
        say(f"{number}. Two sources, {name.replace('_', ' ')}:")
        watch = DataValidation(schema, compare_shards=True, directory=options.directory / name)
        model.fit(data, verbose=0, callbacks=[watch])
        distances = watch.distances[-1]
        for distance in distances[:1]:
            say(f"   largest distance: {distance}")
        far = sorted({distance.feature for distance in distances if distance.is_exceeded})
        say(f"   the workers' data differs in: {', '.join(far) or 'nothing'}")


if __name__ == "__main__":
    main()
