"""What adapts training between steps."""

from keras_het.callbacks.backup_and_restore import BackupAndRestore

__all__ = ["BackupAndRestore"]
