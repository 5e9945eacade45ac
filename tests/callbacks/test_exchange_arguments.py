"""Arguments that `AsyncWorkers` and `LocalTraining` refuse."""

import inspect
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from small_training import data, flat, make_model

import keras_het
from keras_het.callbacks import AsyncWorkers, BucketTuner, LocalTraining, local_training
from keras_het.fit.model_strategy import tell
from keras_het.rules import AsyncSGD, DiLoCo


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        *(({"rule": each}, "LocalTraining") for each in ("diloco", "sync_easgd")),
        ({"period": "auto", "rule": "round_robin_easgd"}, 'period="auto" needs a rule'),
        ({"top_k_ratio": 0.1, "rule": "async_easgd"}, "would count as 0"),
        ({"profile_steps": 257}, r"profile_steps must be a whole number .* at most 256"),
        ({"rule": AsyncSGD(0.1), "on_service_loss": "continue"}, "their own optimizer"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        AsyncWorkers(**arguments)


@pytest.mark.parametrize("name", ["delta", "round_robin_easgd", "async_sgd"])
def test_asynchronous_rules_are_refused(name: str) -> None:
    config = {"learning_rate": 0.1} if name == "async_sgd" else {}
    with pytest.raises(ValueError, match="all workers exchange at once"):
        LocalTraining({"class_name": name, "config": config})


@pytest.mark.quick("LocalTraining", "BucketTuner")
@pytest.mark.parametrize("make", [LocalTraining, AsyncWorkers, BucketTuner])
def test_one_worker_alone_trains_as_without_what_exchanges(
    logical_devices: list[str], caplog: pytest.LogCaptureFixture, make: Any
) -> None:
    trained = []
    for callbacks in ([], [make()]):
        model = make_model(keras_het.HeterogeneousStrategy(logical_devices[:1]))
        for _ in range(2):  # the next fit, too
            caplog.clear()
            model.fit(data(), epochs=2, validation_data=data(), verbose=0, callbacks=callbacks)
            told = [each for each in caplog.messages if "there is nothing to exchange" in each]
            assert len(told) == len(callbacks)
        trained.append(flat(model))
    np.testing.assert_array_equal(*trained)


def test_the_rule_of_a_name_takes_a_period() -> None:
    callback = LocalTraining("diloco", period=10)
    rule = local_training._synchronous(callback._rule, num_workers=2)
    assert (rule.name, rule.period, rule.overlap) == ("diloco", 10, 0)


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"perod": 10}, TypeError, "unexpected keyword argument 'perod'"),
        ({"rule": DiLoCo(period=5), "period": 10}, TypeError, "brings its own period"),
        ({"rule": {"class_name": "diloco"}, "period": 10}, TypeError, "brings its own period"),
    ],
)
def test_wrong_settings(arguments: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        LocalTraining(**arguments)


@pytest.mark.parametrize(
    ("devices", "hint"),
    [
        ([4, 2, 1], r"Did you mean share_weights=\[4, 2, 1\]"),
        ("CPU:0", r"Did you mean devices=\['CPU:0'\]"),
    ],
)
def test_devices_that_are_no_list_of_names(devices: Any, hint: str) -> None:
    with pytest.raises(TypeError, match=hint):
        keras_het.HeterogeneousStrategy(devices)


def test_a_strategy_shows_its_worker_devices_and_shares(logical_devices: list[str]) -> None:
    strategy = keras_het.HeterogeneousStrategy(logical_devices[:2], share_weights=[3, 1])
    shown = "<HeterogeneousStrategy: worker 0 of 1, devices [CPU:0, CPU:1] here, shares [3, 1]>"
    assert repr(strategy) == shown


@pytest.mark.parametrize("verbose", [0, 1])
def test_what_a_callback_tells(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, verbose: int
) -> None:
    caplog.set_level("INFO", "keras_het")
    tell("a plan", SimpleNamespace(is_chief=True), verbose)
    tell("a plan", SimpleNamespace(is_chief=False), verbose)
    assert capsys.readouterr().out == ("\na plan\n" if verbose else "")
    assert caplog.messages == ["a plan", "a plan"]


def test_every_callback_takes_verbose() -> None:
    for name in keras_het.callbacks.__all__:
        callback = getattr(keras_het.callbacks, name)
        assert "verbose" in inspect.signature(callback).parameters, name
