"""BatchBalancer in one process: what it measures, decides, keeps, and refuses."""

import itertools
import json
import math
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf
from devices import DEVICES
from equivalence import Trial, assert_equivalent, batches, dense_model, three_replicas

from keras_het import HeterogeneousStrategy
from keras_het.callbacks import BatchBalancer
from keras_het.fit.share_bounds import MemoryBounds, start_policy
from keras_het.planning import BalancePlan, BalancePolicy
from keras_het.planning.balance import BoaPolicy
from keras_het.planning.shares import MAX_TOTAL
from keras_het.strategy.measure import compute_times
from keras_het.strategy.measure.compute_times import MeasuredSteps, NewShares, StepTimes


class Zigzag(BalancePolicy):
    """A policy that changes its mind after every step."""

    name = "zigzag"
    shares = (4, 2, 2)
    SHARES = ((8, 0, 0), (1, 4, 3), (0, 3, 5), (4, 4, 0))

    def __init__(self):
        self.seen = []

    def observe(self, step, shares, seconds):
        self.seen.append((step, tuple(shares), tuple(seconds)))

    def propose(self, step):
        self.shares = self.SHARES[step % len(self.SHARES)]
        return BalancePlan(step, self.name, self.shares, "why not")

    def set_upper(self, replica, samples):
        pytest.fail("no test with this policy sets a bound")

    def set_global_batch_size(self, samples):
        pytest.fail("the first batch of these tests is a whole one")


def fit(balancer, samples=46, epochs=2, strategy=None, others=(), compiled=None, **options):
    strategy = strategy or three_replicas()
    with strategy.scope():
        model = dense_model(**compiled or {})
    options |= {"epochs": epochs, "verbose": 0, "callbacks": [*others, balancer]}
    model.fit(strategy.distribute(batches(samples)), **options)
    return model


@pytest.fixture(autouse=True)
def reading_after_every_step(monkeypatch):
    monkeypatch.setattr(compute_times, "MOST_CALLS", 1)


@pytest.fixture
def strategy(logical_devices):
    return HeterogeneousStrategy(devices=DEVICES[:3])


@pytest.fixture
def model(strategy):
    with strategy.scope():
        return dense_model()


@pytest.mark.full
def test_training_with_it_equals_one_device():
    def with_balancer(model, callbacks):
        if isinstance(model.distribute_strategy, HeterogeneousStrategy):
            callbacks = [*callbacks, BatchBalancer(Zigzag())]
        return model.fit(batches(46), epochs=3, verbose=0, callbacks=callbacks)

    trial = Trial(
        lambda: dense_model(metrics=["mae"]), fit=with_balancer, evaluate=False, predict=False
    )
    assert_equivalent(trial, [(4, 2, 1)])


def test_every_step_is_observed_with_the_shares_it_had():
    policy = Zigzag()
    balancer = BatchBalancer(policy)
    three_replicas().set_share_weights((1, 1, 1))
    fit(balancer)
    assert [step for step, _, _ in policy.seen] == list(range(12))
    assert [sum(shares) for _, shares, _ in policy.seen] == [8, 8, 8, 8, 8, 6] * 2
    used = {shares for _, shares, _ in policy.seen}
    assert used & set(Zigzag.SHARES)
    for _, shares, seconds in policy.seen[1:]:
        for share, value in zip(shares, seconds, strict=True):
            assert math.isnan(value) if share == 0 else 0 < value < 60
    assert len(balancer.plans) == 12  # none after the first step, which may be a warm-up
    assert [row["step"] for row in balancer.measurements] == list(range(12))


@pytest.mark.full
def test_several_steps_in_one_execution():
    policy = Zigzag()
    fit(BatchBalancer(policy), compiled={"steps_per_execution": 3})
    assert [step for step, _, _ in policy.seen] == list(range(12))


