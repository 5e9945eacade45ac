"""Content and frequency of the exchanges between a worker and the center."""
