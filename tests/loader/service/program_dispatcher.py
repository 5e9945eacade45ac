"""A dispatcher without workers of its own, which runs until it is killed."""

import json
import sys
import threading

import keras_het


def main() -> None:
    settings = json.loads(sys.argv[1])
    keras_het.loader.service(workers=0, port=settings["port"], work_dir=settings["work_dir"])
    print("READY", flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main()
