"""What runs in a pipeline, and where its time goes."""
