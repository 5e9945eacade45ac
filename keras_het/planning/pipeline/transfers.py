r"""Costs of the transfers between any two groups of devices, as the dynamic program sees them.

Micro-batches are spread evenly over all pairs of a sender and a taker. A transfer of b bytes takes
the mean of latency + b / rate over the pairs, forward and backward. A link carries all its pairs
one after the other; the busiest link has at most

.. math:: (M - 1) (\max_{link} \sum_{pairs} share \cdot latency
    + b \max_{link} \sum_{pairs} share / rate)

of work after its first micro-batch, in either direction.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from keras_het.planning.bounded_shares import FloatArray, IntArray
from keras_het.planning.pipeline.problem import Problem


class Transfers:
    """Costs of the transfers from each group to each other."""

    def __init__(self, problem: Problem, groups: Sequence[tuple[int, ...]]) -> None:
        self._more_batches = problem.micro_batches - 1
        cuts = list(problem.cuts)
        self._bytes = [problem.profile.cut_bytes[cuts], problem.profile.gradient_bytes[cuts]]
        hosts = np.array(problem.devices.hosts)
        members = np.zeros((len(groups), len(hosts)))
        for number, group in enumerate(groups):
            members[number, list(group)] = 1
        size = members.sum(axis=1)
        share = 1 / (size[:, None] * size)
        latency = problem.devices.latency_seconds
        with np.errstate(divide="ignore"):
            per_byte = 1 / problem.devices.bytes_per_second
        # Seconds and seconds per byte of each pair of groups, [G, G]; forward and backward.
        there = [(latency, per_byte), (latency.T, per_byte.T)]
        self._mean = [[share * (members @ t @ members.T) for t in tables] for tables in there]
        self._most = [[share * _busiest(members, hosts, t) for t in tables] for tables in there]

    def tables(self, sender: int, first: int) -> tuple[FloatArray, FloatArray]:
        """Return steady and latency from a group to all groups from `first` on, in seconds.

        Both are float64 of shape [G - first, Q], for every cut.
        """
        rows = slice(first, None)
        latency: FloatArray = np.zeros(())
        steady: FloatArray = np.zeros(())
        for crossing, mean, most in zip(self._bytes, self._mean, self._most, strict=True):
            any_bytes = crossing > 0
            once = mean[0][sender, rows, None] * any_bytes
            latency = latency + once + mean[1][sender, rows, None] * crossing
            once = most[0][sender, rows, None] * any_bytes
            steady = np.maximum(steady, once + most[1][sender, rows, None] * crossing)
        return self._more_batches * steady, latency


def _busiest(members: FloatArray, hosts: IntArray, table: FloatArray) -> FloatArray:
    """Return the sum of a table over the pairs of the link where it is greatest, float64 [G, G]."""
    most = np.zeros((len(members), len(members)))
    for host in np.unique(hosts):
        inside = table * ((hosts == host)[:, None] & (hosts == host))
        from_group = np.array([inside[group > 0].max(axis=0) for group in members])
        for number, group in enumerate(members):
            most[:, number] = np.maximum(most[:, number], from_group[:, group > 0].max(axis=1))
        for other in np.unique(hosts):
            if other != host:
                sums = (members * (hosts == host)) @ table @ (members * (hosts == other)).T
                most = np.maximum(most, sums)
    return most
