"""What travels between processes outside of the step: messages of vectors, over gRPC, in Python."""
