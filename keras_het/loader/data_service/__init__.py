"""Input prepared by other machines and processes, using TensorFlow's tf.data service."""

from keras_het.loader.data_service.data_service import DataService, service

__all__ = ["DataService", "service"]
