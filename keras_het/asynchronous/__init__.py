"""Asynchronous workers: a center, and the workers' exchange with it."""
