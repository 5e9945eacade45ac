"""What is measured while a model trains, and the log it is written to."""
