"""Functions that one process serves and others call, over TensorFlow's own RPC."""
