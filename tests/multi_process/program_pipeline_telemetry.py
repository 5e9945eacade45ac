"""Program: trains in stages over two processes, with and without telemetry.

Argument: folder for the results.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import keras
import numpy as np
from recorded import arrays

import keras_het
from keras_het.planning.pipeline import PipelinePlan, Stage


def main() -> None:
    folder = Path(sys.argv[1])
    # stage 1 lies on both workers
    stages = (Stage(0, 1, (0,), (0,) * 4), Stage(1, 3, (1, 0), (0, 0, 1, 0)))
    plan = PipelinePlan(stages, 4, "1f1b", 0.0, (0.0, 0.0))
    weights = []
    telemetry = keras_het.callbacks.Telemetry(folder / "log")
    for callbacks in ([], [telemetry]):
        strategy = keras_het.PipelineStrategy(plan=plan, num_micro_batches=4, devices=["CPU:0"])
        keras.utils.set_random_seed(7)
        with strategy.scope():
            layers = [keras.layers.Dense(6, "relu"), keras.layers.Dense(3), keras.layers.Dense(1)]
            model = keras.Sequential([keras.Input([5]), *layers])
            model.compile("adam", "mse")
        x, y = arrays(64)
        model.fit(x, y, batch_size=16, epochs=3, verbose=0, shuffle=False, callbacks=callbacks)
        weights.append([weight.tolist() for weight in model.get_weights()])
    recording, measured = telemetry.recording(), strategy.measured_timeline
    assert measured is not None
    result = {
        "same": weights[0] == weights[1],
        "devices": [device.name for device in recording.devices],
        "steps": recording.steps.tolist(),
        "shares": recording.shares.tolist(),
        "least": float(np.min(recording.compute)),
        "passes": [
            [[each.kind, each.stage, each.micro_batch] for each in events]
            for events in measured.events
        ],
        "busy": [measured.busy_seconds(device) for device in range(2)],
        "compute": recording.compute[-1].tolist(),
    }
    (folder / f"worker_{strategy.worker_index}.json").write_text(json.dumps(result))


main()
