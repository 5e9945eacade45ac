"""A training of a small model, with callbacks that remember what they have seen."""

import collections
import dataclasses
import hashlib
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from interruption import OfThisProcess
from moments import EPOCHS, STEPS

import keras_het

BATCH = 4
RNG = np.random.default_rng(0)
X = RNG.normal(size=(STEPS * BATCH - 1, 3)).astype("float32")
Y = X.sum(axis=1, keepdims=True) + RNG.normal(size=(len(X), 1)).astype("float32")
VALIDATION = X[:5], -Y[:5]
C = keras.callbacks


class KilledError(Exception):
    pass


class KillAt(OfThisProcess):
    """Fails, or calls `kill`, when one of its methods is called for the n-th time."""

    def __init__(self, method: str, number: int, kill: Callable[[], None] | None = None) -> None:
        super().__init__()
        calls = iter(range(number - 1))

        def count(*_: Any, **__: Any) -> None:
            if next(calls, None) is None:
                if kill is None:
                    raise KilledError
                kill()

        setattr(self, method, count)


@dataclasses.dataclass
class Tracker:
    """An object within a callback."""

    best: float = np.inf
    seen: list[float] = dataclasses.field(default_factory=list)


class Own(C.Callback):
    """A callback as users write it, with all kinds of attributes."""

    def __init__(self, unit: str = "epochs") -> None:
        super().__init__()
        self.unit = unit
        self.count, self.name, self.last = 0, "none", None
        self.losses: list[float] = []
        self.by_epoch: dict[int, tuple[float, ...]] = {}
        self.moments = np.zeros(3)
        self.recent: collections.deque[float] = collections.deque(maxlen=2)
        self.kinds: set[str] = set()
        self.tracker = Tracker()
        self.rng, self.random = np.random.default_rng(3), random.Random(4)
        self.draws: list[float] = []
        self.variable = tf.Variable(0.0)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.count += 1
        self.last = np.float32(batch)
        self.moments += [1, batch, batch**2]
        self.draws = [*self.draws, float(self.rng.normal()), self.random.random()]
        self.variable.assign_add(1.0)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        loss = float(logs["loss"])
        self.losses.append(loss)
        self.by_epoch[epoch] = loss, float(logs["val_loss"])
        self.recent.append(loss)
        self.kinds.add("even" if epoch % 2 == 0 else "odd")
        self.name = f"epoch {epoch}"
        self.tracker.best = min(self.tracker.best, loss)
        self.tracker.seen.append(loss)


class Asked(C.Callback):
    """A callback that says itself what it remembers."""

    def __init__(self) -> None:
        super().__init__()
        self.lock, self._total = threading.Lock(), 0.0

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        with self.lock:
            self._total += float(logs["loss"])

    def get_state(self) -> dict[str, Any]:
        return {"total": self._total}

    def set_state(self, state: dict[str, Any]) -> None:
        self._total = state["total"]


def new_model(optimizer: Callable[[], Any] = lambda: keras.optimizers.Adam(0.3)) -> keras.Model:
    from devices import create_logical_devices

    create_logical_devices()
    keras.utils.set_random_seed(1)  # shuffles take it when they are made, before `fit`
    strategy = keras_het.HeterogeneousStrategy(["CPU:0", "CPU:1"], share_weights=[3, 1])
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1), keras.layers.Dense(1)])
        model.compile(optimizer(), "mse", metrics=["mae", keras.metrics.MeanSquaredError()])
        model.optimizer.build(model.trainable_variables)
    return model


def callbacks_in(folder: Path) -> list[C.Callback]:
    return [
        C.EarlyStopping(monitor="val_loss", patience=3, restore_best_weights=True),
        C.ModelCheckpoint(
            folder / "best.weights.h5", "val_loss", save_best_only=True, save_weights_only=True
        ),
        C.ModelCheckpoint(
            folder / "{epoch}-{batch}.weights.h5", save_freq=3, save_weights_only=True
        ),
        C.ReduceLROnPlateau(monitor="loss", patience=1, factor=0.5, min_delta=0.3),
        C.LearningRateScheduler(lambda epoch, rate: rate * 0.9),
        C.CSVLogger(str(folder / "log.csv")),
        C.TensorBoard(str(folder / "board"), update_freq=2),
        C.TerminateOnNaN(),
        Own(),
        Asked(),
    ]


