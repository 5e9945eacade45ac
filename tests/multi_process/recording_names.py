"""What the names of results say about how they may be compared."""

# Results that all workers share but one device has no counterpart of (an unseeded order).
ONLY_WORKERS = "only_workers/"
# Results that may differ between workers (the sizes of their own batches).
OWN = "own/"
