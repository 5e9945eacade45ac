"""What adapts training between steps."""

from keras_het.callbacks.backup_and_restore import BackupAndRestore
from keras_het.callbacks.batch_balancer import BatchBalancer

__all__ = ["BackupAndRestore", "BatchBalancer"]