def fit(
    model: keras.Model,
    folder: Path,
    callbacks: list[C.Callback],
    data: dict[str, Any] | None = None,
    epochs: int = EPOCHS,
) -> dict[str, Any]:
    """Trains a model as a new process would, and returns all that can be seen afterwards."""
    keras.utils.set_random_seed(1)
    rng = np.random.default_rng(5)
    for weight in model.weights:
        weight.assign(rng.normal(size=weight.shape))
    for variable in model.optimizer.variables:
        variable.assign(np.zeros(variable.shape))
    model.optimizer.learning_rate.assign(0.3)
    data = data or {"x": X, "y": Y, "batch_size": BATCH, "validation_data": VALIDATION}
    history = model.fit(**data, epochs=epochs, verbose=0, callbacks=callbacks)
    return seen(model, folder, callbacks, history)


def seen(
    model: keras.Model, folder: Path, callbacks: list[C.Callback], history: C.History
) -> dict[str, Any]:
    own = next((each for each in callbacks if isinstance(each, Own)), None)
    asked = next((each for each in callbacks if isinstance(each, Asked)), None)
    files = sorted(path for path in folder.glob("*.weights.h5"))
    csv = folder / "log.csv"
    return {
        "weights": [weight.tolist() for weight in model.get_weights()],
        "optimizer": [np.asarray(each).tolist() for each in model.optimizer.variables],
        "history": history.history,
        "epochs": history.epoch,
        "rows": csv.read_text() if csv.exists() else None,
        "files": {path.name: contents(path) for path in files},
        "scalars": scalars(folder / "board"),
        "own": plain(own),
        "asked": None if asked is None else asked.get_state(),
    }


def plain(own: Own | None) -> dict[str, Any] | None:
    if own is None:
        return None
    kept = {n: v for n, v in vars(own).items() if n not in ("_model", "params", "rng", "random")}
    kept.update(moments=own.moments.tolist(), variable=float(own.variable.numpy()))
    kept.update(next_draws=(float(own.rng.normal()), own.random.random()))
    return kept


def scalars(board: Path) -> dict[tuple[str, str, int], float]:
    """What TensorBoard shows, but for times: what was written last for a step."""
    found = {}
    for path in sorted(board.rglob("events*"), key=lambda path: path.stat().st_mtime_ns):
        for event in tf.compat.v1.train.summary_iterator(str(path)):
            for value in event.summary.value:
                is_scalar = value.metadata.plugin_data.plugin_name == "scalars"
                if is_scalar and "per_second" not in value.tag:
                    number = float(tf.make_ndarray(value.tensor))
                    found[path.parent.name, value.tag, event.step] = number
    return dict(sorted(found.items()))


def contents(path: Path) -> str:
    import h5py

    found = hashlib.sha256()
    with h5py.File(path) as file:
        file.visititems(
            lambda name, each: found.update(each[()].tobytes()) if hasattr(each, "dtype") else None
        )
    return found.hexdigest()


def drawn_model() -> keras.Model:
    """A new model that has been fitted once: only then does Keras draw an element of a dataset."""
    model = new_model()
    model.fit(X, Y, epochs=1, batch_size=BATCH, verbose=0, validation_data=VALIDATION)
    return model


def undisturbed_training(model: keras.Model, folder: Path) -> dict[str, Any]:
    """What a training ends with that nothing interrupts."""
    found = fit(model, folder, callbacks_in(folder))
    assert len(found["epochs"]) < EPOCHS or EPOCHS == 5
    assert len(found["files"]) >= 5
    return found
