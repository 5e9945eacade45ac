"""Models of how long devices take for samples, and their fit to measured times."""
