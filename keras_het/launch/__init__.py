"""Launchers of training: local clusters of worker processes and the command `keras-het`."""

from keras_het.launch.local.local_cluster import LocalCluster
from keras_het.launch.local.worker_process import WorkerResult

__all__ = ["LocalCluster", "WorkerResult"]
