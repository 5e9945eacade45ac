"""The center as a training reaches it, in its own process or in others."""
