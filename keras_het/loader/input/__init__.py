"""Input that `fit` iterates: distributed data sets and their passes."""
