"""Program: measures the links of all workers and writes what this one was told.

Arguments: folder.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import keras_het
from keras_het.asynchronous.exchange.role_choice import measure_link_rates


def main() -> None:
    strategy = keras_het.HeterogeneousStrategy()
    rates = measure_link_rates(strategy)
    Path(sys.argv[1], f"worker_{strategy.worker_index}.json").write_text(json.dumps(rates))


if __name__ == "__main__":
    main()
