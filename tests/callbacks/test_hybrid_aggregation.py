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
from keras_het.asynchronous.parameter_service.channel import RemoteChannel
from keras_het.asynchronous.parameter_service.ledger_client import LedgerConnection
from keras_het.asynchronous.rules import ASHL, AsyncEASGD, AsyncSGD, DelayCompensated, Delta
from keras_het.callbacks import BatchBalancer, HybridAggregation
from keras_het.exchange.server import Server
from keras_het.fit.session import FitSession, Rank


def mean_gradient(model, batches):
    """Of the mean squared error, as one vector."""
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
        self.samples = []

    def on_epoch_begin(self, epoch, logs=None):
        self.center = self.hybrid.participant.center
        client = self.center.engine.weights.transport
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
            hybrids = [each for each in callbacks if isinstance(each, HybridAggregation)]
            found.extend(each.participant.options for each in hybrids)

    callbacks = [Finds()]
    if given == "settings":
        callbacks.append(HybridAggregation(period=5))
    elif given == "CallbackList":
        callbacks = keras.callbacks.CallbackList(callbacks, True, model=model, epochs=1)
    model.fit(data(), epochs=1, verbose=0, callbacks=callbacks)
    (options,) = found
    assert options.adapts_period == (given != "settings")
    told = capsys.readouterr().out.count("this fit trains as with HybridAggregation()")
    assert told == (given != "settings")
    assert strategy._data_path.claims_source is None
    model.evaluate(data(), verbose=0)  # trains nothing
    assert "HybridAggregation" not in capsys.readouterr().out


@pytest.mark.full
def test_another_models_fit_within_a_hybrid_training_is_its_own(strategy):
    model, other = make_model(strategy), make_model(strategy)
    inner = Acts(lambda _: other.fit(data(), verbose=0))
    hybrid = HybridAggregation(period=2)
    notes = Used(hybrid)
    model.fit(data(), epochs=1, verbose=0, callbacks=[hybrid, inner, notes])
    assert notes.center.ledger.used.sum() == SAMPLES


@pytest.mark.full
@pytest.mark.parametrize("epochs", [1, 2])
def test_gradients_of_a_training_shorter_than_a_period_count(strategy, epochs):
    model = make_model(strategy)
    before, gradient = flat(model), mean_gradient(model, NUM_BATCHES)
    rule = AsyncSGD(0.1)
    hybrid = HybridAggregation(rule, period=100)
    model.fit(data(), epochs=epochs, verbose=0, callbacks=[hybrid])
    np.testing.assert_allclose(before - flat(model), 0.1 * gradient, rtol=1e-4, atol=1e-6)
    assert isinstance(model.optimizer, keras.optimizers.SGD)


def test_data_whose_first_pass_cannot_start_over_is_refused(strategy):
    """Keras has looked at its first element: everybody would train the whole first epoch."""
    rows = tf.data.Dataset.from_tensor_slices(arrays()).shuffle(SAMPLES, seed=1)
    padded = rows.padded_batch(BATCH, drop_remainder=True)
    with pytest.raises(ValueError, match="reshuffle_each_iteration=False"):
        make_model(strategy).fit(padded, verbose=0, callbacks=[HybridAggregation()])


def test_shorter_epochs_are_refused(strategy):
    with pytest.raises(ValueError, match=r"steps_per_epoch=2, and data with 6 batches"):
        make_model(strategy).fit(
            data(), steps_per_epoch=2, verbose=0, callbacks=[HybridAggregation()]
        )


def test_arrays_that_are_not_dense_are_refused(strategy):
    x, y = arrays()
    given = tf.sparse.from_dense(x), y
    with pytest.raises(ValueError, match="Received: arrays that are not all dense"):
        make_model(strategy).fit(*given, verbose=0, callbacks=[HybridAggregation()])


def test_averages_of_weights_are_refused(strategy):
    model = make_model(strategy, functools.partial(keras.optimizers.SGD, use_ema=True))
    with pytest.raises(ValueError, match="use_ema"):
        model.fit(data(), verbose=0, callbacks=[HybridAggregation()])


