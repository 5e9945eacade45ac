"""Roles of workers, frequency of their exchanges, and placement of the summation."""
