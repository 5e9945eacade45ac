"""How many workers a group can have now."""

from __future__ import annotations

import socket
from typing import Any

import ray
from ray._private.state import state
from ray.train.v2._internal.execution.scaling_policy.elastic import ElasticScalingPolicy

_SECONDS_TO_ANSWER = 2.0


class PresentNodes(ElasticScalingPolicy):
    """Ray Train's policy, without nodes that are gone or about to leave.

    What Ray has reserved may be 20 seconds old, and a group that asks for a lost node waits in
    vain.
    """

    def _count_possible_workers(self, reserved_resources: dict[str, Any]) -> int:
        leaving = state.get_draining_nodes()
        present = {each["NodeID"] for each in ray.nodes() if _answers(each)} - set(leaving)
        return super()._count_possible_workers(
            {node: held for node, held in reserved_resources.items() if node in present}
        )


def _answers(node: dict[str, Any]) -> bool:
    """Whether a node listens; Ray takes some 15 seconds to notice that one is gone."""
    if not node["Alive"]:
        return False
    try:
        address = node["NodeManagerAddress"], node["NodeManagerPort"]
        socket.create_connection(address, _SECONDS_TO_ANSWER).close()
    except OSError:
        return False
    return True
