"""Compute times of replicas, and emulated devices."""
