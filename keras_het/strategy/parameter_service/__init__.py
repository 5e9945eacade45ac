"""Center variables that workers push to and pull from, over TensorFlow's own RPC."""

from keras_het.strategy.parameter_service.admission import Status, credential, model_fingerprint
from keras_het.strategy.parameter_service.client import NO_ANSWER, Answer, ParameterClient
from keras_het.strategy.parameter_service.partitions import Partitions
from keras_het.strategy.parameter_service.service import ParameterService

__all__ = [
    "NO_ANSWER",
    "Answer",
    "ParameterClient",
    "ParameterService",
    "Partitions",
    "Status",
    "credential",
    "model_fingerprint",
]