class Half(Delta):
    def update(self, center, slots, change, meta):
        return super().update(center, slots, change / 2, meta)


def strategy_of(monkeypatch, task, **cluster):
    cluster = {job: [free_address() for _ in range(number)] for job, number in cluster.items()}
    task = {"type": task, "index": 0}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": task}))
    monkeypatch.setenv("KERAS_HET_SERVICE_SECRET", "a secret that only tests know")
    return keras_het.HeterogeneousStrategy()


GROUP_AND_SERVICE = {"worker": 1, "ps": 1, "async": 1}
TWO_SERVICES = {"ps": 2, "async": 1}


@pytest.mark.quick("cluster1-worker-spread", "cluster4-async-auto")
@pytest.mark.parametrize(
    ("cluster", "task", "service"),
    [
        (GROUP_AND_SERVICE, "worker", "auto"),
        (GROUP_AND_SERVICE, "worker", "spread"),
        (GROUP_AND_SERVICE, "async", "auto"),
        (GROUP_AND_SERVICE, "async", "spread"),
        (TWO_SERVICES, "async", "auto"),
        (TWO_SERVICES, "ps", "auto"),
    ],
)
def test_an_own_rule_is_refused_on_tasks_that_run_no_script(
    monkeypatch, logical_devices, cluster, task, service
):
    strategy = strategy_of(monkeypatch, task, **cluster)
    hybrid = HybridAggregation(Half(), service=service)
    with pytest.raises(ValueError, match=r"Received: Half, .* own, and \S+ of the job ps"):
        make_model(strategy).fit(data(), verbose=0, callbacks=[hybrid])


@pytest.mark.full
@pytest.mark.parametrize("service", ["auto", "spread"])
def test_an_own_rule_trains_where_the_script_runs(strategy, service):
    model = make_model(strategy)
    before = flat(model)
    model.fit(data(), verbose=0, callbacks=[HybridAggregation(Half(), service=service)])
    assert np.abs(before - flat(model)).min() > 1e-3


@pytest.mark.parametrize(
    ("period", "match"), [(8, "8 steps of 0.1"), ("auto", "any number of steps of 0.1")]
)
def test_a_moving_rate_beyond_the_bound_of_answers_that_travel_is_refused(strategy, period, match):
    hybrid = HybridAggregation(AsyncEASGD(0.9), period=period)
    with pytest.raises(ValueError, match=match):
        make_model(strategy).fit(data(), verbose=0, callbacks=[hybrid])


@pytest.mark.quick("predict-delta")
@pytest.mark.parametrize("rule", ["delta", AsyncSGD(0.1)])
@pytest.mark.parametrize("way", ["predict", "evaluate"])
def test_what_callbacks_look_at_is_not_trained(strategy, way, rule):
    model, both = make_model(strategy), strategy.distribute(data())
    hybrid = HybridAggregation(rule, period=2)
    used, seen = Used(hybrid), arrays()[0] if way == "predict" else both
    looks = Acts(lambda model: getattr(model, way)(seen, verbose=0), step=0)
    model.fit(both, verbose=0, callbacks=[hybrid, used, looks])
    assert used.center.ledger.used.tolist() == [SAMPLES, 0]
    assert [samples for samples in used.samples if samples] == [2 * BATCH] * 3


def ends_with(strategy, error, rule):
    """A model whose training ended in an error, and its optimizer from before."""

    def fail(model):
        raise error

    model = make_model(strategy)
    optimizer = model.optimizer
    hybrid = HybridAggregation(rule, period=2)
    with pytest.raises(type(error)):
        model.fit(data(), verbose=0, callbacks=[hybrid, Acts(fail)])
    return model, optimizer, hybrid


