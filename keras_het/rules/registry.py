"""Rules by name, like the layers and optimizers of Keras."""

from __future__ import annotations

import inspect
from typing import Any, TypeVar

from keras_het.planning.argument_checks import expect
from keras_het.rules.async_sgd import AsyncSGD, DelayCompensated
from keras_het.rules.diloco import DelayedNesterov, DiLoCo
from keras_het.rules.elastic_averaging import (
    AsyncEASGD,
    AsyncMEASGD,
    ElasticAveraging,
    HogwildEASGD,
    RoundRobinEASGD,
    SyncEASGD,
)
from keras_het.rules.update_rule import Delta, Rule

RuleClass = TypeVar("RuleClass", bound=type[Rule])
RULES: dict[str, type[Rule]] = {
    rule.name: rule
    for rule in (
        AsyncEASGD,
        AsyncMEASGD,
        AsyncSGD,
        DelayCompensated,
        DelayedNesterov,
        Delta,
        DiLoCo,
        ElasticAveraging,
        HogwildEASGD,
        RoundRobinEASGD,
        SyncEASGD,
    )
}
"""Map from name to class of the published rules in this package, and of registered ones."""


def register_rule(rule: RuleClass) -> RuleClass:
    """Register a custom rule under its name; a decorator.

    `AsyncWorkers(rule=name)` and `get` find it then, and so do tasks that run no script, with
    `keras-het parameter-server --import MODULE`.

    Args:
        rule: a subclass of `UpdateRule` or `SynchronousRule`.

    Returns:
        The rule.

    Raises:
        ValueError: if it is not a rule, has no name, or another rule has it; or if `settings` lacks
            an argument of its constructor.
    """
    is_rule = isinstance(rule, type) and issubclass(rule, Rule)
    expect(is_rule, "a subclass of UpdateRule or SynchronousRule", rule=rule)
    given = getattr(rule, "name", None)
    if not (isinstance(given, str) and given):
        raise ValueError(
            f"A registered rule needs a name. Received: {rule.__name__}.name={given!r}. Give the "
            'class an attribute such as name = "own_rule".'
        )
    # from `settings` a task that runs no script makes the rule again
    forgotten = [each for each in inspect.signature(rule).parameters if each not in rule.settings]
    if forgotten and rule.get_config is Rule.get_config:
        raise ValueError(
            f"`settings` must name all arguments of the constructor. Received: {rule.__name__} "
            f"with settings={rule.settings!r}, which lack {forgotten}. Add them, and keep each as "
            "an attribute of the same name; or define get_config and from_config."
        )
    known = RULES.setdefault(rule.name, rule)
    # a cell of a notebook that runs again defines the class again
    is_free = (known.__module__, known.__qualname__) == (rule.__module__, rule.__qualname__)
    if not is_free:
        raise ValueError(
            f"{known.__name__} has this name already. Received: name={rule.name!r} of "
            f"{rule.__name__}. Give it another name."
        )
    RULES[rule.name] = rule
    return rule


def get(
    identifier: str | dict[str, Any] | type[Rule] | Rule, num_workers: int | None = None
) -> Rule:
    """Return a rule from its name, its config or itself.

    Args:
        identifier: a name ("delta") or class name ("Delta") for a rule with its defaults; a dict
            {"class_name": name, "config": {...}}; a class; or a rule, which is returned.
        num_workers: number of workers, for rules whose settings need it but lack it.

    Returns:
        The rule.

    Raises:
        ValueError: if there is no such rule, or its settings do not fit.
        TypeError: if the identifier has another type.
    """
    if isinstance(identifier, Rule):
        return identifier
    if isinstance(identifier, dict):
        kind, config = _find(identifier.get("class_name")), dict(identifier.get("config") or {})
    elif isinstance(identifier, str):
        kind, config = _find(identifier), {}
    elif isinstance(identifier, type) and issubclass(identifier, Rule):
        kind, config = identifier, {}
    else:
        raise TypeError(
            "An update rule must be a name, a dict with class_name and config, a class or an "
            f"instance. Received: rule={identifier!r} of type {type(identifier).__name__}."
        )
    return _create(kind, config, num_workers)


def serialize(rule: Rule) -> dict[str, Any]:
    """Return plain values from which `get` makes an equal rule.

    Args:
        rule: the rule.
    """
    return {"class_name": rule.name, "config": rule.get_config()}


def _find(name: str | None) -> type[Rule]:
    by_class_name = {rule.__name__: rule for rule in RULES.values()}
    found = RULES.get(name or "") or by_class_name.get(name or "")
    if found is None:
        raise ValueError(
            f"There is no update rule of this name. Received: rule={name!r}. Expected one of "
            f"{sorted(RULES)}, or one given to register_rule (by keras-het parameter-server: "
            "--import MODULE)."
        )
    return found


def _create(kind: type[Rule], config: dict[str, Any], num_workers: int | None) -> Rule:
    parameters = inspect.signature(kind).parameters
    needs_number = "num_workers" in parameters and config.get("num_workers") is None
    if num_workers is not None and needs_number:
        config["num_workers"] = num_workers
    unknown = sorted(set(config) - set(parameters))
    missing = [
        name
        for name, parameter in parameters.items()
        if parameter.default is inspect.Parameter.empty and name not in config
    ]
    if unknown or missing:
        raise ValueError(
            f"The settings do not fit the update rule {kind.name}. Received: unknown "
            f"{unknown}, missing {missing}. It takes {list(parameters)}; give the rule itself or "
            "a dict with class_name and config."
        )
    return kind.from_config(config)
