"""Who trains in which role, how often workers exchange, and which machine sums what."""
