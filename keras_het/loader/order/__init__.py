"""One order of samples: recognised, repeated, counted, hashed and cut."""
