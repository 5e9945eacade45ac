"""What runs inside a step: the strategy, its exact weights and the cluster."""
