"""A whole `fit` of a sync group of one worker, in this process; its async worker never comes."""

import functools
import json
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf
from addresses import free_address
from small_training import BATCH, NUM_BATCHES, SAMPLES, arrays, data, flat, make_model

import keras_het
from keras_het.asynchronous.parameter_service.client import RemoteChannel
from keras_het.asynchronous.parameter_service.sample_ledger import LedgerConnection
from keras_het.callbacks import AsyncWorkers, BatchBalancer
from keras_het.exchange.server import Server
from keras_het.fit.session import FitSession, Rank
from keras_het.rules import AsyncEASGD, AsyncSGD, DelayCompensated, Delta


def mean_gradient(model, batches):
    kernel, bias = (np.array(weight) for weight in model.get_weights())
    x, y = (array[: batches * BATCH] for array in arrays())
    errors = x @ kernel + bias - y
    return np.append(2 * x.T @ errors / len(x), 2 * errors.mean())


class Acts(keras.callbacks.Callback):
    def __init__(self, act, step=1):
        super().__init__()
        self.act, self.step = act, step
        self.used = None

    def on_train_batch_end(self, batch, logs=None):
        if batch == self.step:
            self.act(self.model)


class Used(keras.callbacks.Callback):
    """Notes what the service counted, and pushed with how many samples."""

    def __init__(self, hybrid):
        super().__init__()
        self.hybrid = hybrid
        self.samples, self.total = [], None

    def on_epoch_end(self, epoch, logs=None):
        self.total = self.hybrid.samples_used

    def on_epoch_begin(self, epoch, logs=None):
        self.center = self.hybrid._participant.center
        client = self.center.engine.exchange.transport
        push = client.start_push

        def push_and_note(changes, versions, samples, sequence):
            self.samples.append(samples)
            return push(changes, versions, samples, sequence)

        client.start_push = push_and_note


