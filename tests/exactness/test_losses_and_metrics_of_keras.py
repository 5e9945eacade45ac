"""Every loss and metric of Keras, on replicas and in micro-batches, is one device's or refused.

The lists are read from Keras: a loss or metric of a later version is tried too.
"""

import functools
import inspect
import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from devices import DEVICES
from equivalence import Trial, assert_equivalent, build_seeded, said

from keras_het import HeterogeneousStrategy

pytestmark = pytest.mark.usefixtures("double_precision")
SAMPLES, STEPS, CLASSES = 22, 4, 3
SHARES = ((3, 0, 5), (4, 2, 1))


def classes_of(module, parent):
    return {
        name: kind
        for name, kind in vars(module).items()
        if inspect.isclass(kind) and issubclass(kind, parent)
    }


LOSSES = classes_of(keras.losses, keras.losses.Loss)
METRICS = classes_of(keras.metrics, keras.metrics.Metric)
# What the constructors need.
ARGUMENTS = {
    "IoU": {"num_classes": CLASSES, "target_class_ids": [0, 1], "sparse_y_pred": False},
    "MeanIoU": {"num_classes": CLASSES, "sparse_y_pred": False},
    "OneHotIoU": {"num_classes": CLASSES, "target_class_ids": [0, 1]},
    "OneHotMeanIoU": {"num_classes": CLASSES},
    "BinaryIoU": {"target_class_ids": [0, 1]},
    "MeanMetricWrapper": {"fn": lambda y, p: keras.ops.mean(keras.ops.abs(y - p), axis=-1)},
    "PrecisionAtRecall": {"recall": 0.5},
    "RecallAtPrecision": {"precision": 0.5},
    "SensitivityAtSpecificity": {"specificity": 0.5},
    "SpecificityAtSensitivity": {"sensitivity": 0.5},
    "SparseTopKCategoricalAccuracy": {"k": 2},
    "TopKCategoricalAccuracy": {"k": 2},
}
# Other arguments that make another computation.
VARIANTS = {
    "SparseCategoricalCrossentropy-ignore_class": {"ignore_class": 0},
    "SparseCategoricalCrossentropy-ignore_class-logits": {"ignore_class": -1, "from_logits": True},
    "SparseCategoricalCrossentropy-ignore_class-weighted": {
        "ignore_class": 1,
        "reduction": "mean_with_sample_weight",
    },
    "Dice-axis": {"axis": (1, 2)},
    "Tversky-axis": {"axis": (1, 2)},
    "IoU-ignore_class": {**ARGUMENTS["IoU"], "ignore_class": 2},
    "Dice-axis0": {"axis": 0},
}
IOU = ("MeanIoU", "IoU")
ROUGH = {"CTC": 1e-5}  # computed in float32
OF_MATRICES = ("F1Score", "FBetaScore", "R2Score")
BASES = {"Loss", "Metric"}  # have no values
OF_ONE_VALUE = {"Mean", "Sum"}  # are updated with one argument
COMBINES = r"the loss '(dice|tversky|circle)' combines the samples of its batch"
REFUSED = dict.fromkeys(("Dice", "Tversky", "Circle", "Dice-axis0"), COMBINES)


def kind_of(case):
    """What the targets of a loss or metric are."""
    name = case.partition("-")[0]
    if name in ("CTC", "Circle"):
        return name
    if "logits" in case:
        return "scores"
    if name.startswith("Sparse") or name in (*IOU, "CategoricalGeneralizedCrossEntropy"):
        return "sparse"
    if name.startswith(("Categorical", "OneHot", "TopK", "FBeta", "F1")):
        return "one hot"
    return "binary"


def data(kind, form="sequences"):
    """Sequences, and a target for each of their steps; of embeddings, one for each sequence."""
    random = np.random.default_rng(5)
    x = random.normal(size=(SAMPLES, STEPS, 5))
    if kind == "Circle":
        y = random.integers(0, 3, SAMPLES)
    elif kind == "CTC":
        y = random.integers(1, CLASSES, (SAMPLES, 2))
        y[::2, 1] = 0  # shorter
    elif kind == "binary":
        y = random.integers(0, 2, (SAMPLES, STEPS, 2)).astype("float64")
    else:
        y = random.integers(-1 if kind == "scores" else 0, CLASSES, (SAMPLES, STEPS))
        y = np.eye(CLASSES)[y] if kind == "one hot" else y
    if form == "matrices":
        x, y = x[:, 0], y[:, 0]
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(8)


