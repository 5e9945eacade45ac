"""Center variables that workers push to and pull from, by messages of `keras_het.exchange`."""

from keras_het.asynchronous.parameter_service.client import Answer, ParameterClient
from keras_het.asynchronous.parameter_service.part import Part
from keras_het.asynchronous.parameter_service.service import ParameterService
from keras_het.asynchronous.parameter_service.wire import FloatWire, Partitions, TopKWire, Wire
from keras_het.exchange.message import NO_ANSWER, Status
from keras_het.exchange.secret import credential, model_fingerprint

__all__ = [
    "NO_ANSWER",
    "Answer",
    "FloatWire",
    "ParameterClient",
    "ParameterService",
    "Part",
    "Partitions",
    "Status",
    "TopKWire",
    "Wire",
    "credential",
    "model_fingerprint",
]
