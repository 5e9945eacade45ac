"""What LoaderTuner does outside of training: threads' priority, CPUs, memory, the log, reports."""

import contextlib
import functools
import io
import logging
import os
import re
from pathlib import Path

import keras
import pytest
import tensorflow as tf
from loader_training import dense, numbered

import keras_het
from keras_het.callbacks import LoaderTuner, loader_tuner
from keras_het.loader import Knobs, inspect, tunable_pipeline
from keras_het.loader.host_threads import ForeignLoad
from keras_het.loader.input import tuning_session
from keras_het.loader.input.tuning_session import TuningSession
from keras_het.loader.iterators import tunable
from keras_het.planning.loader import FixedController, LoaderPlan, LoaderWindow, WindowSize
from keras_het.usable_cpus import usable_cpus

TASKS = Path("/proc/self/task")
THREADS = 3
build = numbered(120)
needs_tasks = pytest.mark.skipif(not TASKS.exists(), reason="Linux alone shows its threads")
needs_model = pytest.mark.skipif(
    not hasattr(tf.raw_ops, "IteratorGetModelProto"), reason="TensorFlow 2.16 shows no model"
)


class Once(FixedController):
    """Wants one other plan, after the first steps."""

    other = LoaderPlan(THREADS + 2, 3, "on purpose")
    next_window = WindowSize(0, 2, 0.0)

    def __init__(self, plan, cpus=None):
        super().__init__(plan)
        self.cpus = cpus

    def observe(self, window):
        if self.plan == self.other:
            return None
        self.plan = self.other
        return self.plan


class Stays(FixedController):
    next_window = WindowSize(0, 2, 0.0)

    def __init__(self, plan, cpus=None):
        super().__init__(plan)


class AtEveryStep(keras.callbacks.Callback):
    """Calls a function behind every step, when what is prepared in the background is ready."""

    def __init__(self, tuner, function):
        super().__init__()
        self._tuner, self._function = tuner, function

    def on_train_batch_end(self, batch, logs=None):
        session = self._tuner._session
        if session.change is not None:
            session.change[0].wait(60)
        self._function()


def fit(tuner, data, act=lambda: None, epochs=2, devices=()):
    """Under the strategy of these devices, or without one if there are none."""
    scope = contextlib.nullcontext()
    if devices:
        scope = keras_het.HeterogeneousStrategy(list(devices[:2]), share_weights=[3, 1]).scope()
    with scope:
        model = dense()
    model.fit(data, epochs=epochs, verbose=0, callbacks=[tuner, AtEveryStep(tuner, act)])