@pytest.mark.full
@pytest.mark.parametrize("rule", ["delta", AsyncSGD(0.1)])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("in a callback")])
def test_a_fit_after_one_that_failed_trains(strategy, error, rule):
    model, optimizer, hybrid = ends_with(strategy, error, rule)
    before, gradient = flat(model), mean_gradient(model, NUM_BATCHES)
    x, y = arrays()
    model.fit(x, y, batch_size=SAMPLES, verbose=0)
    assert model.optimizer is optimizer and hybrid.participant is None
    np.testing.assert_allclose(before - flat(model), 0.1 * gradient, rtol=1e-4, atol=1e-6)
    before = flat(model)
    model.fit(data(), verbose=0, callbacks=[HybridAggregation(rule, period=2)])
    assert model.optimizer is optimizer
    assert np.abs(before - flat(model)).min() > 1e-3


@pytest.mark.full
@pytest.mark.parametrize("rule", ["delta", AsyncSGD(0.1)])
def test_a_fit_of_the_same_model_within_a_callback_is_refused(strategy, rule):
    x, y = arrays()
    model = make_model(strategy)
    optimizer, hybrid = model.optimizer, HybridAggregation(rule, period=2)
    fits = Acts(lambda model: model.fit(x, y, batch_size=SAMPLES, verbose=0))
    with pytest.raises(RuntimeError, match="fit of the same model within a callback"):
        model.fit(data(), verbose=0, callbacks=[hybrid, fits])
    assert model.optimizer is optimizer and hybrid.participant is None
    model.fit(data(), verbose=0, callbacks=[HybridAggregation(rule, period=2)])


def assert_nobody_listens(strategy):
    server = Server(strategy.cluster_config.service_address())
    server.start()
    server.close()


