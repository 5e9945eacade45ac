"""Rules by name, config and instance."""

import json

import keras
import pytest

from keras_het.asynchronous import rules
from keras_het.asynchronous.rules import AsyncSGD, Delta, DiLoCo, RoundRobinEASGD, SyncEASGD


def test_names_are_the_published_ones():
    assert sorted(rules.RULES) == [
        "ashl",
        "async_easgd",
        "async_measgd",
        "async_sgd",
        "delay_compensated",
        "delta",
        "diloco",
        "elastic_averaging",
        "hogwild_easgd",
        "round_robin_easgd",
        "streaming_diloco",
        "sync_easgd",
    ]


@pytest.mark.parametrize("identifier", ["delta", "Delta", Delta, {"class_name": "delta"}])
def test_by_name(identifier):
    assert isinstance(rules.get(identifier), Delta)


def test_an_instance_stays_itself():
    for rule in (Delta(0.5), DiLoCo(5)):
        assert rules.get(rule) is rule


def test_number_of_workers_is_filled_in_where_it_is_needed():
    assert rules.get("sync_easgd", num_workers=4).alpha == pytest.approx(0.225)
    assert rules.get(RoundRobinEASGD, num_workers=3).num_workers == 3
    assert rules.get("delta", num_workers=4).scale == 1
    own = {"class_name": "SyncEASGD", "config": {"num_workers": 2}}
    assert rules.get(own, num_workers=4).num_workers == 2
    assert own["config"] == {"num_workers": 2}


def test_config_of_an_optimizer_is_plain(logical_devices):
    schedule = keras.optimizers.schedules.CosineDecay(0.1, 50)
    rule = AsyncSGD(optimizer=keras.optimizers.Adam(schedule, beta_1=0.7), damps_staleness=True)
    config = json.loads(json.dumps(rules.serialize(rule)))
    copy = rules.get(config)
    assert rules.serialize(copy) == rules.serialize(rule)
    assert config["config"]["optimizer"]["config"]["beta_1"] == pytest.approx(0.7)


@pytest.mark.parametrize("identifier", ["downpour", {"class_name": "downpour"}, {}])
def test_unknown_names_list_the_known(identifier):
    with pytest.raises(ValueError, match=r"Known rules: ashl, async_easgd, .*, sync_easgd"):
        rules.get(identifier)


@pytest.mark.parametrize(
    ("identifier", "match"),
    [
        ({"class_name": "delta", "config": {"alpha": 1}}, r"unknown \['alpha'\], missing \[\]"),
        ("round_robin_easgd", r"missing \['num_workers'\]"),
        ("delay_compensated", "missing .*'compensation'"),
    ],
)
def test_settings_that_do_not_fit(identifier, match):
    with pytest.raises(ValueError, match=match):
        rules.get(identifier)


@pytest.mark.parametrize("identifier", [None, 3, SyncEASGD.__module__.encode(), int])
def test_other_things(identifier):
    with pytest.raises(TypeError, match="a name, a dict with class_name and config"):
        rules.get(identifier)
