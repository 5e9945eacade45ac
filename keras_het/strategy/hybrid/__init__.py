"""One `fit` of a sync group and async workers that exchange with a parameter service."""

from keras_het.strategy.hybrid.async_worker import AsyncWorker
from keras_het.strategy.hybrid.participant import HybridOptions, Participant
from keras_het.strategy.hybrid.service_task import ServiceTask
from keras_het.strategy.hybrid.sync_group import SyncGroup

__all__ = ["AsyncWorker", "HybridOptions", "Participant", "ServiceTask", "SyncGroup"]
