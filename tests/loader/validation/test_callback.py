"""`DataValidation` in `fit`: before the first step, and what the replicas consume."""

import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

pytest.importorskip(
    "tensorflow_data_validation", reason="needs TFDV: `make test-validation` runs this"
)

import keras_het
from keras_het.callbacks import BatchBalancer, DataValidation, LoaderTuner
from keras_het.launch.command_line import main
from keras_het.loader.validation import (
    DataAnomalyError,
    ShardStatistics,
    infer_schema,
    read_statistics,
    set_comparison_thresholds,
    statistics_of_dataset,
    write_schema,
)

ROWS, BATCH = 104, 16  # the last batch has 8 rows


def samples(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    return random.random((ROWS, 3), np.float32), random.integers(0, 4, ROWS)


def batches(x: Any, y: Any) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)


def schema() -> Any:
    found = infer_schema(
        statistics_of_dataset([samples()], categorical=["label"]), numeric_ranges=True
    )
    return set_comparison_thresholds(found, categorical=0.3, numeric=0.9)


def make_model(strategy: Any = None, **options: Any) -> keras.Model:
    keras.utils.set_random_seed(3)
    with (strategy or tf.distribute.get_strategy()).scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(0.1), loss, **options)
    return model


def two_replicas(devices: tuple[str, ...]) -> Any:
    return keras_het.HeterogeneousStrategy(devices[:2], share_weights=[3, 1])


def spoil(x: np.ndarray, row: int) -> np.ndarray:
    changed = x.copy()
    changed[row] = np.nan
    return changed


def assert_untouched(model: keras.Model, before: list[np.ndarray]) -> None:
    after = [np.asarray(variable) for variable in (*model.variables, *model.optimizer.variables)]
    for old, new in zip(before, after, strict=True):
        np.testing.assert_array_equal(old, new)


def state(model: keras.Model) -> list[np.ndarray]:
    with model.distribute_strategy.scope():
        model.optimizer.build(model.trainable_variables)
    return [np.asarray(variable) for variable in (*model.variables, *model.optimizer.variables)]


@pytest.mark.parametrize("steps_per_execution", [1, 3])
@pytest.mark.parametrize("with_strategy", [False, True])
def test_no_weight_changes_when_an_early_batch_is_wrong(
    with_strategy: bool, steps_per_execution: int, logical_devices: tuple[str, ...]
) -> None:
    strategy = two_replicas(logical_devices) if with_strategy else None
    model = make_model(strategy, steps_per_execution=steps_per_execution)
    x, y = samples()
    before = state(model)
    validation = DataValidation(schema())
    # The last row of the fourth batch: it belongs to the replica with the small share.
    with pytest.raises(DataAnomalyError, match=r"(?s)worker\(s\) \[0\].*x: .*No weight") as caught:
        model.fit(batches(spoil(x, 4 * BATCH - 1), y), verbose=0, callbacks=[validation])
    assert [anomaly.feature for anomaly in caught.value.anomalies] == ["x"]
    assert validation.anomalies == list(caught.value.anomalies)
    assert_untouched(model, before)
    # The model trains on without the callback.
    model.fit(batches(x, y), verbose=0)
    assert any(np.any(a != b) for a, b in zip(before, state(model), strict=True))


