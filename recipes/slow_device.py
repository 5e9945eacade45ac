"""See which device is slow and what that costs, then let BatchBalancer fix it.

    keras-het run --emulate-speeds 4,1 recipes/slow_device.py
    keras-het run --emulate-speeds 4,1 recipes/slow_device.py --balance
    tensorboard --logdir logs

The first line trains on two workers with EMULATED devices of speed 4:1 and prints the verdict; the
second does what the verdict says. Both write a run into logs, for TensorBoard's tab
"Heterogeneous" and for `keras-het report logs`.
"""

import argparse
from pathlib import Path

import keras
from digits import global_batches, load_digits, make_model

import keras_het

BATCH_SIZE = 64  # Over all workers.


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--balance", action="store_true", help="add BatchBalancer")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--logs", type=Path, default=Path("logs"), help="directory of the logs")
    options = parser.parse_args()

    strategy = keras_het.HeterogeneousStrategy()
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = make_model()
    train_data, _ = load_digits()
    run = "balanced" if options.balance else "even"
    # Every worker has the same callbacks; only the chief prints and writes.
    callbacks = [keras_het.callbacks.Telemetry(options.logs / run, verbose=1)]
    if options.balance:
        callbacks.append(keras_het.callbacks.BatchBalancer())
    history = model.fit(
        global_batches(*train_data, BATCH_SIZE),
        epochs=options.epochs,
        callbacks=callbacks,
        verbose=2 if strategy.is_chief else 0,
    )
    if strategy.is_chief:
        print(f"{run}: {history.history['samples_per_second'][-1]:.0f} samples/s in the last epoch")


if __name__ == "__main__":
    main()