@pytest.mark.full
@pytest.mark.parametrize("others", [[], [BatchBalancer]], ids=["alone", "before a balancer"])
def test_a_step_that_fails_ends_the_service(strategy, others):
    model = make_model(strategy)
    hybrid = HybridAggregation("delta", period=2)

    def interrupt(batch):
        raise KeyboardInterrupt

    class Stopped(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            model.distribute_strategy._data_path.on_step = lambda *step, **new: interrupt(step)

    with pytest.raises(KeyboardInterrupt):
        model.fit(data(), verbose=0, callbacks=[hybrid, *(make() for make in others), Stopped()])
    del model.distribute_strategy._data_path.on_step
    assert hybrid.participant is None
    assert_nobody_listens(strategy)
    model.fit(data(), verbose=0, callbacks=[HybridAggregation("delta", period=2)])


def test_an_error_before_the_first_step_ends_the_service(strategy):
    def fail(epoch, logs=None):
        assert hybrid.participant.center is not None
        raise KeyboardInterrupt

    model, hybrid = make_model(strategy), HybridAggregation("delta", period=2)
    fails = keras.callbacks.LambdaCallback(on_epoch_begin=fail)
    with pytest.raises(KeyboardInterrupt):
        model.fit(data(), verbose=0, callbacks=[hybrid, fails])
    assert hybrid.participant is None
    assert_nobody_listens(strategy)


@pytest.mark.full
@pytest.mark.parametrize("place", ["on_train_batch_end", "on_test_batch_end"])
def test_an_error_elsewhere_ends_the_service(strategy, place):
    def fail(batch, logs=None):
        raise ValueError("elsewhere")

    fails = keras.callbacks.Callback()
    setattr(fails, place, fail)
    model = make_model(strategy)
    callbacks = [HybridAggregation("delta", period=2), fails]
    with pytest.raises(ValueError, match="elsewhere") as kept:
        model.fit(data(), validation_data=data(), verbose=0, callbacks=callbacks)
    for thread in threading.enumerate():
        if thread.name == "keras_het-fit":
            thread.join(60)
            assert not thread.is_alive()
    assert_nobody_listens(strategy)
    assert kept.traceback  # which holds what the `fit` had
    model.fit(data(), verbose=0, callbacks=[HybridAggregation("delta", period=2)])


@pytest.mark.full
@pytest.mark.parametrize("shuffle", [True, False])
def test_arrays_train_as_a_data_set_of_them(strategy, shuffle):
    x, y = arrays()
    rows = tf.data.Dataset.from_tensor_slices((x, y))
    models = [make_model(strategy) for _ in range(2)]
    options = {"epochs": 2, "verbose": 0}
    models[0].fit(
        x, y, batch_size=BATCH, shuffle=shuffle, callbacks=[HybridAggregation()], **options
    )
    rows = rows.shuffle(SAMPLES, seed=0) if shuffle else rows
    models[1].fit(rows.batch(BATCH), callbacks=[HybridAggregation()], **options)
    assert np.array(models[0].optimizer.iterations) == 2 * NUM_BATCHES
    np.testing.assert_array_equal(*map(flat, models))


@pytest.mark.parametrize(
    ("rule", "adapts"),
    [
        ("delta", True),
        (AsyncSGD(0.1), False),
        (AsyncEASGD(0.3), False),
        ("round_robin_easgd", False),
        (ASHL(loss_threshold=0.5, num_workers=2, preset_steps=40), False),
    ],
)
def test_the_period_is_planned_by_default_where_no_setting_counts_steps(rule, adapts):
    options = HybridAggregation(rule)._options
    assert options.adapts_period is adapts
    assert adapts or options.period == 8
    assert not HybridAggregation(rule, period=3)._options.adapts_period


@pytest.mark.full
@pytest.mark.parametrize("period", [1, 2, 4])
@pytest.mark.parametrize("steps_per_execution", [1, 4])
def test_one_worker_alone_takes_every_batch(strategy, period, steps_per_execution):
    model = make_model(strategy, steps_per_execution=steps_per_execution)
    hybrid = HybridAggregation("delta", period=period)
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
        participant = self.hybrid.participant
        self.ledger = participant.center.ledger
        address = participant.strategy.cluster_config.service_address()
        other = LedgerConnection(RemoteChannel(address, participant.credential, 1, 60.0))
        assert other.claim(epoch, 2)[2] == 2
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
    hybrid = HybridAggregation("delta", period=2)
    claims = ClaimsTwo(hybrid)
    callbacks = [evaluates, hybrid, claims] if is_first else [hybrid, claims, evaluates]
    model.fit(both, verbose=0, callbacks=callbacks)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert claims.ledger.used.tolist() == [SAMPLES - 2 * BATCH, 0]


@pytest.mark.full
@pytest.mark.parametrize("looks", [True, False], ids=["looked at", "not looked at"])
@pytest.mark.parametrize("steps_per_execution", [1, 2])
def test_validation_on_the_data_of_training_has_all_of_it(strategy, steps_per_execution, looks):
    model = make_model(strategy, steps_per_execution=steps_per_execution)
    both = strategy.distribute(data().shuffle(NUM_BATCHES, seed=1))
    hybrid = HybridAggregation("delta", period=2)
    claims = ClaimsTwo(hybrid)
    look = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, logs: looks and model.evaluate(both, steps=1, verbose=0)
    )
    history = model.fit(
        both, validation_data=both, epochs=2, verbose=0, callbacks=[hybrid, claims, look]
    ).history
    whole = model.evaluate(data(), verbose=0)
    np.testing.assert_allclose(history["val_loss"][-1], whole, rtol=1e-5)
    assert claims.ledger.used.tolist() == [2 * (SAMPLES - 2 * BATCH), 0]


@pytest.mark.full
@pytest.mark.parametrize("is_first", [True, False], ids=["before", "behind"])
def test_samples_count_beside_a_balancer(strategy, is_first):
    """Replaces the train function of a model by one that was not measured yet."""
    model = make_model(strategy)
    hybrid = HybridAggregation("delta", period=2)
    both = [hybrid, BatchBalancer()] if is_first else [BatchBalancer(), hybrid]
    claims = ClaimsTwo(hybrid)
    model.fit(data(), epochs=2, verbose=0, callbacks=[*both, claims])
    assert claims.ledger.used.tolist() == [2 * (SAMPLES - 2 * BATCH), 0]


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


