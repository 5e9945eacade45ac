"""Roles of workers, frequency of their exchanges, and placement of the summation."""

__keras_het_stability__ = "experimental"
