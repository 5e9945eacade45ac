"""Access to the center, in the training's own process or in others."""
