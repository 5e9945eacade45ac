"""A Keras step over unequal shares with the numbers of one device."""
