"""What is on this machine, what keras_het would do with it, and what is wrong, with its fix."""
