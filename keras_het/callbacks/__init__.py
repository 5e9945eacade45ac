"""What adapts training between steps."""

from keras_het.callbacks.backup_and_restore import BackupAndRestore
from keras_het.callbacks.batch_balancer import BatchBalancer
from keras_het.callbacks.data_validation import DataValidation
from keras_het.callbacks.hybrid_aggregation import HybridAggregation
from keras_het.callbacks.loader_tuner import LoaderTuner
from keras_het.callbacks.local_training import LocalTraining

__all__ = [
    "BackupAndRestore",
    "BatchBalancer",
    "DataValidation",
    "HybridAggregation",
    "LoaderTuner",
    "LocalTraining",
]