def model(kind, loss, metrics=None, cls=keras.Model, form="sequences"):
    inputs = keras.Input((5,) if form == "matrices" else (STEPS, 5))
    activation = {"binary": "sigmoid", "sparse": "softmax", "one hot": "softmax"}.get(kind)
    dtype = "float32" if form == "float32" else None
    outputs = keras.layers.Dense(2 if kind == "binary" else CLASSES, activation, dtype=dtype)(
        inputs
    )
    if kind == "Circle":
        outputs = keras.layers.UnitNormalization()(keras.layers.Flatten()(outputs))
    built = cls(inputs, outputs)
    built.compile(keras.optimizers.SGD(0.1), loss, metrics=metrics)
    return built


class UpdatesWithOutputs(keras.Model):
    """Gives the outputs to metrics of one argument."""

    def __init__(self, *args, own=(), **kwargs):
        super().__init__(*args, **kwargs)
        self.own = list(own)

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        for metric in self.own:
            metric.update_state(y_pred)
        return super().compute_metrics(x, y, y_pred, sample_weight)


def with_loss(case):
    name = case.partition("-")[0]
    options = VARIANTS.get(case, ARGUMENTS.get(name, {}))
    return functools.partial(model, kind_of(case), LOSSES[name](**options))


def with_metrics(group):
    """Have all metrics of one kind in one model, named as their cases."""

    def build():
        own, metrics = [], []
        for case in GROUPS[group]:
            name = case.partition("-")[0]
            options = {"name": case, **VARIANTS.get(case, ARGUMENTS.get(name, {}))}
            (own if name in OF_ONE_VALUE else metrics).append(METRICS[name](**options))
        kind, _, form = group.partition(" in ")
        sparse = keras.losses.SparseCategoricalCrossentropy(kind == "scores", ignore_class=-1)
        loss = sparse if kind in ("sparse", "scores") else "mse"
        return model(kind, loss, metrics, functools.partial(UpdatesWithOutputs, own=own), form)

    return build


@functools.cache
def strategy(micro_batch_size):
    return HeterogeneousStrategy(DEVICES[:3], micro_batch_size=micro_batch_size)


def cases(classes):
    plain = [name for name in classes if name not in BASES]
    return plain + [case for case in VARIANTS if case.partition("-")[0] in classes]


@pytest.mark.quick("SparseCategoricalCrossentropy-ignore_class-2", "Dice-2")
@pytest.mark.parametrize("size", [None, 2])
@pytest.mark.parametrize("case", cases(LOSSES))
def test_every_loss(case, size, caplog):
    trial = Trial(with_loss(case), functools.partial(data, kind_of(case)), predict=False)
    if case not in REFUSED:
        rtol = ROUGH.get(case, 1e-9)
        assert_equivalent(trial, SHARES, rtol, rtol / 100, strategy(size))
        assert not said(caplog)
        return
    with strategy(size).scope():
        built = build_seeded(trial.build)
    if size is None:
        built.fit(trial.data(), verbose=0)
        (remark,) = said(caplog)
        assert re.search(REFUSED[case], remark)
    else:
        with pytest.raises(ValueError, match=REFUSED[case]):
            built.fit(trial.data(), verbose=0)
    assert not is_mean_over_samples(case)


def group_of(case):
    name = case.partition("-")[0]
    form = "matrices" if name in OF_MATRICES else "float32" if "TopK" in name else "sequences"
    return f"{kind_of(case)} in {form}"


GROUPS = {}
for each in cases(METRICS):
    if "reduction" in VARIANTS.get(each, {}):  # metrics have none
        continue
    GROUPS.setdefault(group_of(each), []).append(each)


@pytest.mark.full
@pytest.mark.parametrize("group", GROUPS)
def test_every_metric(group, caplog):
    kind, _, form = group.partition(" in ")
    trial = Trial(with_metrics(group), functools.partial(data, kind, form), predict=False)
    rtol = 1e-5 if form == "float32" else 1e-9
    expected = assert_equivalent(trial, SHARES, rtol, rtol / 10, strategy(2))
    assert not said(caplog)
    assert {name.partition("-")[0] for name in GROUPS[group]} <= METRICS.keys()
    assert set(GROUPS[group]) <= expected.history.keys()


def is_mean_over_samples(case):
    """Whether the loss of a batch is the mean of those of its parts: then no refusal is true."""
    x, y = next(iter(data(kind_of(case))))
    built = build_seeded(with_loss(case))
    whole, *parts = (
        float(built.loss(y[rows], built(x[rows]))) for rows in (slice(8), slice(6), slice(6, 8))
    )
    return np.isclose(whole, 0.75 * parts[0] + 0.25 * parts[1], rtol=1e-6)
