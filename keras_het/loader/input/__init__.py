"""Input that `fit` iterates: distributed datasets, their passes, and the tuning of pipelines."""