@pytest.mark.full
def test_each_model_is_measured_also_one_that_was_trained_without(strategy):
    with strategy.scope():
        first, second = dense_model(), dense_model()
    data = strategy.distribute(batches(24))
    second.fit(data, verbose=0)
    assert not strategy.extended.compute_times.read_new()
    first.fit(data, verbose=0, callbacks=[BatchBalancer("even")])
    balancer = BatchBalancer("even")
    second.fit(data, verbose=0, callbacks=[balancer])
    assert len(balancer.measurements) == 3


@pytest.mark.full
def test_a_model_is_traced_again_once(strategy, model):
    data = strategy.distribute(batches(24))
    model.fit(data, verbose=0, callbacks=[BatchBalancer("even")])
    traced = model.train_function
    strategy.extended.compute_times.begin(model)
    assert model.train_function is traced
    strategy.extended.compute_times.begin(model, gradients=True)
    assert model.train_function is not traced


@pytest.mark.full
def test_evaluation_is_not_measured(strategy):
    balancer = BatchBalancer("even")
    model = fit(balancer, 24, 1, strategy, validation_data=batches(16))
    model.evaluate(strategy.distribute(batches(16)), verbose=0)
    assert len(balancer.measurements) == 3


@pytest.mark.full
def test_shares_of_the_strategy_are_the_first_plan(strategy):
    strategy.set_share_weights((2, 1, 1))
    balancer = BatchBalancer("min_max")
    fit(balancer, 8, 1, strategy)
    assert balancer.plans[0].shares == (4, 2, 2)
    assert balancer.plans[0].reason == "shares of the strategy"


@pytest.mark.full
def test_what_is_evaluated_before_the_first_step_changes_no_plan(model):
    evaluates = keras.callbacks.LambdaCallback(
        on_train_begin=lambda logs: model.evaluate(batches(60, size=20), verbose=0)
    )
    balancer = BatchBalancer("static", weights=(1, 0, 3))
    model.fit(batches(24), verbose=0, callbacks=[evaluates, balancer])
    assert balancer.plans[0].shares == (2, 0, 6)
    assert [row["shares"] for row in balancer.measurements] == [[2, 0, 6]] * 3


@pytest.mark.quick("weights1-shares1")
@pytest.mark.parametrize(
    ("weights", "shares"),
    [
        ({"weights": (1, 0, 3)}, (2, 0, 6)),
        ({"weights": {2: 3, 0: 1, 1: 0}}, (2, 0, 6)),
        ({}, (4, 2, 2)),
    ],
)
def test_static_policy(strategy, weights, shares):
    strategy.set_share_weights((2, 1, 1))
    balancer = BatchBalancer("static", **weights)
    fit(balancer, 46, 2, strategy)
    assert [plan.shares for plan in balancer.plans] == [shares]
    whole = [row["shares"] for row in balancer.measurements if sum(row["shares"]) == 8]
    assert whole == [list(shares)] * 10  # from the very first step


@pytest.mark.parametrize(("least", "expected"), [(None, 1), (0, 0), ({0: 2}, 1)])
def test_real_devices_get_a_sample_at_least(strategy, least, expected):
    policy = start_policy("min_max", strategy, 24, {}, least, [24] * 3)
    for step in range(-1, 20):
        policy.propose(step)
        policy.observe(step + 1, policy.shares, np.array(policy.shares) * [0.01, 0.01, 1.0])
    assert policy.shares[2] == expected


@pytest.mark.full
def test_a_replica_may_be_bound_to_nothing(strategy):
    balancer = BatchBalancer("min_max", max_share={1: 0})
    fit(balancer, 24, 1, strategy)
    assert all(row["shares"][1] == 0 for row in balancer.measurements)


@pytest.mark.quick("2", "bound1")
@pytest.mark.parametrize("bound", [2, [2, None, None], {0: 2}])
def test_bounds(strategy, bound):
    balancer = BatchBalancer("static", weights=(6, 1, 1), max_share=bound, min_share={2: 2})
    if bound == 2:
        with pytest.raises(ValueError, match="bound"):  # 2 + 2 + 2 < 8
            fit(balancer, 24, 1, strategy)
        return
    fit(balancer, 24, 1, strategy)
    assert balancer.plans[0].shares[0] == 2
    assert balancer.plans[0].shares[2] >= 2


