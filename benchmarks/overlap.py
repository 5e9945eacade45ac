"""What a step takes when gradients travel while others are still computed.

    python benchmarks/overlap.py [--json FILE] [--quick] [--rates 500 100] [--cases mlp] ...

Workers on hosts of their own (network namespaces with limited links and jumbo frames, see
`_namespaces.py`) train by `fit`, each on one thread.

Modes:

* `alone`: no other worker; all processes compute side by side anyway.
* `one bucket`: `HeterogeneousStrategy`, all gradients in one sum behind the backward pass.
* `buckets of N MB`: `CommunicationOptions(bytes_per_pack=...)`.
* `size by measurement`: `BucketTuner`, after its trial; `chosen_bytes` are what it chose.
* `bfloat16`, `float16`: `communication_dtype`, at once or in buckets.
* `powersgd rank 4`: `powersgd_rank`.
* `MultiWorkerMirrored`: TensorFlow's strategy in its guide's custom loop.
* `DDP`, `DDP in buckets of 1 MB`: the same models and batches in PyTorch, under
  DistributedDataParallel over gloo, by default in buckets of 25 MB. `DDP alone`: without it.
  They need a Python that has torch: `make .venv-torch/installed`, or `--torch-python PATH`.

The case `digits` trains scikit-learn's digits to the end, with several seeds. `loss_ratio` is the
mean of the loss of the last epoch over that of `one bucket`.

`bound_ms` is the longer one of `alone` and the wire: 2 (W - 1) / W of the gradients' bytes at the
link's rate. `ratio_to_bound` is the median of the blocks' medians, over it. Modes take turns.
The two libraries do not compute equally fast: DDP has a bound of its own, with `DDP alone`.
`ratio_to_ddp` divides `ratio_to_bound` by that of DDP's better mode: below 1, ours is closer to its
bound. A step's own time over DDP's is another number: compare `step_ms`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

# Megabytes in a bucket, and the type and the rank in which gradients travel.
MODES: dict[str, tuple[float, str | None, int | None]] = {
    "alone": (0.0, None, None),
    "one bucket": (0.0, None, None),
    "buckets of 1 MB": (1.0, None, None),
    "buckets of 4 MB": (4.0, None, None),
    "size by measurement": (0.0, None, None),
    "bfloat16": (0.0, "bfloat16", None),
    "bfloat16 in buckets of 1 MB": (1.0, "bfloat16", None),
    "float16": (0.0, "float16", None),
    "powersgd rank 4": (0.0, None, 4),
    "MultiWorkerMirrored": (0.0, None, None),
    "DDP alone": (0.0, None, None),
    "DDP": (25.0, None, None),
    "DDP in buckets of 1 MB": (1.0, None, None),
}
TUNED = "size by measurement"
DDP = tuple(mode for mode in MODES if mode.startswith("DDP"))
ALONE = ("alone", "DDP alone")
CASES = ("mlp", "convnet", "transformer", "digits")
DIGITS_MODES = ("one bucket", "bfloat16", "float16", "powersgd rank 4")
DIGITS_EPOCHS, DIGITS_SEEDS = 40, 3
RATES = (10_000.0, 1_000.0, 500.0, 100.0)
JUMBO = 9000
STEPS, WARM_UP = 14, 4
TRIAL_STEPS = 5
RATIOS = ("ratio_to_bound", "ratio_to_ddp")
COLUMNS = ("case", "workers", "mbit", "mode", "step_ms", "bound_ms", *RATIOS)
TORCH_PYTHON = Path(__file__).parents[1] / ".venv-torch/bin/python"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--quick", action="store_true", help="one case of two modes: form only")
    parser.add_argument("--rates", type=float, nargs="+", default=RATES, help="Mbit/s")
    parser.add_argument("--cases", nargs="+", default=CASES, choices=CASES)
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=MODES)
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--blocks", type=int, default=3)
    parser.add_argument("--torch-python", type=Path, default=TORCH_PYTHON, metavar="PATH")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(**json.loads(options.worker))
        return
    from _namespaces import why_not
    from _report import environment, print_table, write_report

    if (reason := why_not()) is not None:
        rows = [{**dict.fromkeys(COLUMNS), "case": "all", "skipped": reason}]
        write_report("overlap", rows, options.json, environment())
        return
    if options.quick:
        options.rates, options.cases, options.workers, options.blocks = [500.0], ["mlp"], [2], 1
        options.modes = ["alone", "buckets of 1 MB"]
    rows, about = list[dict[str, Any]](), environment()
    if peers := [mode for mode in options.modes if mode in DDP]:
        about["torch"], reason = _torch_version(options.torch_python)
        if reason is not None:
            print(f"skipped: {', '.join(peers)}: {reason}", flush=True)
            options.modes = [mode for mode in options.modes if mode not in DDP]
            empty = {**dict.fromkeys(COLUMNS), "loss_ratio": None, "case": "all"}
            rows += [{**empty, "mode": mode, "skipped": reason} for mode in peers]
    for case in options.cases:
        if case == "digits":
            rows += measure_losses()
            continue
        for num_workers in options.workers:
            for rate in options.rates if options.modes else ():
                rows += measure(
                    case, num_workers, rate, options.modes, options.blocks, options.torch_python
                )
                print(*rows[-len(options.modes) :], sep="\n", flush=True)
    print_table(rows, [*COLUMNS, "loss_ratio"])
    write_report("overlap", rows, options.json, about)


def _torch_version(python: Path) -> tuple[str | None, str | None]:
    """Return the version of PyTorch that a Python has, or why it has none."""
    command = [str(python), "-c", "import torch.distributed; print(torch.__version__)"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    except OSError as error:
        return None, f"{error}; `make .venv-torch/installed`, or name a Python by --torch-python"
    if done.returncode:
        return None, f"{python} has no torch: {done.stderr.strip().splitlines()[-1]}"
    return done.stdout.strip(), None


def measure(
    case: str,
    num_workers: int,
    mbit: float,
    modes: list[str],
    blocks: int,
    torch_python: Path = TORCH_PYTHON,
) -> list[dict[str, Any]]:
    """Return the rows of one model on links of one rate."""
    from _namespaces import limited_hosts

    found: dict[str, list[float]] = {mode: [] for mode in modes}
    sizes, chosen = set(), list[int]()
    with limited_hosts([mbit] * num_workers, JUMBO) as hosts:
        for block in range(blocks):
            for mode in modes:
                python = str(torch_python if mode in DDP else sys.executable)
                written = _block(hosts, case, num_workers, mode, block, python)
                found[mode].append(written["seconds"])
                sizes.add((int(written["bytes"]), int(written["batch"])))
                if mode == TUNED:
                    chosen.append(int(written["chosen"]))
    if len(sizes) > 1:
        sys.exit(f"{case}: bytes and samples differ between modes: {sorted(sizes)}")
    rows = rows_of(case, num_workers, mbit, found, sizes.pop()[0])
    for row in rows:
        if row["mode"] == TUNED:
            row["chosen_bytes"] = chosen
    return rows


def rows_of(
    case: str, num_workers: int, mbit: float, found: dict[str, list[float]], size: int
) -> list[dict[str, Any]]:
    """Return a row for each mode from the seconds of its blocks and the bytes of the gradients."""
    medians = {mode: 1e3 * statistics.median(each) for mode, each in found.items()}
    wire = 2 * (num_workers - 1) / num_workers * size * 8 / mbit / 1e3
    alone = [medians.get(mode, 0.0) for mode in ALONE]
    bounds = {mode: max(alone[mode in DDP], wire) for mode in medians}
    ratios = {mode: median / bounds[mode] for mode, median in medians.items()}
    peers = [ratios[mode] for mode in DDP if mode in ratios and mode not in ALONE]
    best = min(peers) if peers and all(alone) else None
    return [
        {
            "case": case,
            "workers": num_workers,
            "mbit": mbit,
            "mode": mode,
            "step_ms": round(medians[mode], 2),
            "lowest_ms": round(1e3 * min(found[mode]), 2),
            "highest_ms": round(1e3 * max(found[mode]), 2),
            "wire_ms": round(wire, 2),
            "bound_ms": round(bounds[mode], 2),
            "ratio_to_bound": round(ratios[mode], 3),
            "ratio_to_ddp": round(ratios[mode] / best, 3) if best and mode not in ALONE else None,
            "loss_ratio": None,
        }
        for mode in found
    ]


def measure_losses() -> list[dict[str, Any]]:
    """Return a row for each type, from two workers."""
    from _namespaces import limited_hosts

    found: dict[str, list[float]] = {mode: [] for mode in DIGITS_MODES}
    with limited_hosts([10_000.0] * 2, JUMBO) as hosts:
        for seed in range(DIGITS_SEEDS):
            for mode in DIGITS_MODES:
                found[mode].append(_block(hosts, "digits", 2, mode, seed)["loss"])
    means = {mode: statistics.mean(losses) for mode, losses in found.items()}
    empty = dict.fromkeys(("mbit", "step_ms", "bound_ms", *RATIOS))
    rows = []
    for mode, losses in found.items():
        row = {"case": "digits", "workers": 2, "mode": mode, **empty}
        row["loss_ratio"] = round(means[mode] / means["one bucket"], 4)
        rows.append({**row, "losses": [round(loss, 5) for loss in losses]})
        print(rows[-1], flush=True)
    return rows


def _block(
    hosts: Any, case: str, num_workers: int, mode: str, seed: int, python: str = sys.executable
) -> dict[str, float]:
    """Run one mode once; return what the chief found."""
    addresses = [f"{hosts.address(index)}:{7000 + seed}" for index in range(num_workers)]
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result"
        started = []
        for index in range(num_workers):
            task = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
            config = {"TF_CONFIG": "" if mode in ALONE else json.dumps(task)}
            # with one between operations, the ring would wait for the backward pass
            threads = {"TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "4"}
            quiet = {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "", **threads}
            about: dict[str, Any] = {"case": case, "mode": mode, "seed": seed}
            about["result"] = str(result) if index == 0 else ""
            about["started"] = [f"{folder}/started{each}" for each in range(num_workers)]
            about["index"] = index
            command = [python, __file__, "--worker", json.dumps(about)]
            with (Path(folder) / f"output{index}").open("w") as output:
                started.append(
                    subprocess.Popen(
                        hosts.command(index, command),
                        env={**os.environ, **quiet, "OMP_NUM_THREADS": "1", **config},
                        stdout=output,
                        stderr=subprocess.STDOUT,
                    )
                )
        try:
            for process in started:
                process.wait(timeout=300)
        finally:
            for process in started:
                process.kill()
        if not result.exists():
            sys.exit((Path(folder) / "output0").read_text()[-5000:])
        return dict(json.loads(result.read_text()))


def work(case: str, mode: str, seed: int, result: str, started: list[str], index: int) -> None:
    """Train as one worker."""
    if mode in DDP:
        from _overlap_torch import train

        _wait_for_all(started, index)
        found = train(case, MODES[mode][0], STEPS, WARM_UP)
        if result:
            _write(Path(result), found)
        return
    import keras
    import numpy as np
    import tensorflow as tf

    import keras_het

    if not os.environ["TF_CONFIG"]:
        del os.environ["TF_CONFIG"]
    is_stock = mode == "MultiWorkerMirrored"
    if is_stock:
        strategy = tf.distribute.MultiWorkerMirroredStrategy()
    else:
        megabytes, dtype, rank = MODES[mode]
        size = int(2**20 * megabytes)
        options = tf.distribute.experimental.CommunicationOptions(bytes_per_pack=size)
        strategy = keras_het.HeterogeneousStrategy(
            communication_options=options, communication_dtype=dtype, powersgd_rank=rank
        )
    num_replicas = strategy.num_replicas_in_sync
    keras.utils.set_random_seed(seed)
    if case == "digits":
        loss = _loss_of_digits(strategy)
        if result:
            _write(Path(result), {"loss": loss})
        return
    with strategy.scope():
        model, x, y = build(keras, np, case, num_replicas)
        model.compile("sgd", "mse", jit_compile=False)
    batch = len(x) // num_replicas
    data = tf.data.Dataset.from_tensors((x, y)).repeat(STEPS)
    _wait_for_all(started, index)
    if is_stock:
        seconds = _custom_loop(tf, strategy, model, data)
    else:
        times = [time.perf_counter()]

        class Note(keras.callbacks.Callback):
            def on_train_batch_end(self, batch: int, logs: object = None) -> None:
                times.append(time.perf_counter())

        callbacks: list[Any] = [Note()]
        if mode == TUNED:
            callbacks.insert(0, tuner := keras_het.callbacks.BucketTuner(steps=TRIAL_STEPS))
            while tuner.size is None:
                model.fit(data, epochs=7, verbose=0, callbacks=[tuner])
            times[:] = [time.perf_counter()]
        model.fit(data, epochs=1, verbose=0, callbacks=callbacks)
        seconds = statistics.median(np.diff(times)[WARM_UP:])
    if result:
        size = sum(4 * int(np.prod(each.shape)) for each in model.trainable_weights)
        chosen = tuner.size if mode == TUNED else 0
        about = {"seconds": float(seconds), "bytes": size, "batch": batch, "chosen": chosen}
        _write(Path(result), about)
    sys.stdout.flush()
    if is_stock:
        os._exit(0)  # its threads would wait for the other worker


def _wait_for_all(started: list[str], index: int) -> None:
    """Let those that train alone share the cores from their first step to their last."""
    Path(started[index]).touch()
    while not all(Path(each).exists() for each in started):
        time.sleep(0.01)


def _write(path: Path, found: dict[str, float]) -> None:
    path.with_suffix(".tmp").write_text(json.dumps(found))
    path.with_suffix(".tmp").rename(path)


def _loss_of_digits(strategy: Any) -> float:
    """Train to the end; return the loss of the last epoch."""
    import keras
    import sklearn.datasets

    digits = sklearn.datasets.load_digits()
    with strategy.scope():
        inner = [keras.layers.Dense(64, "relu") for _ in range(2)]
        model = keras.Sequential([keras.Input((64,)), *inner, keras.layers.Dense(10)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(1e-3), loss, jit_compile=False)
    x, y = (digits.data / 16).astype("float32"), digits.target
    history = model.fit(x, y, batch_size=64, epochs=DIGITS_EPOCHS, verbose=0)
    return float(history.history["loss"][-1])


def build(keras: Any, np: Any, case: str, num_replicas: int) -> tuple[Any, Any, Any]:
    """Return a model, and a global batch whose share computes for some 100 ms on one core."""
    layers = keras.layers
    random = np.random.default_rng(0)
    if case == "mlp":  # 2.2 million parameters
        inner = [layers.Dense(1024, "relu") for _ in range(3)]
        model = keras.Sequential([keras.Input((64,)), *inner, layers.Dense(1)])
        x = random.normal(size=(800 * num_replicas, 64)).astype("float32")
    elif case == "convnet":  # 10.2 million, most of them in two dense layers
        inner = []
        for filters in (32, 64, 128, 256):
            inner += [layers.Conv2D(filters, 3, padding="same", activation="relu")]
            inner += [layers.MaxPooling2D()]
        head = [layers.Flatten(), layers.Dense(4096, "relu"), layers.Dense(1400, "relu")]
        model = keras.Sequential([keras.Input((32, 32, 3)), *inner, *head, layers.Dense(1)])
        x = random.normal(size=(24 * num_replicas, 32, 32, 3)).astype("float32")
    else:  # 3.2 million
        values = inputs = keras.Input((32, 256))
        for _ in range(4):
            mixed = layers.MultiHeadAttention(4, 64)(values, values)
            values = layers.LayerNormalization()(values + mixed)
            wide = layers.Dense(256)(layers.Dense(1024, "relu")(values))
            values = layers.LayerNormalization()(values + wide)
        model = keras.Model(inputs, layers.Dense(1)(layers.Flatten()(values)))
        x = random.normal(size=(8 * num_replicas, 32, 256)).astype("float32")
    y = random.normal(size=(len(x), 1)).astype("float32")
    return model, x, y


def _custom_loop(tf: Any, strategy: Any, model: Any, data: Any) -> float:
    """Train as TensorFlow's guide does; return the median seconds of a step."""
    import keras

    num_samples = int(data.element_spec[0].shape[0])

    def step(batch: Any) -> Any:
        x, y = batch
        with tf.GradientTape() as tape:
            losses = keras.ops.square(model(x, training=True) - y)
            loss = tf.nn.compute_average_loss(losses[:, 0], global_batch_size=num_samples)
        gradients = tape.gradient(loss, model.trainable_variables)
        model.optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    @tf.function
    def distributed(batch: Any) -> Any:
        losses = strategy.run(step, args=(batch,))
        return strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)

    seconds = []
    for batch in strategy.experimental_distribute_dataset(data):
        began = time.perf_counter()
        float(distributed(batch))
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[WARM_UP:])


if __name__ == "__main__":
    main()
