"""What travels between a worker and the center, and how often."""