class BrokenOff(keras.callbacks.Callback):
    """Ends a training after its first step, as Ctrl-C does."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        raise KeyboardInterrupt


@pytest.mark.parametrize("tunes", ["never", "before", "before and after"])
def test_a_training_that_was_broken_off_leaves_no_batches(tunes: str) -> None:
    weights = []
    for is_plain in (False, True):
        model, tuner = make_model(), LoaderTuner(cooperate_with_other_jobs=False)
        tuners = [tuner] if tunes != "never" else []
        first = [] if is_plain else [*tuners, DataValidation(schema())]
        with pytest.raises(KeyboardInterrupt):
            model.fit(batches(*samples()), verbose=0, callbacks=[*first, BrokenOff()])
        second = [tuner] if tunes == "before and after" and not is_plain else []
        model.fit(batches(*samples(1)), epochs=2, verbose=0, callbacks=second)
        weights.append(model.get_weights())
    for actual, expected in zip(*weights, strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=1e-7)


def test_later_batches_are_not_checked() -> None:
    model = make_model()
    x, y = samples()
    validation = DataValidation(schema(), num_batches_to_check=2)
    model.fit(batches(spoil(x, 2 * BATCH), y), verbose=0, callbacks=[validation])
    assert validation.anomalies == []


def test_labels_that_the_schema_does_not_know() -> None:
    model = make_model()
    x, y = samples()
    with pytest.raises(DataAnomalyError, match="label: Out-of-range values"):
        model.fit(x, y + 3, batch_size=BATCH, verbose=0, callbacks=[DataValidation(schema())])


@pytest.mark.parametrize("with_strategy", [False, True])
def test_weights_of_classes_are_no_new_data(
    with_strategy: bool, logical_devices: tuple[str, ...]
) -> None:
    x, y = samples()
    model = make_model(two_replicas(logical_devices) if with_strategy else None)
    validation = DataValidation(schema(), compare_shards=True)
    weights = {label: label + 1.0 for label in range(4)}
    model.fit(batches(x, y), class_weight=weights, verbose=0, callbacks=[validation])
    assert validation.anomalies == []
    assert int(np.asarray(model.optimizer.iterations)) == 7
    with pytest.raises(DataAnomalyError, match="x: "):
        model.fit(batches(255 * x, y), class_weight=weights, verbose=0, callbacks=[validation])


def test_weights_that_the_schema_knows_are_checked() -> None:
    x, y = samples()
    weighted = [(x, y, np.ones(ROWS, np.float32))]
    known = infer_schema(
        statistics_of_dataset(weighted, categorical=["label"]), numeric_ranges=True
    )
    with pytest.raises(DataAnomalyError, match="sample_weight: Out-of-range values"):
        make_model().fit(
            x,
            y,
            sample_weight=np.full(ROWS, 2.0, np.float32),
            verbose=0,
            callbacks=[DataValidation(known)],
        )


def test_a_warning_in_the_place_of_an_error(caplog: pytest.LogCaptureFixture) -> None:
    model = make_model()
    x, y = samples()
    before = state(model)
    with caplog.at_level(logging.WARNING, "keras_het"):
        validation = DataValidation(schema(), on_anomaly="warn")
        model.fit(batches(255 * x, y), verbose=0, callbacks=[validation])
    assert [record.message for record in caplog.records if "x: Out-of-range" in record.message]
    assert validation.anomalies
    assert any(np.any(a != b) for a, b in zip(before, state(model), strict=True))


@pytest.mark.parametrize(
    ("with_strategy", "compare", "steps_per_execution"),
    [(False, False, 1), (False, True, 3), (True, False, 3), (True, True, 1)],
)
def test_training_is_what_it_is_without(
    with_strategy: bool, compare: bool, steps_per_execution: int, logical_devices: tuple[str, ...]
) -> None:
    def train(callbacks: list[Any]) -> tuple[list[np.ndarray], list[float], Any]:
        strategy = two_replicas(logical_devices) if with_strategy else None
        model = make_model(strategy, steps_per_execution=steps_per_execution)
        x, y = samples()
        data = batches(x, y).shuffle(7, seed=1)
        history = model.fit(
            data, epochs=2, verbose=0, callbacks=callbacks, validation_data=batches(x, y)
        )
        return model.get_weights(), history.history["loss"], model

    weights, losses, _ = train([])
    validated = train([DataValidation(schema(), compare_shards=compare)])
    for expected, actual in zip(weights, validated[0], strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(validated[1], losses, rtol=1e-6)


@pytest.mark.parametrize("number", [1, 2, 4, 5])
def test_epochs_of_unknown_and_small_size(number: int) -> None:
    x, y = samples()

    def generate() -> Any:
        for index in range(number):
            yield x[index : index + 5], y[index : index + 5]

    spec = (tf.TensorSpec([None, 3], tf.float32), tf.TensorSpec([None], tf.int64))
    data = tf.data.Dataset.from_generator(generate, output_signature=spec)
    # Not Adam: Keras's own loop counts a step too many at an end that it does not know.
    model, expected = make_model(), make_model()
    for each in (model, expected):
        each.compile(keras.optimizers.SGD(0.1), each.loss)
    validation = DataValidation(schema(), compare_shards=True)
    model.fit(data, epochs=2, verbose=0, callbacks=[validation])
    expected.fit(data, epochs=2, verbose=0)
    assert int(model.optimizer.iterations) == 2 * number
    for a, b in zip(model.get_weights(), expected.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)


def fit_sorted(callbacks: list[Any], devices: tuple[str, ...], epochs: int = 1) -> np.ndarray:
    """Trains on batches sorted by label, so that the second replica gets the greatest ones."""
    x, y = samples()
    order = np.concatenate(
        [start + np.argsort(y[start : start + BATCH]) for start in range(0, ROWS, BATCH)]
    )
    model = make_model(two_replicas(devices))
    model.fit(batches(x[order], y[order]), epochs=epochs, verbose=0, callbacks=callbacks)
    return y[order]


def test_each_replica_has_the_statistics_of_what_it_consumed(
    logical_devices: tuple[str, ...], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for left_behind in ("epoch-0009-replica-0.stats", "epoch-0001-replica-7.stats"):
        (tmp_path / left_behind).touch()
    validation = DataValidation(schema(), compare_shards=True, directory=tmp_path)
    with caplog.at_level(logging.WARNING, "keras_het"):
        labels = fit_sorted([validation], logical_devices)
    files = {f"epoch-0001-replica-{replica}.stats" for replica in range(2)}
    assert {path.name for path in tmp_path.iterdir()} == files
    # Shares 3:1 of each batch of 16, and of the last one of 8.
    is_second = np.concatenate([[0] * 12 + [1] * 4] * 6 + [[0] * 6 + [1] * 2]).astype(bool)
    frequencies = []
    for replica, own in enumerate((labels[~is_second], labels[is_second])):
        found = read_statistics(tmp_path / f"epoch-0001-replica-{replica}.stats").datasets[0]
        assert found.num_examples == len(own)
        label = next(f for f in found.features if f.path.step[0] == "label").string_stats
        counts = {int(bucket.label): bucket.sample_count for bucket in label.rank_histogram.buckets}
        assert counts == {value: np.sum(own == value) for value in set(own.tolist())}
        frequencies.append([np.mean(own == value) for value in range(4)])
    (distances,) = validation.distances
    label = next(distance for distance in distances if distance.feature == "label")
    assert label.value == pytest.approx(np.abs(np.subtract(*frequencies)).max(), abs=1e-6)
    assert label.is_exceeded
    assert (label.shard, label.reference) == ("replica 1", "replica 0")
    assert "label: L-infinity distance of replica 1 from replica 0" in caplog.text
    assert "x: " not in caplog.text


def test_a_replica_without_a_share_has_no_data_to_be_wrong(
    logical_devices: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    known = schema()
    validation = DataValidation(known, compare_shards=True, directory=tmp_path)
    model = make_model(keras_het.HeterogeneousStrategy(logical_devices[:2], share_weights=[1, 0]))
    model.fit(batches(*samples()), verbose=0, callbacks=[validation])
    write_schema(known, tmp_path / "schema.pbtxt")
    arguments = ["validate", str(tmp_path), "--schema", str(tmp_path / "schema.pbtxt")]
    assert main(arguments) == 0
    output = capsys.readouterr().out
    assert "replica 0: 104 rows, 0 anomalies" in output
    assert "replica 1: 0 rows\n" in output
    # If there is nothing at all, something is wrong.
    (tmp_path / "epoch-0001-replica-0.stats").unlink()
    assert main(arguments) == 1
    assert "No data" in capsys.readouterr().out


class SeenFromOneWorker:
    """As one of two workers has a `tf.distribute.MultiWorkerMirroredStrategy`."""

    num_replicas_in_sync = 2
    extended = SimpleNamespace(worker_devices=("/device:CPU:0",))

    def experimental_local_results(self, value: Any) -> tuple[Any, ...]:
        return (value,)


@pytest.mark.parametrize("strategy", [SeenFromOneWorker(), tf.distribute.get_strategy()])
def test_of_replicas_elsewhere_only_a_strategy_of_ours_tells(strategy: Any) -> None:
    shards = ShardStatistics(strategy, schema=schema())
    for batch in batches(*samples()):
        shards.observe(batch)
    assert shards.rows == ROWS
    assert list(shards.gather()) == [0]


def test_beside_other_callbacks(logical_devices: tuple[str, ...]) -> None:
    validation = DataValidation(schema(), compare_shards=True)
    balancer = BatchBalancer()
    fit_sorted([validation, balancer], logical_devices, epochs=2)
    assert balancer.measurements
    assert len(validation.distances) == 2


@pytest.mark.parametrize("first", [True, False])
def test_the_loader_tuner_still_tunes(first: bool) -> None:
    x, y = samples()
    tuner, validation = LoaderTuner(cooperate_with_other_jobs=False), DataValidation(schema())
    callbacks = [validation, tuner] if first else [tuner, validation]
    make_model().fit(batches(x, y).repeat(5), epochs=2, verbose=0, callbacks=callbacks)
    assert tuner.observe_only_reason is None
    assert validation.anomalies == []
    # The batches that were read ahead are no steps of the pipeline.
    assert tuner.train_input_wait.steps == 2 * 35 - 4


def test_features_of_the_users_own() -> None:
    def parity(batch: Any) -> dict[str, Any]:
        return {"parity": batch[1].numpy() % 2}

    x, y = samples()
    expected = infer_schema(
        statistics_of_dataset(batches(x, 2 * y), features=parity), numeric_ranges=True
    )
    validation = DataValidation(expected, features=parity)
    make_model().fit(batches(x, y // 2 * 2), verbose=0, callbacks=[validation])
    with pytest.raises(DataAnomalyError, match="parity: Out-of-range values"):
        make_model().fit(batches(x, y), verbose=0, callbacks=[validation])


def test_arguments_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match='"raise" or "warn"'):
        DataValidation(schema(), "stop")
    with pytest.raises(ValueError, match=r"at least 1. Received: num_batches_to_check=0"):
        DataValidation(schema(), num_batches_to_check=0)
    with pytest.raises(ValueError, match="Give compare_shards=True"):
        DataValidation(schema(), directory=tmp_path)
    with pytest.raises(ValueError, match="set_comparison_thresholds"):
        DataValidation(infer_schema(statistics_of_dataset([samples()])), compare_shards=True)
    with pytest.raises(ValueError, match="Received: schema=3"):
        DataValidation(3)


def replaces(event: str, at: int | None = None) -> Callable[[keras.Model], Any]:
    def make(model: keras.Model) -> keras.callbacks.Callback:
        def replace(number: int, logs: Any = None) -> None:
            if at in (None, number):
                model.make_train_function(force=True)

        return keras.callbacks.LambdaCallback(**{event: replace})

    return make


def test_another_callback_cannot_take_it_out() -> None:
    model = make_model()
    x, y = samples()
    callbacks = [DataValidation(schema()), replaces("on_train_batch_begin", 0)(model)]
    with pytest.raises(DataAnomalyError):
        model.fit(batches(spoil(x, 1), y), verbose=0, callbacks=callbacks)


class OtherFit(keras.callbacks.Callback):
    """Trains the same model on something else at a batch of each epoch."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch == 1:
            self.model.fit(*samples(2), batch_size=ROWS, verbose=0)


@pytest.mark.parametrize(
    ("make", "is_last"),
    [
        (replaces("on_epoch_begin"), True),
        (replaces("on_train_batch_begin", 0), False),
        (replaces("on_train_batch_begin", 5), False),
        (replaces("on_train_batch_end", 1), False),
        (replaces("on_train_batch_end", 5), True),
        (lambda model: OtherFit(), True),
    ],
)
def test_shards_are_compared_though_the_train_function_is_replaced(
    make: Callable[[keras.Model], Any], is_last: bool, tmp_path: Path
) -> None:
    validation = DataValidation(schema(), compare_shards=True, directory=tmp_path)
    model = make_model()
    other = make(model)
    callbacks = [other, validation] if is_last else [validation, other]
    model.fit(batches(*samples()), epochs=2, verbose=0, callbacks=callbacks)
    of_other = 2 if isinstance(other, OtherFit) else 0
    assert int(np.asarray(model.optimizer.iterations)) == 2 * 7 + of_other
    rows = [
        read_statistics(tmp_path / f"epoch-000{epoch}-replica-0.stats").datasets[0].num_examples
        for epoch in (1, 2)
    ]
    assert rows == [ROWS] * 2
    assert len(validation.distances) == 2