@pytest.mark.parametrize("made_for", [24, 64])
def test_a_policy_object_follows_the_batch_of_fit(strategy, made_for):
    policy = BoaPolicy(3, made_for)
    started = start_policy(policy, strategy, 24, {}, None, [10, MAX_TOTAL, MAX_TOTAL])
    assert started is policy
    assert policy.propose(-1).shares == (8, 8, 8)
    for step in range(5):
        policy.observe(step, policy.shares, np.array(policy.shares) * [0.01, 0.02, 0.02])
        policy.propose(step)
    assert policy.shares == (10, 7, 7)  # 12, 6 and 6 without the bound


def test_a_policy_object_for_other_replicas_is_refused(strategy):
    with pytest.raises(ValueError, match=r"has 3 replicas\. Received: .*'min_max' for 2"):
        start_policy(BoaPolicy(2, 24), strategy, 24, {}, None, [MAX_TOTAL] * 3)


def test_a_policy_object_knows_the_parts_of_a_share(logical_devices):
    strategy = HeterogeneousStrategy(logical_devices[:3], micro_batch_size=[2, None, 4])
    noted = []
    policy = BoaPolicy(3, 24)
    policy.set_micro_batch_size = lambda *given: noted.append(given)
    start_policy(policy, strategy, 24, {}, None, [MAX_TOTAL] * 3)
    assert noted == [(0, 2), (2, 4)]


@pytest.mark.full
def test_times_of_shares_in_parts_are_no_lines(logical_devices):
    strategy = HeterogeneousStrategy(logical_devices[:3], micro_batch_size=[2, None, 4])
    balancer = BatchBalancer()
    fit(balancer, strategy=strategy)
    sizes = [getattr(times, "micro_batch_size", None) for times in balancer._policy.models]
    assert sizes == [2, None, 4]
    assert start_policy("even", strategy, 24, {}, None, [24] * 3).name == "even"


def test_report(strategy, tmp_path, capsys):
    balancer = BatchBalancer("static", weights=(1, 0, 1), verbose=1)
    assert "has measured nothing yet" in balancer.summary()
    fit(balancer, 46, 1, strategy)
    assert "BatchBalancer (static): even shares would take" in balancer.summary()
    assert "counted as free: replica 1" in balancer.summary()
    balancer.save(tmp_path / "balance.json")
    report = json.loads((tmp_path / "balance.json").read_text())
    assert report["plans"] == [plan.to_dict() for plan in balancer.plans]
    assert report["measurements"][0]["seconds"][0] > 0
    assert report["measurements"][-1]["seconds"][1] is None
    assert str(balancer.plans[0]) in capsys.readouterr().out


@pytest.mark.quick("arguments0-ValueError-one bound for each")
@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"max_share": [1, 2]}, ValueError, "one bound for each"),
        ({"max_share": {7: 1}}, ValueError, "do not exist"),
        ({"policy": "static", "weights": (1, 2)}, ValueError, "one weight for each"),
        ({"max_share": 0}, ValueError, "upper bounds to 0"),
        ({"max_share": {"GPU:0": 8}}, ValueError, "GPU:0"),
        ({"min_share": [1, -1, 1]}, ValueError, "-1, 1"),
        ({"min_share": 3, "max_share": {1: 2}}, ValueError, "upper 2 for replica 1"),
    ],
)
def test_mistakes(strategy, arguments, error, match):
    with pytest.raises(error, match=match):
        fit(BatchBalancer(**arguments), 8, 1, strategy)


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"policy": "even", "window": 8}, TypeError, r"\['window'\].*'even' has \['lower'"),
        ({"policy": Zigzag(), "dead_band": 0.1}, TypeError, "takes no options here"),
        ({"policy": Zigzag(), "min_share": 1}, TypeError, "is only for a policy given by its name"),
        ({"policy": Zigzag(), "granularity": 8}, TypeError, "granularity is only for a policy"),
    ],
)
def test_mistakes_that_show_before_training(arguments, error, match):
    with pytest.raises(error, match=match):
        BatchBalancer(**arguments)


