"""When a training is killed: the n-th call of a method of callbacks."""

STEPS, EPOCHS = 4, 5
BATCH_END, EPOCH_END = "on_train_batch_end", "on_epoch_end"
MOMENTS = {
    "first step": (BATCH_END, 1),
    "in the first epoch": (BATCH_END, 3),
    "in an epoch": (BATCH_END, 2 * STEPS + 2),
    "last step of an epoch": (BATCH_END, 2 * STEPS),
    "begin of an epoch": ("on_epoch_begin", 3),
    "end of an epoch": (EPOCH_END, 2),
    "end of the last epoch": (EPOCH_END, EPOCHS),
    "begin of a validation": ("on_test_begin", 2),
    "in a validation": ("on_test_batch_end", 3),
    "end of a validation": ("on_test_end", 3),
}
