"""One step of a pipeline in the graph: stages, their passes, and what travels between them."""
