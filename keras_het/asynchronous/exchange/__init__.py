"""The exchange of a sync group and async workers with a center, wherever the center is."""

from keras_het.asynchronous.exchange.async_worker import AsyncWorker
from keras_het.asynchronous.exchange.participant import HybridOptions, Participant
from keras_het.asynchronous.exchange.sync_group import ServiceTask, SyncGroup

__all__ = ["AsyncWorker", "HybridOptions", "Participant", "ServiceTask", "SyncGroup"]
