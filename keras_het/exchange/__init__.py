"""What travels between processes outside of the step: messages of vectors, over gRPC, in Python."""

__keras_het_stability__ = "experimental"