def test_two_in_one_fit(strategy, model):
    two = [BatchBalancer("even"), BatchBalancer("min_max")]
    with pytest.raises(ValueError, match="Leave one of them out"):
        model.fit(strategy.distribute(batches(16)), verbose=0, callbacks=two)


@pytest.mark.full
def test_a_second_balancer_starts_over(strategy, model):
    data = strategy.distribute(batches(64))
    first = BatchBalancer("static", weights=(1, 0, 3))
    model.fit(data, verbose=0, callbacks=[first])
    second = BatchBalancer("even")
    model.fit(data, verbose=0, callbacks=[second])
    assert [row["shares"] for row in first.measurements] == [[2, 0, 6]] * 8
    assert [row["shares"] for row in second.measurements] == [[3, 3, 2]] * 8
    assert [row["step"] for row in second.measurements] == list(range(8))


@pytest.mark.full
@pytest.mark.parametrize(("bound", "shares"), [(None, (24, 4, 4)), (20, (20, 6, 6))])
def test_a_larger_batch_has_larger_shares(model, bound, shares):
    """And a bound above the first batch counts for it."""
    balancer = BatchBalancer("static", weights=(6, 1, 1), max_share=bound)
    model.fit(batches(16), verbose=0, callbacks=[balancer])
    model.fit(batches(128, size=32), verbose=0, callbacks=[balancer])
    assert [plan.shares for plan in balancer.plans] == [(6, 1, 1), shares]
    assert balancer.measurements[-1]["shares"] == list(shares)


@pytest.mark.full
def test_a_later_fit_over_less_than_a_batch_changes_no_plan(model):
    balancer = BatchBalancer("static", weights=(2, 1, 1), min_share=2)
    for samples in (16, 5, 16):
        model.fit(batches(samples), verbose=0, callbacks=[balancer])
    assert [sum(row["shares"]) for row in balancer.measurements] == [8, 8, 5, 8, 8]
    assert [plan.shares for plan in balancer.plans] == [(4, 2, 2)]


@pytest.mark.full
def test_a_balancer_continues_in_a_later_fit(strategy, model):
    balancer = BatchBalancer("static", weights=(2, 1, 1))
    model.fit(batches(64, size=16), verbose=0, callbacks=[balancer])
    strategy.set_share_weights((1, 1, 1))
    model.fit(batches(64), verbose=0)  # its steps are not the balancer's
    model.fit(batches(64), verbose=0, callbacks=[balancer])
    assert sum(balancer.plans[-1].shares) == 8
    assert [sum(row["shares"]) for row in balancer.measurements] == [16] * 4 + [8] * 8
    assert [row["shares"] for row in balancer.measurements][4:] == [[4, 2, 2]] * 8


@pytest.mark.full
def test_a_later_fit_may_have_fewer_samples_than_replicas(model):
    balancer = BatchBalancer("min_max")
    for samples in (16, 2, 16):
        model.fit(batches(samples), verbose=0, callbacks=[balancer])
    assert [sum(row["shares"]) for row in balancer.measurements] == [8, 8, 2, 8, 8]


def test_another_strategy_is_refused():
    model = dense_model()
    with pytest.raises(ValueError, match=r"BatchBalancer needs a model.*HeterogeneousStrategy"):
        model.fit(batches(), verbose=0, callbacks=[BatchBalancer()])


def test_workers_with_different_shares_are_noticed(strategy):
    balancer = BatchBalancer("even")
    fit(balancer, 8, 1, strategy)
    times = strategy.extended.compute_times
    wrong = tf.constant([[3.0, 2.5, 2.5], [0.1, 0.1, 0.1], [0.0, 0.0, 0.0]])
    times.record(tf.constant([4, 2, 2], tf.int64), wrong, 0.1)
    with pytest.raises(RuntimeError, match="left out or used twice"):
        balancer.on_train_batch_end(0)


