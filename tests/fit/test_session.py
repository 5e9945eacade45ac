"""A session knows its call of Keras, and its layers are around every step of that alone."""

import functools
import sys
import warnings
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_het
from keras_het.fit.session import FitSession, Rank, ShorterEpochs
from keras_het.strategy.keras_calls import SessionCallback

X = np.ones((8, 3), "float32")
Y = X[:, :1]
STEPS = 4


@pytest.fixture
def model():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


class Layers(SessionCallback):
    """Puts layers around the steps that note their names, and acts where it is told to.

    Args:
        names: of the layers, by their ranks.
        acts: method of a callback to what it does with the model.
    """

    def __init__(self, names, **acts):
        super().__init__()
        self.names, self.notes, self.sessions = names, [], []
        for place, act in acts.items():
            setattr(self, place, lambda *_, act=act, **logs: act(self.model))

    def on_train_begin(self, logs=None):
        session = FitSession.of(self.model)
        self.sessions.append(session)
        session.on_end(lambda: self.notes.append("end"))
        for rank, name in self.names.items():
            session.add_layer(rank, functools.partial(self.note, name))

    def note(self, name, step, batches):
        self.notes.append(name)
        return step(batches)


def fit(model, *callbacks, **options):
    return model.fit(X, Y, batch_size=2, verbose=0, callbacks=list(callbacks), **options)


def test_layers_stand_in_the_order_of_their_ranks(model):
    layers = Layers({Rank.NOTE_MEMORY: "inner", Rank.VALIDATE_DATA: "outer"})
    fit(model, layers, epochs=2)
    assert layers.notes == [*["outer", "inner"] * 2 * STEPS, "end"]
    assert layers.sessions[0].is_over and FitSession.of(model) is None
    fit(model)
    assert layers.notes[-1] == "end"


def replace_by_what_hides(model):
    inner = model.train_function

    def hides(batches):
        hides.calls += 1
        return inner(batches)

    hides.calls = 0
    model.train_function = hides


def put_back(model):
    original, model.train_function = model.train_function, None
    model.train_function = original


@pytest.mark.quick(
    "made again-on_train_batch_begin", "hidden-on_epoch_begin", "put back-on_train_batch_end"
)
@pytest.mark.parametrize("place", ["on_epoch_begin", "on_train_batch_begin", "on_train_batch_end"])
@pytest.mark.parametrize(
    "replace",
    [lambda model: model.make_train_function(force=True), replace_by_what_hides, put_back],
    ids=["made again", "hidden", "put back"],
)
def test_a_step_function_that_is_replaced_stays_within_the_layers(model, replace, place):
    layers = Layers({Rank.NOTE_MEMORY: "layer"}, **{place: replace})
    fit(model, layers)
    assert layers.notes == [*["layer"] * STEPS, "end"]
    before, calls = list(layers.notes), getattr(model.train_function, "calls", None)
    fit(model)
    assert layers.notes == before
    assert calls is None or model.train_function.calls == calls + STEPS, "what hides stays"


@pytest.mark.quick("train_on_batch", "fit")
@pytest.mark.parametrize(
    "act",
    [
        lambda model: model.train_on_batch(X, Y),
        lambda model: fit(model),
        lambda model: model.evaluate(X, Y, verbose=0),
        lambda model: model.predict(X, verbose=0),
    ],
    ids=["train_on_batch", "fit", "evaluate", "predict"],
)
def test_what_callbacks_call_has_sessions_of_its_own(model, act):
    layers = Layers({Rank.NOTE_MEMORY: "layer"}, on_train_batch_end=act, on_epoch_end=act)
    fit(model, layers, validation_data=(X, Y))
    assert layers.notes == [*["layer"] * STEPS, "end"]


def fail(model):
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    "place",
    ["on_epoch_begin", "on_train_batch_begin", "on_train_batch_end", "on_test_begin"],
)
def test_a_session_ends_with_an_error(model, place):
    layers = Layers({Rank.NOTE_MEMORY: "layer"}, **{place: fail})
    with pytest.raises(KeyboardInterrupt):
        fit(model, layers, validation_data=(X, Y))
    assert layers.notes[-1] == "end" and FitSession.of(model) is None
    before = list(layers.notes)
    fit(model)
    assert layers.notes == before


def test_an_end_that_fails_hinders_no_other(model):
    layers = Layers({})

    class Fails(SessionCallback):
        def on_train_begin(self, logs=None):
            FitSession.of(self.model).on_end(lambda: 1 / 0)

    with pytest.raises(ZeroDivisionError):
        fit(model, layers, Fails())
    assert layers.notes == ["end"] and FitSession.of(model) is None


def test_a_session_may_refuse_one_within_it(model):
    def refuse(inner):
        if inner.loop == "fit":
            raise RuntimeError(f"no {inner.loop} here")

    class Refuses(SessionCallback):
        def on_train_begin(self, logs=None):
            FitSession.of(self.model).before_inner(refuse)

        def on_train_batch_end(self, batch, logs=None):
            self.model.predict(X, verbose=0)

        def on_epoch_end(self, epoch, logs=None):
            fit(self.model)

    with pytest.raises(RuntimeError, match="no fit here"):
        fit(model, Refuses())
    assert FitSession.of(model) is None


