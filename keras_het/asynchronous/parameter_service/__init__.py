"""Center variables that workers push to and pull from, over TensorFlow's own RPC."""

from keras_het.asynchronous.parameter_service.client import NO_ANSWER, Answer, ParameterClient
from keras_het.asynchronous.parameter_service.service import ParameterService
from keras_het.asynchronous.parameter_service.wire import FloatWire, TopKWire, Wire
from keras_het.rpc.admission import Status, credential, model_fingerprint
from keras_het.rpc.vector import Partitions

__all__ = [
    "NO_ANSWER",
    "Answer",
    "FloatWire",
    "ParameterClient",
    "ParameterService",
    "Partitions",
    "Status",
    "TopKWire",
    "Wire",
    "credential",
    "model_fingerprint",
]
