"""Values with one part for each replica: batches, outputs and packed tensors."""