@pytest.mark.parametrize("given", [None, "CallbackList", "settings"])
@pytest.mark.quick("None")
def test_a_job_async_is_enough(strategy, capsys, given):
    model, found = make_model(strategy), []

    class Finds(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            callbacks = FitSession.of(model).callbacks
            hybrids = [each for each in callbacks if isinstance(each, AsyncWorkers)]
            found.extend(each._participant.options for each in hybrids)

    callbacks = [Finds()]
    if given == "settings":
        callbacks.append(AsyncWorkers(period=5))
    elif given == "CallbackList":
        callbacks = keras.callbacks.CallbackList(callbacks, True, model=model, epochs=1)
    model.fit(data(), epochs=1, verbose=0, callbacks=callbacks)
    (options,) = found
    assert options.adapts_period == (given != "settings")
    told = capsys.readouterr().out.count("this fit trains as with AsyncWorkers()")
    assert told == (given != "settings")
    assert strategy.extended.data_path.claims_source is None
    model.evaluate(data(), verbose=0)  # trains nothing
    assert "AsyncWorkers" not in capsys.readouterr().out


@pytest.mark.full
@pytest.mark.parametrize("epochs", [1, 2])
def test_gradients_of_a_training_shorter_than_a_period_count(strategy, epochs):
    model = make_model(strategy)
    before, gradient = flat(model), mean_gradient(model, NUM_BATCHES)
    rule = AsyncSGD(0.1)
    hybrid = AsyncWorkers(rule, period=100)
    model.fit(data(), epochs=epochs, verbose=0, callbacks=[hybrid])
    np.testing.assert_allclose(before - flat(model), 0.1 * gradient, rtol=1e-4, atol=1e-6)
    assert isinstance(model.optimizer, keras.optimizers.SGD)


def padded():
    rows = tf.data.Dataset.from_tensor_slices(arrays()).shuffle(SAMPLES, seed=1)
    return rows.padded_batch(BATCH, drop_remainder=True)


@pytest.mark.parametrize(
    ("hybrid", "given", "match"),
    [
        # Keras has looked at its first element: everybody would train the whole first epoch
        ({}, lambda: {"x": padded()}, "reshuffle_each_iteration=False"),
        ({}, lambda: {"x": data(), "steps_per_epoch": 2}, "steps_per_epoch=2, and data with 6"),
        (
            {},
            lambda: {"x": tf.sparse.from_dense(arrays()[0]), "y": arrays()[1]},
            "Received: arrays that are not all dense",
        ),
        # the bound of answers that travel
        ({"rule": AsyncEASGD(0.9), "period": 8}, lambda: {"x": data()}, "8 steps of 0.1"),
        (
            {"rule": AsyncEASGD(0.9), "period": "auto"},
            lambda: {"x": data()},
            "any number of steps of 0.1",
        ),
    ],
    ids=["first pass", "shorter epochs", "sparse", "moving rate", "moving rate at any period"],
)
def test_a_fit_is_refused(strategy, hybrid, given, match):
    with pytest.raises(ValueError, match=match):
        make_model(strategy).fit(**given(), verbose=0, callbacks=[AsyncWorkers(**hybrid)])


def test_averages_of_weights_are_refused(strategy):
    model = make_model(strategy, functools.partial(keras.optimizers.SGD, use_ema=True))
    with pytest.raises(ValueError, match="use_ema"):
        model.fit(data(), verbose=0, callbacks=[AsyncWorkers()])


class Half(Delta):
    def update(self, center, slots, change, meta):
        return super().update(center, slots, change / 2, meta)


def strategy_of(monkeypatch, task, **cluster):
    cluster = {job: [free_address() for _ in range(number)] for job, number in cluster.items()}
    task = {"type": task, "index": 0}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": task}))
    monkeypatch.setenv("KERAS_HET_SECRET", "a secret that only tests know")
    return keras_het.HeterogeneousStrategy()


GROUP_AND_SERVICE = {"worker": 1, "ps": 1, "async": 1}
TWO_SERVICES = {"ps": 2, "async": 1}


@pytest.mark.quick("cluster1-worker-sharded", "cluster4-async-auto")
@pytest.mark.parametrize(
    ("cluster", "task", "service"),
    [
        (GROUP_AND_SERVICE, "worker", "auto"),
        (GROUP_AND_SERVICE, "worker", "sharded"),
        (GROUP_AND_SERVICE, "async", "auto"),
        (GROUP_AND_SERVICE, "async", "sharded"),
        (TWO_SERVICES, "async", "auto"),
        (TWO_SERVICES, "ps", "auto"),
    ],
)
def test_an_own_rule_is_refused_on_tasks_that_run_no_script(
    monkeypatch, logical_devices, cluster, task, service
):
    strategy = strategy_of(monkeypatch, task, **cluster)
    hybrid = AsyncWorkers(Half(), service_placement=service)
    with pytest.raises(ValueError, match=r"Received: the rule Half, .* and \S+ of the job ps"):
        make_model(strategy).fit(data(), verbose=0, callbacks=[hybrid])


@pytest.mark.full
@pytest.mark.parametrize("service", ["auto", "sharded"])
def test_an_own_rule_trains_where_the_script_runs(strategy, service):
    model = make_model(strategy)
    before = flat(model)
    model.fit(data(), verbose=0, callbacks=[AsyncWorkers(Half(), service_placement=service)])
    assert np.abs(before - flat(model)).min() > 1e-3


class ReadsAhead(keras.callbacks.Callback):
    """Reads the first batches before it lets them be trained, as `DataValidation` does."""

    def __init__(self, number):
        super().__init__()
        self.number, self.waiting = number, []

    def on_train_begin(self, logs=None):
        FitSession.of(self.model).add_layer(Rank.VALIDATE_DATA, self.step)

    def step(self, step, iterator):
        self.waiting += [next(iterator) for _ in range(self.number)]
        self.number = 0
        if not self.waiting:
            return step(iterator)
        batch, *self.waiting = self.waiting
        return step([batch])


BESIDE = {  # what else takes samples
    "predict": lambda both: [Acts(lambda model: model.predict(arrays()[0], verbose=0), 0)],
    "evaluate": lambda both: [Acts(lambda model: model.evaluate(both, verbose=0), 0)],
    "another model's fit": lambda both: [
        Acts(lambda model: make_model(model.distribute_strategy).fit(data(), verbose=0))
    ],
    "one read ahead": lambda both: [ReadsAhead(1)],
    "three read ahead": lambda both: [BatchBalancer(), ReadsAhead(3)],
}


@pytest.mark.quick("predict-delta")
@pytest.mark.parametrize("rule", ["delta", AsyncSGD(0.1)])
@pytest.mark.parametrize("beside", BESIDE)
def test_samples_count_when_they_are_trained_and_no_others(strategy, beside, rule):
    model, both = make_model(strategy), strategy.distribute(data())
    hybrid = AsyncWorkers(rule, period=2)
    used = Used(hybrid)
    model.fit(both, verbose=0, callbacks=[hybrid, used, *BESIDE[beside](both)])
    assert used.center.ledger.used.tolist() == used.total == [SAMPLES, 0]
    assert hybrid.samples_used is None
    assert [samples for samples in used.samples if samples] == [2 * BATCH] * 3


def interrupt(model):
    raise KeyboardInterrupt


def fail(model):
    raise ValueError("elsewhere")


def interrupt_next_step(model):
    path = model.distribute_strategy.extended.data_path

    def on_step(*step, **new):
        del path.on_step
        raise KeyboardInterrupt

    path.on_step = on_step


def fit_within(model):
    model.fit(*arrays(), batch_size=SAMPLES, verbose=0)


ERRORS = {  # where, what, and the error
    "before the first step": ("on_epoch_begin", interrupt, KeyboardInterrupt),
    "in a step": ("on_epoch_begin", interrupt_next_step, KeyboardInterrupt),
    "in a step before a balancer": ("on_epoch_begin", interrupt_next_step, KeyboardInterrupt),
    "interrupted callback": ("on_train_batch_end", interrupt, KeyboardInterrupt),
    "callback": ("on_train_batch_end", fail, ValueError),
    "callback of validation": ("on_test_batch_end", fail, ValueError),
    "fit within": ("on_train_batch_end", fit_within, RuntimeError),
}
MESSAGES = {RuntimeError: "fit of the same model within a callback", ValueError: "elsewhere"}


@pytest.mark.full
@pytest.mark.parametrize("rule", ["delta", AsyncSGD(0.1)])
@pytest.mark.parametrize("name", ERRORS)
def test_an_error_ends_the_service_and_a_fit_after_it_trains(strategy, name, rule):
    """While the error is kept, which holds what the `fit` had."""
    place, act, error = ERRORS[name]
    model, hybrid = make_model(strategy), AsyncWorkers(rule, period=2)
    optimizer, fails = model.optimizer, keras.callbacks.Callback()
    setattr(fails, place, lambda number, logs=None: act(model))
    others = [BatchBalancer()] if "balancer" in name else []
    callbacks = [hybrid, *others, fails]
    with pytest.raises(error, match=MESSAGES.get(error)) as kept:
        model.fit(data(), validation_data=data(), verbose=0, callbacks=callbacks)
    for thread in threading.enumerate():
        if thread.name == "keras_het-fit":
            thread.join(60)
            assert not thread.is_alive()
    assert hybrid._participant is None and model.optimizer is optimizer
    server = Server(strategy.extended.cluster_config.service_address())  # nobody listens there
    server.start()
    server.close()
    before, gradient = flat(model), mean_gradient(model, NUM_BATCHES)
    model.fit(*arrays(), batch_size=SAMPLES, verbose=0)
    np.testing.assert_allclose(before - flat(model), 0.1 * gradient, rtol=1e-4, atol=1e-6)
    before = flat(model)
    model.fit(data(), verbose=0, callbacks=[AsyncWorkers(rule, period=2)])
    assert model.optimizer is optimizer
    assert np.abs(before - flat(model)).min() > 1e-3
    assert kept.traceback


@pytest.mark.full
@pytest.mark.parametrize("shuffle", [True, False])
def test_arrays_train_as_a_dataset_of_them(strategy, shuffle):
    x, y = arrays()
    rows = tf.data.Dataset.from_tensor_slices((x, y))
    models = [make_model(strategy) for _ in range(2)]
    options = {"epochs": 2, "verbose": 0}
    models[0].fit(x, y, batch_size=BATCH, shuffle=shuffle, callbacks=[AsyncWorkers()], **options)
    rows = rows.shuffle(SAMPLES, seed=0) if shuffle else rows
    models[1].fit(rows.batch(BATCH), callbacks=[AsyncWorkers()], **options)
    assert np.array(models[0].optimizer.iterations) == 2 * NUM_BATCHES
    np.testing.assert_array_equal(*map(flat, models))


@pytest.mark.parametrize(
    ("rule", "adapts"),
    [
        ("delta", True),
        (AsyncSGD(0.1), False),
        (AsyncEASGD(0.3), False),
        ("round_robin_easgd", False),
    ],
)
def test_the_period_is_planned_by_default_where_no_setting_counts_steps(rule, adapts):
    options = AsyncWorkers(rule)._options
    assert options.adapts_period is adapts
    assert adapts or options.period == 8
    assert not AsyncWorkers(rule, period=3)._options.adapts_period


@pytest.mark.full
@pytest.mark.parametrize("period", [1, 2, 4])
@pytest.mark.parametrize("steps_per_execution", [1, 4])
def test_one_worker_alone_takes_every_batch(strategy, period, steps_per_execution):
    model = make_model(strategy, steps_per_execution=steps_per_execution)
    hybrid = AsyncWorkers("delta", period=period)
    used = Used(hybrid)
    model.fit(data(), epochs=2, validation_data=data(), verbose=0, callbacks=[hybrid, used])
    assert used.center.ledger.used.tolist() == [2 * SAMPLES, 0]
    alone = make_model(keras_het.HeterogeneousStrategy(), steps_per_execution=steps_per_execution)
    alone.fit(data(), epochs=2, verbose=0)
    np.testing.assert_allclose(flat(model), flat(alone), rtol=1e-4, atol=1e-6)


class ClaimsTwo(keras.callbacks.Callback):
    def __init__(self, hybrid):
        super().__init__()
        self.hybrid = hybrid

    def on_epoch_begin(self, epoch, logs=None):
        participant = self.hybrid._participant
        self.ledger = participant.center.ledger
        address = participant.strategy.extended.cluster_config.service_address()
        other = RemoteChannel(address, participant.credential, 1, 60.0)
        assert LedgerConnection(other).claim(epoch, 2)[2] == 2
        other.close()


@pytest.mark.full
@pytest.mark.parametrize("is_first", [True, False], ids=["first", "last"])
@pytest.mark.parametrize("place", ["on_train_batch_begin", "on_train_batch_end"])
def test_what_is_evaluated_beside_the_first_step_has_all_batches(strategy, place, is_first):
    losses, expected = [], []

    def evaluate(batch, logs=None):
        if batch == 0:
            expected.append(model.evaluate(data(), verbose=0))
            losses.append(model.evaluate(both, verbose=0))

    evaluates = keras.callbacks.LambdaCallback(**{place: evaluate})
    model, both = make_model(strategy), strategy.distribute(data())
    hybrid = AsyncWorkers("delta", period=2)
    claims = ClaimsTwo(hybrid)
    callbacks = [evaluates, hybrid, claims] if is_first else [hybrid, claims, evaluates]
    model.fit(both, verbose=0, callbacks=callbacks)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert claims.ledger.used.tolist() == [SAMPLES - 2 * BATCH, 0]


@pytest.mark.full
@pytest.mark.parametrize("beside", ["nothing", "evaluate", "balancer behind", "balancer before"])
@pytest.mark.parametrize("steps_per_execution", [1, 2])
def test_validation_on_the_data_of_training_has_all_of_it(strategy, steps_per_execution, beside):
    """A balancer replaces the train function of a model by one that was not measured yet."""
    model = make_model(strategy, steps_per_execution=steps_per_execution)
    both = strategy.distribute(data().shuffle(NUM_BATCHES, seed=1))
    hybrid = AsyncWorkers("delta", period=2)
    claims = ClaimsTwo(hybrid)
    callbacks = [hybrid, claims]
    if beside == "evaluate":
        looks = lambda epoch, logs: model.evaluate(both, steps=1, verbose=0)  # noqa: E731
        callbacks.append(keras.callbacks.LambdaCallback(on_epoch_begin=looks))
    elif beside != "nothing":
        callbacks.insert(beside == "balancer behind", BatchBalancer())
    history = model.fit(
        both, validation_data=both, epochs=2, verbose=0, callbacks=callbacks
    ).history
    whole = model.evaluate(data(), verbose=0)
    np.testing.assert_allclose(history["val_loss"][-1], whole, rtol=1e-5)
    assert claims.ledger.used.tolist() == [2 * (SAMPLES - 2 * BATCH), 0]


@pytest.mark.full
@pytest.mark.parametrize("rule", [AsyncSGD(0.1), DelayCompensated(0.1, 0.04, num_workers=2)])
@pytest.mark.parametrize("sets", ["a schedule", "within an epoch"])
def test_a_rate_that_a_callback_sets_is_refused_beside_gradients(strategy, rule, sets):
    """The service has the optimizer: the rate would count twice, or not at all."""
    model = make_model(strategy)
    before, optimizer = flat(model), model.optimizer
    callback = keras.callbacks.LearningRateScheduler(lambda epoch, rate: 0.5**epoch)
    period = 100  # the schedule's rate in epoch 0 is 1
    if sets == "within an epoch":
        callback = Acts(lambda model: model.optimizer.learning_rate.assign(0.5), step=0)
        period = 2
    callbacks = [AsyncWorkers(rule, period=period), callback]
    with pytest.raises(ValueError, match=rf"'{rule.name}' .* Received: 0\.5, .*Scheduler"):
        model.fit(data(), epochs=2, verbose=0, callbacks=callbacks)
    assert model.optimizer is optimizer
    np.testing.assert_array_equal(flat(model), before)


@pytest.mark.full
def test_a_rate_that_is_set_after_the_last_step_loses_no_training(strategy):
    model = make_model(strategy)
    before, gradient = flat(model), mean_gradient(model, NUM_BATCHES)
    sets = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: model.optimizer.learning_rate.assign(0.25)
    )
    hybrid = AsyncWorkers(AsyncSGD(0.1), period=100)
    model.fit(data(), verbose=0, callbacks=[hybrid, sets])
    np.testing.assert_allclose(before - flat(model), 0.1 * gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.quick("async-delta")
@pytest.mark.parametrize("rule", ["delta", AsyncSGD(0.1)])
@pytest.mark.parametrize("task", ["worker", "async"])
def test_a_fit_without_an_epoch_changes_nothing(monkeypatch, logical_devices, task, rule):
    """As after a restart where all epochs were trained."""
    strategy = strategy_of(monkeypatch, task, worker=1, **{"async": 1})
    model = make_model(strategy)
    before, optimizer = flat(model), model.optimizer
    strategy.extended.training_state.restored = {"of": np.zeros(1)}
    hybrid = AsyncWorkers(rule)
    model.fit(data(), epochs=2, initial_epoch=2, verbose=0, callbacks=[hybrid])
    np.testing.assert_array_equal(flat(model), before)
    assert model.optimizer is optimizer and hybrid._participant is None
    assert strategy.extended.training_state.restored is None
    if task == "worker":
        model.fit(data(), verbose=0, callbacks=[hybrid])  # and the next one trains
        assert not np.array_equal(flat(model), before)
