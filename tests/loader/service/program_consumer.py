"""A consumer of a data service: writes each number that it got, waiting between two batches."""

import json
import sys
import threading

import tensorflow as tf

import keras_het

device = threading.Event()


def main() -> None:
    settings = json.loads(sys.argv[1])
    dataset = tf.data.Dataset.range(settings["samples"]).map(lambda number: number * 1)
    dataset = dataset.batch(settings["batch"])
    data = keras_het.loader.service(settings["address"])
    shared = data.distribute(
        dataset, job="test", max_outstanding_requests=settings.get("requests", 1)
    )
    print("READY", flush=True)
    sys.stdin.readline()  # all begin together
    for epoch in range(settings.get("epochs", 1)):
        for batch in shared:
            print("GOT", epoch, *batch.numpy(), flush=True)
            device.wait(settings["seconds"])  # what the device takes for a batch
    print("END", flush=True)


if __name__ == "__main__":
    main()
