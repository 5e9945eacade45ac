"""Workers that nobody waits for: a center, and how they exchange with it."""
