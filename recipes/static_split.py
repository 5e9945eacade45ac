"""Split every global batch by hand, in proportion to the devices' speeds.

    keras-het run --emulate-speeds 4,2,1 recipes/static_split.py
    python recipes/static_split.py

The first line starts three workers with EMULATED devices of speed 4:2:1, the second trains on this
machine alone. Both print the same numbers. On real machines, start the same script on each of them
with its TF_CONFIG.
"""

import argparse

import keras
from digits import global_batches, load_digits, make_model

import keras_het

BATCH_SIZE = 56  # Over all workers: 32 + 16 + 8 for shares 4:2:1.


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shares", default="4,2,1", help="one a worker (default: 4,2,1)")
    parser.add_argument("--epochs", type=int, default=3)
    options = parser.parse_args()

    # The strategy comes first: a worker joins its cluster before it uses TensorFlow.
    strategy = keras_het.HeterogeneousStrategy()
    if strategy.num_workers > 1:
        # Same as HeterogeneousStrategy(share_weights=[4, 2, 1]); set here so one device can run it
        # too.
        strategy.set_share_weights([float(share) for share in options.shares.split(",")])

    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = make_model()
    train_data, test_data = load_digits()
    # Batches of the global size on every worker; the strategy gives each its share of them.
    model.fit(
        global_batches(*train_data, BATCH_SIZE),
        epochs=options.epochs,
        # All workers know the same numbers; it is enough for one of them to print.
        verbose=2 if strategy.is_chief else 0,
    )
    results = model.evaluate(global_batches(*test_data, BATCH_SIZE), verbose=0, return_dict=True)
    if strategy.is_chief:
        print(f"test loss {results['loss']:.5f}, test accuracy {results['accuracy']:.4f}")


if __name__ == "__main__":
    main()