def test_a_session_knows_the_users_callbacks(model):
    layers, other = Layers({}), keras.callbacks.Callback()
    fit(model, layers, other)
    model.fit(X, Y, 2, 1, 0, [layers])
    model.fit(X, Y, verbose=0, callbacks=keras.callbacks.CallbackList([layers], model=model))
    first, second, third = (session.callbacks for session in layers.sessions)
    assert first == [layers, other] and second == [layers] and layers in third


def test_layers_come_and_go_while_the_training_runs(model):
    class Once(SessionCallback):
        calls = 0

        def on_train_batch_begin(self, batch, logs=None):
            if batch == 1:
                FitSession.of(self.model).add_layer(Rank.NOTE_MEMORY, self.layer)

        def on_train_batch_end(self, batch, logs=None):
            if batch == 2:
                FitSession.of(self.model).remove_layer(Rank.NOTE_MEMORY)

        def layer(self, step, batches):
            self.calls += 1
            return step(batches)

    once = Once()
    fit(model, once)
    assert once.calls == 2


def test_steps_of_several_batches(model):
    model.compile("sgd", "mse", steps_per_execution=2)
    layers = Layers({Rank.NOTE_MEMORY: "layer"})
    fit(model, layers)
    assert layers.notes == [*["layer"] * (STEPS // 2), "end"]


class SeesFirst(SessionCallback):
    """Has a word before all other callbacks."""

    def on_train_begin(self, logs=None):
        session = self._required_session()
        session.before_callbacks("on_epoch_end", lambda epoch, logs: logs.update(added=epoch))
        session.before_callbacks("on_train_end", lambda logs: logs.update(ended=True))


class Looks(keras.callbacks.Callback):
    """Keeps what it was told."""

    def __init__(self):
        super().__init__()
        self.epochs, self.end = [], None

    def on_epoch_end(self, epoch, logs=None):
        self.epochs.append(dict(logs))

    def on_train_end(self, logs=None):
        self.end = dict(logs)


@pytest.mark.quick("False-True", "True-False")
@pytest.mark.parametrize("as_list", [True, False])
@pytest.mark.parametrize("is_first", [True, False])
def test_what_comes_before_callbacks_comes_before_all(model, is_first, as_list):
    looks = Looks()
    callbacks = [SeesFirst(), looks] if is_first else [looks, SeesFirst()]
    given = callbacks
    if not as_list:
        given = keras.callbacks.CallbackList(callbacks, add_history=True, model=model)
    for _ in range(2):
        looks.epochs.clear()
        model.fit(X, Y, epochs=2, verbose=0, callbacks=given)
        assert [logs["added"] for logs in looks.epochs] == [0, 1]
        assert looks.end["ended"]
    if not as_list:
        assert given.callbacks[:2] == callbacks


def test_one_that_needs_a_session_says_so(model):
    callback = SeesFirst()
    callback.set_model(model)
    with pytest.raises(RuntimeError, match="SeesFirst works within fit"):
        callback.on_train_begin()


def test_a_steady_step_passes_few_files(logical_devices):
    """A newcomer can read what a batch goes through."""
    folder = str(Path(keras_het.__file__).parent)
    files = set()

    def note(frame, event, arg):
        del arg
        if event == "call" and frame.f_code.co_filename.startswith(folder):
            files.add(frame.f_code.co_filename)

    class Watch(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            del logs
            sys.setprofile(note if batch == 9 else None)

    strategy = keras_het.HeterogeneousStrategy(devices=logical_devices[:2])
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    rows = np.ones((96, 4), np.float32)
    data = tf.data.Dataset.from_tensor_slices((rows, rows[:, :1])).batch(8)
    before = sys.getprofile()
    try:
        model.fit(data, callbacks=[Watch()], verbose=0)
    finally:
        sys.setprofile(before)
    assert 1 <= len(files) <= 8, sorted(files)


def warns():
    """Whether Keras's warning comes through, among others that always do."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.warn("Your input ran out of data; interrupting training.", stacklevel=1)
        warnings.warn("Something else", stacklevel=1)
    messages = [str(each.message) for each in caught]
    assert "Something else" in messages
    return len(messages) == 2


@pytest.fixture
def everything_warns():
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        yield


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_the_last_one_to_end_lets_it_through(everything_warns, order):
    both = [ShorterEpochs(), ShorterEpochs()]
    before = list(warnings.filters)
    assert warns()
    for each in both:
        each.expect()
        assert not warns()
    assert both[order[0]].end()
    assert not warns()
    assert both[order[1]].end()
    assert warns()
    assert list(warnings.filters) == before


def test_to_expect_twice_is_to_expect_once(everything_warns):
    epochs = ShorterEpochs()
    epochs.expect()
    epochs.expect()
    assert epochs.end() and not epochs.end()
    assert warns()