@pytest.mark.full
@pytest.mark.parametrize(("number", "others"), [(1, []), (3, [BatchBalancer])])
def test_samples_that_were_read_ahead_count_when_they_are_trained(strategy, number, others):
    model = make_model(strategy)
    hybrid = HybridAggregation(AsyncSGD(0.1), period=2)
    used, ahead = Used(hybrid), ReadsAhead(number)
    model.fit(data(), verbose=0, callbacks=[hybrid, *(make() for make in others), used, ahead])
    assert used.center.ledger.used.tolist() == [SAMPLES, 0]
    assert [samples for samples in used.samples if samples] == [2 * BATCH] * 3


@pytest.mark.full
@pytest.mark.parametrize("rule", [AsyncSGD(0.1), DelayCompensated(0.1, 0.04, num_workers=2)])
def test_a_schedule_in_a_callback_is_refused_beside_gradients(strategy, rule):
    """The service has the optimizer: the rate would count twice, or not at all."""
    model = make_model(strategy)
    before, optimizer = flat(model), model.optimizer
    schedule = keras.callbacks.LearningRateScheduler(lambda epoch, rate: 0.5**epoch)
    callbacks = [HybridAggregation(rule, period=100), schedule]  # of epoch 0: 1
    with pytest.raises(ValueError, match=rf"'{rule.name}' .* Received: 0\.5, .*Scheduler"):
        model.fit(data(), epochs=2, verbose=0, callbacks=callbacks)
    assert model.optimizer is optimizer
    np.testing.assert_array_equal(flat(model), before)


@pytest.mark.full
def test_a_rate_that_is_set_within_an_epoch_is_refused_at_the_next_exchange(strategy):
    model = make_model(strategy)
    before = flat(model)
    sets = Acts(lambda model: model.optimizer.learning_rate.assign(0.25), step=0)
    with pytest.raises(ValueError, match=r"Received: 0\.25"):
        model.fit(data(), verbose=0, callbacks=[HybridAggregation(AsyncSGD(0.1), period=2), sets])
    np.testing.assert_array_equal(flat(model), before)


@pytest.mark.full
def test_a_rate_that_is_set_after_the_last_step_loses_no_training(strategy):
    model = make_model(strategy)
    before, gradient = flat(model), mean_gradient(model, NUM_BATCHES)
    sets = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: model.optimizer.learning_rate.assign(0.25)
    )
    hybrid = HybridAggregation(AsyncSGD(0.1), period=100)
    model.fit(data(), verbose=0, callbacks=[hybrid, sets])
    np.testing.assert_allclose(before - flat(model), 0.1 * gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.quick("worker-rule1", "async-delta")
@pytest.mark.parametrize("rule", ["delta", AsyncSGD(0.1)])
@pytest.mark.parametrize("task", ["worker", "async"])
def test_a_fit_without_an_epoch_changes_nothing(monkeypatch, logical_devices, task, rule):
    """As after a restart where all epochs were trained."""
    strategy = strategy_of(monkeypatch, task, worker=1, **{"async": 1})
    model = make_model(strategy)
    before, optimizer = flat(model), model.optimizer
    strategy._training_state.restored = {"of": np.zeros(1)}
    hybrid = HybridAggregation(rule)
    model.fit(data(), epochs=2, initial_epoch=2, verbose=0, callbacks=[hybrid])
    np.testing.assert_array_equal(flat(model), before)
    assert model.optimizer is optimizer and hybrid.participant is None
    assert strategy._training_state.restored is None


@pytest.mark.full
def test_a_fit_after_one_without_an_epoch_trains(strategy):
    model, hybrid = make_model(strategy), HybridAggregation()
    before = flat(model)
    model.fit(data(), epochs=2, initial_epoch=2, verbose=0, callbacks=[hybrid])
    model.fit(data(), verbose=0, callbacks=[hybrid])
    assert not np.array_equal(flat(model), before)
