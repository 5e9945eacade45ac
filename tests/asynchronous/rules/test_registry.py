"""Rules by name, config and instance."""

import json

import keras
import pytest

from keras_het import rules
from keras_het.rules import AsyncSGD, Delta, DiLoCo, RoundRobinEASGD, SyncEASGD


def test_by_name_and_an_instance_stays_itself():
    for identifier in ("delta", "Delta", Delta, {"class_name": "delta"}):
        assert isinstance(rules.get(identifier), Delta)
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
    rule = AsyncSGD(optimizer=keras.optimizers.Adam(schedule, beta_1=0.7), staleness_damping=True)
    config = json.loads(json.dumps(rules.serialize(rule)))
    copy = rules.get(config)
    assert rules.serialize(copy) == rules.serialize(rule)
    assert config["config"]["optimizer"]["config"]["beta_1"] == pytest.approx(0.7)


@pytest.mark.parametrize("identifier", ["downpour", {"class_name": "downpour"}, {}])
def test_unknown_names_list_the_known(identifier):
    with pytest.raises(ValueError, match=r"'async_easgd', 'async_measgd', .*, 'sync_easgd'"):
        rules.get(identifier)


COMPENSATED = {"learning_rate": 0.1, "compensation": 1.0, "num_workers": 2}


@pytest.mark.parametrize(
    ("name", "settings", "match"),
    [
        ("delta", {"alpha": 1}, r"unknown \['alpha'\], missing \[\]"),
        ("delta", {"scale": 0}, "scale must be a number above 0"),
        ("delta", {"scale": -1.0}, "scale must be a number above 0"),
        ("round_robin_easgd", {}, r"missing \['num_workers'\]"),
        ("async_easgd", {"alpha": 0}, "above 0"),
        ("async_easgd", {"alpha": 0.1, "learning_rate": 3}, "at least 0 and of at most 2"),
        ("sync_easgd", {"num_workers": 2, "period": 0, "overlap": 0}, "period must"),
        ("sync_easgd", {"num_workers": 2, "period": 2, "overlap": 3}, "at most 2"),
        ("sync_easgd", {"num_workers": 2, "period": 1, "overlap": -1}, "at least 0"),
        ("delay_compensated", {}, "missing .*'compensation'"),
        ("delay_compensated", {**COMPENSATED, "learning_rate": 0.0}, "learning_rate must"),
        ("delay_compensated", {**COMPENSATED, "compensation": -1.0}, "compensation must"),
        ("delay_compensated", {**COMPENSATED, "num_workers": 0}, "num_workers must"),
        ("delay_compensated", {**COMPENSATED, "decay": 1.0}, "below 1"),
        ("delay_compensated", {**COMPENSATED, "decay": -0.1}, "at least 0"),
        ("delayed_nesterov", {"num_workers": 3, "period": 0}, "Received: .*period=0"),
        ("delayed_nesterov", {"num_workers": 0}, "Received: .*num_workers=0"),
        ("delayed_nesterov", {"num_workers": 3, "learning_rate": 0}, "Received: learning_rate=0"),
        ("delayed_nesterov", {"num_workers": 3, "momentum": 1}, "momentum=1"),
        ("diloco", {"period": 0}, "period must be a whole number of at least 1"),
        ("diloco", {"period": 5, "overlap": 6}, "at most 5"),
        ("diloco", {"period": 5, "learning_rate": 0}, "learning_rate must be a number above 0"),
        ("diloco", {"period": 5, "momentum": 1}, "at least 0 and below 1"),
        ("async_sgd", {}, "either a learning_rate"),
        ("async_sgd", {"learning_rate": 0.1, "optimizer": "adam"}, "either a learning_rate"),
        ("async_sgd", {"learning_rate": 0}, "learning_rate must"),
        ("async_sgd", {"learning_rate": 0.1, "momentum": 1}, "below 1"),
        ("async_sgd", {"optimizer": "adam", "momentum": 0.5}, "beside an optimizer"),
        (
            "async_sgd",
            {"learning_rate": 0.1, "reference_batch_size": 0},
            "reference_batch_size must",
        ),
        ("async_sgd", {"learning_rate": 0.1, "warmup_pushes": 5}, "without reference_batch_size"),
    ],
)
def test_settings_that_do_not_fit(logical_devices, name, settings, match):
    with pytest.raises(ValueError, match=match):
        rules.get({"class_name": name, "config": settings})


@pytest.mark.parametrize("identifier", [None, 3, SyncEASGD.__module__.encode(), int])
def test_other_things(identifier):
    with pytest.raises(TypeError, match="a name, a dict with class_name and config"):
        rules.get(identifier)


def test_a_rule_of_ones_own_has_a_name_of_its_own(monkeypatch):
    monkeypatch.setattr(rules.registry, "RULES", rules.RULES.copy())

    def define(name):
        return rules.register_rule(type("Half", (Delta,), {"name": name}))

    for _ in range(2):  # a cell of a notebook that runs again
        half = define("half")
        assert type(rules.get("half")) is type(rules.get("Half")) is half
        assert rules.serialize(rules.get({"class_name": "half", "config": {"scale": 2.0}})) == {
            "class_name": "half",
            "config": {"scale": 2.0},
        }
    with pytest.raises(ValueError, match=r"Delta has this name already\. Received: name='d"):
        define("delta")
    with pytest.raises(ValueError, match="must be a subclass of UpdateRule or SynchronousRule"):
        rules.register_rule(Delta())


class Clipped(Delta):
    name = "clipped"

    def __init__(self, scale: float = 1.0, most: float = 9.0) -> None:
        super().__init__(scale)
        self.most = most


class Complete(Clipped):
    settings = ("scale", "most")


class OwnConfig(Clipped):
    def get_config(self):
        return {"scale": self.scale, "most": self.most}


def test_a_registered_rule_is_made_again_with_all_its_settings(monkeypatch):
    monkeypatch.setattr(rules.registry, "RULES", rules.RULES.copy())
    with pytest.raises(ValueError, match=r"settings=\('scale',\), which lack \['most'\]"):
        rules.register_rule(Clipped)
    with pytest.raises(ValueError, match=r"needs a name\. Received: Nameless\.name=None"):
        rules.register_rule(type("Nameless", (rules.UpdateRule,), {}))
    for kind in (Complete, OwnConfig):
        monkeypatch.setitem(rules.registry.RULES, "clipped", kind)
        again = rules.get(rules.serialize(rules.register_rule(kind)(0.5, most=1.0)))
        assert (type(again), again.scale, again.most) == (kind, 0.5, 1.0)


@pytest.mark.parametrize("name", rules.RULES)
def test_settings_name_all_arguments_of_published_rules(name):
    assert rules.register_rule(rules.RULES[name]) is rules.RULES[name]