def nice_values():
    values = {}
    for task in TASKS.iterdir():
        try:
            fields = (task / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        values[int(task.name)] = int(fields[16])
    return values


@pytest.mark.quick("alone-True")
@needs_tasks
@pytest.mark.parametrize("is_built", [True, False])
def test_the_threads_of_the_pipeline_give_way(is_built, devices):
    own, nice = os.getpriority(os.PRIO_PROCESS, 0), 9
    before = set(nice_values())
    numbers = []

    def look():
        new = {thread: value for thread, value in nice_values().items() if thread not in before}
        numbers.append(sum(value == own + nice for value in new.values()))

    tuner = LoaderTuner(Once, nice=nice, cooperate_with_other_jobs=False)
    first = Knobs(2 * THREADS, 2, THREADS)
    data = tunable_pipeline(build, first) if is_built else build(first)
    fit(tuner, data, look, devices=devices)
    assert [move.refused for move in tuner.moves] == [None]
    # long after the move, and before the pipeline of the last epoch has given all it has
    assert numbers[-15] >= Once.other.loaders
    if is_built:
        assert numbers[2] >= THREADS
    assert os.getpriority(os.PRIO_PROCESS, 0) == own, "the training step gives way to nobody"


def busy_after(monkeypatch, readings):
    """Other programs take all CPUs after so many looks at the host."""
    looks = iter(range(1_000_000))

    def read(load, friends=()):
        return (len(load.cpus), 0.0) if next(looks) >= readings else (0.0, len(load.cpus))

    monkeypatch.setattr(ForeignLoad, "read", read)


def without_rights(kind, thread, nice):
    if nice < os.getpriority(kind, thread):
        raise PermissionError("on purpose")
    _set_priority(kind, thread, nice)


_set_priority = os.setpriority


@pytest.mark.quick("alone-False")
@needs_tasks
@pytest.mark.parametrize("is_permitted", [True, False])
def test_threads_do_not_give_way_to_other_programs(is_permitted, devices, monkeypatch):
    if is_permitted and os.geteuid() != 0:
        pytest.skip("only root may raise a priority")
    if not is_permitted:
        monkeypatch.setattr(os, "setpriority", without_rights)
    busy_after(monkeypatch, 5)
    own, before = os.getpriority(os.PRIO_PROCESS, 0), set(nice_values())
    values = []

    def look():
        values.append([nice for thread, nice in nice_values().items() if thread not in before])

    tuner = LoaderTuner(Stays, nice=9, cooperate_with_other_jobs=False)
    data = tunable_pipeline(build, Knobs(2 * THREADS, 2, THREADS))
    fit(tuner, data, look, devices=devices)
    assert max(each.count(own + 9) for each in values[:10]) >= THREADS
    # the pipeline of the last epoch, before it has given all it has
    assert own + 9 not in values[-15]
    reasons = [] if is_permitted else ["other programs are busy"]
    assert [move.plan.reason for move in tuner.moves] == reasons
    assert [move.refused for move in tuner.moves] == [None] * len(reasons)
    assert tuner.train_input_wait.steps == 60


def test_what_is_only_observed_is_not_moved_for_the_sake_of_its_priority(monkeypatch):
    monkeypatch.setattr(os, "setpriority", without_rights)
    busy_after(monkeypatch, 10)  # in the second epoch, in which the cache is full
    tuner = LoaderTuner(Stays, nice=9, cooperate_with_other_jobs=False)
    data = tunable_pipeline(lambda knobs: build(knobs).cache(), Knobs(2 * THREADS, 2, THREADS))
    fit(tuner, data, epochs=3)
    assert "cache" in tuner.observe_only_reason
    assert tuner.moves == []


@pytest.mark.full
@needs_tasks
def test_threads_are_left_alone_without_a_nice_value():
    before = set(nice_values())
    values = set()

    def look():
        values.update(value for thread, value in nice_values().items() if thread not in before)

    tuner = LoaderTuner(Once, nice=0, cooperate_with_other_jobs=False)
    data = tunable_pipeline(build, Knobs(2 * THREADS, 2, THREADS))
    fit(tuner, data, look, epochs=1)
    assert values == {os.getpriority(os.PRIO_PROCESS, 0)}


class Shows:
    def __init__(self, tuner):
        self.tuner = tuner
        self.reports, self.texts = [], []

    def __call__(self):
        text = io.StringIO()
        self.reports.append(self.tuner.inspect(text))
        self.texts.append(" ".join(text.getvalue().split()))


def never_moves(plan, cpus):
    return FixedController(plan)


@needs_model
def test_the_running_pipeline_is_shown_within_fit_and_after_a_move_as_it_was_before():
    tuner = LoaderTuner(Once, cooperate_with_other_jobs=False)
    shows = Shows(tuner)
    data = tunable_pipeline(build, Knobs(2 * THREADS, 5, THREADS))
    fit(tuner, data, shows, epochs=1)
    report, text = shows.reports[1], shows.texts[1]
    assert report.batches == 2
    assert report.seen is None
    assert report.stages[0].name == "Prefetch"
    assert report.stages[0].buffer_size == 5
    assert report.bottleneck is not None
    assert "Bottleneck" in text
    assert "Prefetch" in text
    # of the present one TensorFlow tells nothing
    (move,) = tuner.moves
    late, late_text = shows.reports[-2], shows.texts[-2]
    assert late.stages[0].buffer_size == 5
    assert move.step <= late.batches < 15
    assert f"This was seen at step {late.batches} of the training." in late_text


@pytest.mark.quick("in order")
@needs_model
@pytest.mark.parametrize("kind", ["in order", "shuffled", "moved", "own rows", "whole batches"])
def test_an_ordinary_dataset_is_shown_within_fit_and_after_it(kind, logical_devices):
    data = build(Knobs(2 * THREADS, 2, THREADS))
    if kind == "shuffled":
        tf.random.set_seed(None)
        data = data.shuffle(4)
    if kind == "whole batches":
        data = data.map(lambda x, y: (x - tf.reduce_mean(x), y))
    tuner = LoaderTuner(Once if kind == "moved" else never_moves, cooperate_with_other_jobs=False)
    shows = Shows(tuner)
    devices = logical_devices if kind in ("own rows", "whole batches") else ()
    fit(tuner, data, shows, devices=devices)
    first, middle = shows.reports[0], shows.reports[15]
    names = [stage.name for stage in middle.stages]
    assert first.batches == 1
    assert "Range" in names
    assert middle.bottleneck is not None
    assert "AUTOTUNE DEFAULT" in shows.texts[15]
    if kind in ("in order", "shuffled"):
        assert middle.batches == 16
        # as soon as its second epoch begins, and not what was seen of the first one
        assert [shows.reports[30].batches, shows.reports[30].seen] == [1, None]
    if kind == "own rows":
        assert names[1:3] == ["Maps of own rows", "Cut into shares"]
        assert middle.stages[2].seconds_per_batch == 0.0, "it waits for the consumer"
    shows()
    assert "Range" in [stage.name for stage in shows.reports[-1].stages]
    assert "This was seen at step" in shows.texts[-1]


@needs_model
def test_of_an_ordinary_dataset_with_a_seeded_shuffle_it_says_where_to_look():
    tuner = LoaderTuner(never_moves, cooperate_with_other_jobs=False)
    shows = Shows(tuner)
    data = build(Knobs(2 * THREADS, 2, THREADS)).shuffle(4, seed=3)
    fit(tuner, data, shows, epochs=1)
    assert shows.reports[0].stages == ()
    assert "with a seeded shuffle" in shows.texts[0]
    assert "keras_het.loader.inspect outside of fit" in shows.texts[0]


@pytest.mark.full
@needs_model
def test_a_pipeline_with_a_shuffle_is_shown_with_the_settings_that_stayed():
    def shuffled(knobs):
        return build(knobs).shuffle(30, seed=3).prefetch(knobs.prefetch)

    def orders(inspects):
        tuner = LoaderTuner(Once, cooperate_with_other_jobs=False)
        data = tunable_pipeline(shuffled, Knobs(2 * THREADS, 2, THREADS))
        fit(tuner, data)
        (move,) = tuner.moves
        assert move.refused is None
        if inspects:
            report = inspect(data, seconds=0.05, file=io.StringIO())
            assert report.stages[0].name == "Prefetch"
            assert report.stages[0].buffer_size == Once.other.prefetch
            assert report.bottleneck is not None
        return [features.numpy().tolist() for features, _ in data]

    assert orders(inspects=True) == orders(inspects=False)


@needs_model
def test_an_ordinary_dataset_that_was_read_continues_where_it_is():
    data = tf.data.Dataset.range(8).batch(2)
    iterator = iter(data)
    next(iterator)
    session = TuningSession(lambda plan, cpus, most: FixedController(plan))
    live = session.open(iterator)
    assert live.take(1)[0].numpy().tolist() == [2, 3]
    session.close()


@pytest.mark.full
@needs_model
@pytest.mark.parametrize(
    "draw",
    [
        lambda row: tf.random.uniform([], seed=3),
        lambda row: tf.random.stateless_uniform([], [1, tf.cast(row, tf.int32)]),
    ],
    ids=["stateful", "stateless"],
)
def test_a_pipeline_that_begins_in_its_own_threads_draws_the_same_values(draw):
    tf.random.set_seed(5)
    data = tf.data.Dataset.range(6).map(draw)
    expected = [[float(value) for value in data] for _ in range(3)]
    found = []
    for _ in range(3):
        session = TuningSession(lambda plan, cpus, most: FixedController(plan))
        live = session.open(iter(data))
        assert live.iterator is not live.given
        found.append([float(value) for value in live.take(6)])
        assert session.last_report().stages
        session.close()
    assert found == expected


@pytest.mark.quick("alone")
def test_each_move_is_in_the_log_and_is_printed_on_request(devices, caplog, capsys):
    tuner = LoaderTuner(Once, cooperate_with_other_jobs=False, verbose=1)
    with caplog.at_level(logging.INFO, "keras_het"):
        fit(tuner, tunable_pipeline(build, Knobs(2 * THREADS, 2, THREADS)), devices=devices)
    (move,) = tuner.moves
    found = re.findall(r"Loader at step (\d+): (.*)\.$", caplog.text, re.MULTILINE)
    assert [plan for _, plan in found] == [f"{THREADS + 2} loaders, prefetch 3 (on purpose)"]
    assert int(found[0][0]) >= move.step > 0
    printed = capsys.readouterr().out
    assert f"step {move.step}: {move.plan}\n" in printed
    assert str(tuner.best_settings()) in printed


def test_under_tensorflows_own_strategy_it_says_that_it_only_observes(logical_devices, caplog):
    class Inspects(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            with pytest.raises(RuntimeError, match=r"input of a distribution strategy .*Iterator"):
                tuner.inspect()

    with tf.distribute.MirroredStrategy(list(logical_devices[:2])).scope():
        model = dense()
    tuner = LoaderTuner(Once, cooperate_with_other_jobs=False)
    with caplog.at_level(logging.INFO, "keras_het"):
        model.fit(build(Knobs(2, 2, 2)).take(4), verbose=0, callbacks=[tuner, Inspects()])
    reason = "the data path of a distribution strategy cannot be changed while it runs"
    assert tuner.observe_only_reason == reason
    assert f"LoaderTuner only observes: {reason}" in caplog.text
    assert tuner.moves == []
    assert tuner.train_input_wait.steps == 4
    assert reason in tuner.best_settings().code


# --- what the host has


@pytest.fixture
def small_container(tmp_path, monkeypatch):
    """A host of eight CPUs, of which a quota leaves this process 3.2."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)), raising=False)
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "cpu.max").write_text("320000 100000\n")
    membership = tmp_path / "membership"
    membership.write_text("0::/own\n")
    within = functools.partial(usable_cpus, cgroups=tmp_path, membership=membership)
    for module in (tunable, tuning_session):
        monkeypatch.setattr(module, "usable_cpus", within)


def test_the_first_settings_keep_to_the_quota_of_a_container(small_container):
    assert Knobs.for_host() == Knobs(8, 2, 4)
    data = tunable_pipeline(build)
    assert data.knobs.threads == 4
    assert data.current.options().threading.private_threadpool_size == 4


def test_the_controller_knows_the_quota_of_a_container(small_container):
    made = []

    def make(plan, cpus):
        made.append((plan.loaders, cpus))
        return FixedController(plan)

    dense().fit(
        tunable_pipeline(build),
        verbose=0,
        callbacks=[LoaderTuner(make, cooperate_with_other_jobs=False)],
    )
    assert made == [(4, 3.2)]


@pytest.mark.parametrize(
    ("max_memory", "most"),
    [
        pytest.param(None, 100_000, id="a quarter by default"),
        pytest.param(50_000, 50_000, id="own"),
    ],
)
def test_the_ceiling_for_batches_reaches_the_controller(max_memory, most, monkeypatch):
    monkeypatch.setattr(loader_tuner, "available_memory", lambda: 400_000)
    tuner = LoaderTuner(max_memory=max_memory)
    controller = tuner._make_controller(LoaderPlan(16, 4), 2.0, None)
    window = LoaderWindow(10, 0.4, 0.3, idle_cpus=1.9, loader_cpu_seconds=0.01, batch_bytes=10_000)
    plan = controller.observe(window)
    assert f"at most {most} bytes" in plan.reason
    assert plan.loaders + plan.prefetch == most // 10_000


class MovesAtTheEnd(AtEveryStep):
    """Counts the moves behind the last step of an epoch, and once the epoch has ended."""

    def __init__(self, tuner):
        super().__init__(tuner, lambda: None)
        self.before, self.after = [], []

    def on_train_batch_end(self, batch, logs=None):
        super().on_train_batch_end(batch)
        if batch == self.params["steps"] - 1:
            self.before.append(len(self._tuner.moves))
            assert self._tuner._session.change is not None

    def on_epoch_end(self, epoch, logs=None):
        self.after.append(len(self._tuner.moves))


def test_no_pipeline_is_moved_between_two_epochs():
    class Last(FixedController):
        """Wants another plan after the last step but one of each epoch."""

        next_window = WindowSize(0, 29, 0.0)

        def __init__(self, plan, cpus=None):
            super().__init__(plan)

        def observe(self, window):
            self.next_window = WindowSize(0, 60, 0.0)
            return LoaderPlan(THREADS, 2, "on purpose")

    tuner = LoaderTuner(Last, cooperate_with_other_jobs=False)
    moves = MovesAtTheEnd(tuner)
    dense().fit(tunable_pipeline(build), epochs=1, verbose=0, callbacks=[tuner, moves])
    assert moves.before == moves.after == [0]
