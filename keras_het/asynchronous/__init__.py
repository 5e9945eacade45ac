"""Asynchronous workers: a center, and the workers' exchange with it."""

__keras_het_stability__ = "experimental"
