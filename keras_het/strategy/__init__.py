"""The contents of a step: the strategy, its exact weights and the cluster."""
