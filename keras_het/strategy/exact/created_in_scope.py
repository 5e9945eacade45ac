"""Refusal of variables that the replicas of a worker would share instead of having one each.

A layer built outside of `strategy.scope()` has plain variables. Every local replica would apply the
gradient of all replicas to the same variable: two replicas, twice the learning rate.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from keras_het import private_api
from keras_het.fit.model_strategy import OwnStrategy
from keras_het.value_types import EitherVariable

if TYPE_CHECKING:
    from keras_het.strategy.heterogeneous_strategy import HeterogeneousStrategy

_MOST_NAMES = 5


def check_created_in_scope(
    strategy: HeterogeneousStrategy, variables: Sequence[EitherVariable]
) -> None:
    """Raise an error if the step changes variables that are not the strategy's own."""
    # A single local replica may change them if no worker has several: all reach the same verdict.
    most = max(strategy.layout.replicas_per_worker)
    shared = [_name(variable) for variable in variables if is_shared(strategy, variable)]
    if not shared:
        return
    more = f" and {len(shared) - _MOST_NAMES} more" if len(shared) > _MOST_NAMES else ""
    raise ValueError(
        "Variables that a step changes must have been created in strategy.scope(): otherwise each "
        f"of the {most} replicas of a worker updates the same one. Received: "
        f"{', '.join(shared[:_MOST_NAMES])}{more}, created outside of it. Create or load the model "
        "and its layers in `with strategy.scope():`, and call `enable_lora` and the like there too."
    )


def is_shared(strategy: HeterogeneousStrategy, variable: EitherVariable) -> bool:
    """Tell whether the replicas of a worker share one variable, made outside of the scope."""
    return max(strategy.layout.replicas_per_worker) > 1 and not _is_own(strategy, variable)


def explain_scope_errors() -> None:
    """Say what to do where TensorFlow names its internals; for our strategies, call it once."""
    variable = private_api.distribute_values.DistributedVariable
    for name in ("_wrong_strategy_scope", "_assert_strategy"):
        check = getattr(private_api.distribute_lib, name)
        setattr(private_api.distribute_lib, name, _explained(check, RuntimeError, _mixed))
    variable.handle = property(_explained(variable.handle.fget, ValueError, _without_replica))


def _explained(
    function: Callable[..., Any], kind: type[Exception], explain: Callable[[Any], str | None]
) -> Callable[..., Any]:
    @functools.wraps(function)
    def explained(subject: Any, *arguments: object) -> Any:
        try:
            return function(subject, *arguments)
        except kind:
            if (message := explain(subject)) is None:
                raise
        raise kind(message)

    return explained


def _mixed(strategy: tf.distribute.Strategy) -> str | None:
    pair = (strategy, tf.distribute.get_strategy())
    if not any(isinstance(each, OwnStrategy) for each in pair):
        return None
    names = [
        str(each) if isinstance(each, OwnStrategy) else type(each).__name__.lstrip("_")
        for each in pair
    ]
    return (
        "A model, its optimizer and its metrics must belong to one strategy. Received: one of "
        f"{names[0]} where {names[1]} is in use. Create and compile all of them in the same "
        "`with strategy.scope():`, and train with model.fit or in strategy.run of that strategy."
    )


def _without_replica(variable: tf.Variable) -> str | None:
    if not isinstance(variable.distribute_strategy, OwnStrategy):
        return None
    return (
        "Gradients are taken by each replica. Received: a gradient or update of "
        f"{variable.name} in strategy.scope(), but not in strategy.run. Make the step a function "
        "and call strategy.run(step, args=...), or train with model.fit."
    )


def move_optimizer(strategy: HeterogeneousStrategy, model: keras.Model) -> None:
    """Let an optimizer made outside of the scope update variables created in it."""
    for optimizer in _optimizers(getattr(model, "optimizer", None)):
        private_api.move_optimizer(optimizer, strategy)


def adopt_compiled(strategy: HeterogeneousStrategy, model: keras.Model) -> None:
    """Make the variables of a model's optimizer and metrics the strategy's own, keeping values."""
    # Otherwise every replica would count its steps and samples in the same variable.
    holders = [*_optimizers(getattr(model, "optimizer", None)), *model.metrics]
    variables = {id(each): each for holder in holders for each in holder.variables}
    outside = [each for each in variables.values() if not _is_own(strategy, each)]
    if outside:
        with tf.init_scope(), strategy.scope():
            for variable in outside:
                private_api.recreate_variable(variable)


def _optimizers(optimizer: object) -> list[keras.optimizers.Optimizer]:
    """An optimizer and those nested inside it."""
    if not isinstance(optimizer, private_api.keras_base_optimizer.BaseOptimizer):
        return []
    return [optimizer, *_optimizers(getattr(optimizer, "inner_optimizer", None))]


def _is_own(strategy: HeterogeneousStrategy, variable: EitherVariable) -> bool:
    is_of_keras = isinstance(variable, private_api.KerasTensorFlowVariable)
    value = variable.value if is_of_keras else variable
    return bool(strategy.extended.variable_created_in_scope(value))


def _name(variable: EitherVariable) -> str:
    return str(getattr(variable, "path", None) or variable.name)
