"""One `fit` of a sync group and async workers that exchange with a parameter service."""

from keras_het.asynchronous.exchange.participant import HybridOptions, Participant
from keras_het.asynchronous.hybrid.async_worker import AsyncWorker
from keras_het.asynchronous.hybrid.service_task import ServiceTask
from keras_het.asynchronous.hybrid.sync_group import SyncGroup

__all__ = ["AsyncWorker", "HybridOptions", "Participant", "ServiceTask", "SyncGroup"]
