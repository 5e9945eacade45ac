"""Refuses variables that the replicas of a worker would share instead of having one each.

A layer that was built outside of `strategy.scope()` has plain variables. Each local replica would
apply the gradient of all of them to the same one: two replicas, twice the learning rate.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from keras_het import private_api

_MOST_NAMES = 5


def check_created_in_scope(strategy: Any, variables: Sequence[Any]) -> None:
    """Raises an error if variables that the step changes are not the strategy's own.

    One local replica is the only one that changes them, and may, where no worker has several: all
    workers must come to the same end.

    Args:
        strategy: the `HeterogeneousStrategy`.
        variables: Keras's or TensorFlow's.
    """
    most = max(strategy.layout.replicas_per_worker)
    if most == 1:
        return
    shared = [_name(variable) for variable in variables if not _is_own(strategy, variable)]
    if not shared:
        return
    more = f" and {len(shared) - _MOST_NAMES} more" if len(shared) > _MOST_NAMES else ""
    raise ValueError(
        "Variables that a step changes must have been created in strategy.scope(): otherwise each "
        f"of the {most} replicas of a worker updates the same one. Received: "
        f"{', '.join(shared[:_MOST_NAMES])}{more}, created outside of it. Create or load the model "
        "and its layers in `with strategy.scope():`, and call `enable_lora` and the like there too."
    )


def _is_own(strategy: Any, variable: Any) -> bool:
    is_of_keras = isinstance(variable, private_api.KerasTensorFlowVariable)
    value = variable.value if is_of_keras else variable
    return bool(strategy.extended.variable_created_in_scope(value))


def _name(variable: Any) -> str:
    return str(getattr(variable, "path", None) or variable.name)
