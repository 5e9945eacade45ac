"""How long devices take for samples: models, and their fit to measured times."""
