"""Policies by name."""

from __future__ import annotations

import inspect
from typing import Any

from keras_het.planning.balance.boa import BoaPolicy
from keras_het.planning.balance.policy import (
    BalancePolicy,
    EvenPolicy,
    SharePolicy,
    StaticPolicy,
)

POLICIES: dict[str, type[SharePolicy]] = {
    policy.name: policy for policy in (BoaPolicy, EvenPolicy, StaticPolicy)
}


def make_policy(
    policy: str | BalancePolicy, num_replicas: int, global_batch_size: int, **options: Any
) -> BalancePolicy:
    """Return the policy with a name, or the given policy itself.

    Args:
        policy: a name, or an object with the methods of `BalancePolicy`, which is returned as is.
        num_replicas: number of replicas.
        global_batch_size: samples that shares sum to.
        **options: further arguments of the policy, such as `lower`, `upper` or `weights`.

    Returns:
        The policy.

    Raises:
        TypeError: if it is neither a name nor a policy, an option is unknown, or a policy object
            comes with options.
        ValueError: if there is no policy of this name, or the policy refuses an argument.
    """
    if isinstance(policy, str):
        if policy not in POLICIES:
            raise ValueError(
                f"There is no balance policy of this name. Received: policy={policy!r}. "
                f"Expected one of {sorted(POLICIES)}, or an object with the methods of "
                "BalancePolicy."
            )
        parameters = inspect.signature(POLICIES[policy]).parameters.values()
        settings = [each.name for each in parameters if each.kind is each.KEYWORD_ONLY]
        if unknown := sorted(set(options) - set(settings)):
            raise TypeError(
                f"These are no settings of the policy. Received: {unknown}. The policy {policy!r} "
                f"has {settings}."
            )
        return POLICIES[policy](num_replicas, global_batch_size, **options)
    if isinstance(policy, type) or not isinstance(policy, BalancePolicy):
        raise TypeError(
            "policy must be a name or an object with the methods of BalancePolicy (name, shares, "
            "observe, propose, set_upper, set_global_batch_size). "
            f"Received: {policy!r}. Names are {sorted(POLICIES)}."
        )
    if options:
        raise TypeError(
            f"A policy object brings its own settings. Received: {sorted(options)} besides "
            f"{policy!r}. Pass them to the policy itself."
        )
    return policy