def test_old_measurements_are_dropped(strategy):
    times = strategy.extended.compute_times
    summed = tf.zeros([3, 3])
    for step in range(300):
        times.record(tf.constant([step, 0, 0], tf.int64), summed, float(step))
    rows = times.read_new()
    assert [int(row.shares[0]) for row in rows] == list(range(300 - 256, 300))
    assert times.read_new() == []
    np.testing.assert_array_equal(rows[-1].seconds, np.zeros(3))
    assert rows[-1].collective_seconds == 299.0


@pytest.mark.full
def test_short_steps_are_read_seldom_and_none_is_lost(monkeypatch):
    monkeypatch.setattr(compute_times, "MOST_CALLS", 8)
    monkeypatch.setattr(compute_times, "LONG_STEP_SECONDS", 1e6)
    policy = Zigzag()
    balancer = BatchBalancer(policy)
    three_replicas().set_share_weights((1, 1, 1))
    fit(balancer, samples=160, epochs=2)
    assert [row["step"] for row in balancer.measurements] == list(range(40))
    assert policy.seen[0][0] == 0 and policy.seen[-1][0] == 39
    assert len(policy.seen) < 20
    by_step = {row["step"]: row for row in balancer.measurements}
    last = [by_step[step]["seconds"] for step in range(policy.seen[-2][0] + 1, 40)]
    np.testing.assert_allclose(policy.seen[-1][2], np.median(last, axis=0))
    # before the first step, after two, then every 8 steps and at the end of each epoch of 20
    assert [plan.step for plan in balancer.plans] == [-1, 1, 9, 17, 19, 27, 35, 39]


@pytest.mark.full
def test_long_steps_are_read_at_once(monkeypatch):
    monkeypatch.setattr(compute_times, "MOST_CALLS", 8)
    monkeypatch.setattr(compute_times, "LONG_STEP_SECONDS", 1e-9)
    balancer = BatchBalancer(Zigzag())
    fit(balancer, samples=80, epochs=1)
    assert [plan.step for plan in balancer.plans] == [-1, *range(1, 10)]


@pytest.mark.parametrize(
    ("first", "is_warm_up"), [((60, 65), True), ((3, 65), False), ((1, 2), False)]
)
def test_a_first_step_that_loads_kernels_says_nothing(first, is_warm_up):
    def step(seconds):
        shares = np.array([4, 4])
        times = np.array(seconds, float)
        return StepTimes(shares, shares.astype(float), times, shares, shares, np.zeros(2), 0.0)

    waiting = [[], [step(first)], [step((2, 3))]]
    record = MeasuredSteps(keep=10)
    record.begin(SimpleNamespace(read_new=lambda: waiting.pop(0), num_lost=0))
    assert not record.read()  # the next step shows what the first one is
    seen = [reading.seconds.tolist() for reading in record.read()]
    assert all(map(math.isnan, seen[0])) == is_warm_up
    assert seen[1] == [2, 3]
    assert [row["seconds"] for row in record.rows] == [list(first), [2, 3]]


def test_steps_with_a_new_share_say_nothing_until_they_are_compiled():
    def step(shares, seconds):
        shares, seconds = np.array(shares), np.array(seconds, float)
        return StepTimes(shares, shares.astype(float), seconds, shares, shares, np.zeros(2), 0.0)

    taken = [
        ([4, 4], (9, 9)),
        ([4, 4], (7, 7)),
        ([4, 4], (2, 3)),
        ([4, 5], (2, 8)),
        ([4, 5], (2, 9)),
    ]
    taken += [([4, 5], (2, 4)), ([4, 4], (2, 3))]
    record = MeasuredSteps(keep=10)
    steps = [step(*each) for each in taken]
    record.begin(SimpleNamespace(read_new=lambda: steps, num_lost=0), num_unsettled=2)
    nan = math.nan
    expected = [(nan, nan), (nan, nan), (2, 3), (2, nan), (2, nan), (2, 4), (2, 3)]
    np.testing.assert_array_equal([reading.seconds for reading in record.read()], expected)
    assert record.new_shares.seconds == 8 + 9 - 2 * 4  # the first share loads kernels, too


