"""Input that `fit` iterates: distributed datasets and their passes."""
