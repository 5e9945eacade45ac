"""Pure decisions: who gets how much. Imports numpy and the standard library only."""

from keras_het.planning.replica_layout import ReplicaLayout
from keras_het.planning.shares import apportion

__all__ = ["ReplicaLayout", "apportion"]
