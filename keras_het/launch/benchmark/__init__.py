"""`keras-het benchmark`: what a machine's devices compute alone, and what they compute together."""
