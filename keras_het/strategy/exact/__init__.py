"""A step of Keras over unequal shares with the numbers of one device."""