def test_what_a_new_share_costs_is_unknown_at_first():
    new_shares = NewShares()
    new_shares.begin(num_unsettled=1)
    for share, seconds in [(8, 90.0), (8, 1.0), (9, 5.0), (9, 1.0), (7, 1.0), (7, 1.0), (0, 9.0)]:
        assert new_shares.seconds == (2.0 if share == 0 else 4.0 if share == 7 else 0.0)
        new_shares.leave_out(np.array([share]), np.array([seconds]))
    new_shares.begin(num_unsettled=0)
    new_shares.leave_out(np.array([4]), np.array([9.0]))
    assert new_shares.seconds == 2.0


class Noting(Zigzag):
    def __init__(self):
        super().__init__()
        self.step_seconds = []

    def observe_step_seconds(self, seconds):
        self.step_seconds.append(seconds)


class Slow(keras.callbacks.Callback):
    """Lets a clock continue by a millisecond a step, and by much for all that is no step."""

    def __init__(self):
        super().__init__()
        self.now = 0.0

    def on_train_batch_begin(self, batch, logs=None):
        self.now += 1e-3

    def on_test_end(self, logs=None):
        self.now += 1000

    def on_epoch_end(self, epoch, logs=None):
        self.now += 1000


@pytest.mark.full
@pytest.mark.parametrize("read_after", [{2, 4}, {3, 5}, {5}, {2, 4, 6}])
def test_validation_and_other_callbacks_are_no_steps(monkeypatch, read_after):
    """Of an epoch of six steps, the last ones are read at its end."""
    slow, policy, steps = Slow(), Noting(), itertools.count()
    monkeypatch.setattr(compute_times, "time", SimpleNamespace(perf_counter=lambda: slow.now))
    monkeypatch.setattr(
        compute_times.MeasuredSteps, "is_due", lambda _: next(steps) % 6 + 1 in read_after
    )
    fit(BatchBalancer(policy), epochs=3, others=[slow], validation_data=batches(16))
    known = [seconds for seconds in policy.step_seconds if seconds]
    assert known == pytest.approx([1e-3] * 3 * (len(read_after) - 1))
    assert len(policy.step_seconds) == 3 * (len(read_after) + (6 not in read_after))


def test_a_lack_of_memory_is_noted(model, tmp_path):
    def lacks(_):
        raise tf.errors.ResourceExhaustedError(None, None, "OOM on /device:CPU:1 by allocator cpu")

    def replace(logs):
        model.train_function = lacks

    balancer = BatchBalancer("even", memory_dir=tmp_path)
    others = keras.callbacks.LambdaCallback(on_train_begin=replace)
    with pytest.raises(tf.errors.ResourceExhaustedError, match="share"):
        model.fit(batches(24), verbose=0, callbacks=[balancer, others])
    assert list(tmp_path.iterdir())


class NotesRows(keras.layers.Layer):
    def __init__(self):
        super().__init__()
        self.noted = []

    def call(self, x):
        noted = tf.numpy_function(self._note, [tf.shape(x)[0]], tf.int32)
        with tf.control_dependencies([noted]):
            return tf.identity(x)

    def _note(self, rows):
        self.noted.append(int(rows))
        return rows


@pytest.mark.full
def test_what_did_not_fit_is_computed_in_parts(logical_devices, tmp_path):
    MemoryBounds(tmp_path).write(1, 2)
    strategy = HeterogeneousStrategy(
        logical_devices[:3], share_weights=[1, 5, 2], micro_batch_size="auto"
    )
    notes = NotesRows()
    with strategy.scope():
        model = dense_model(layers=lambda: [notes])
    shares = []
    balancer = BatchBalancer("static", memory_dir=tmp_path)
    look = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: shares.append(strategy.current_shares)
    )
    notes.noted.clear()
    model.fit(strategy.distribute(batches(16)), verbose=0, callbacks=[balancer, look])
    assert set(shares) == {(1, 5, 2)}
    assert sorted(notes.noted) == sorted([1, 1, 2, 2, 2] * len(shares))
