"""The TensorBoard plugin: reads logs, and imports neither TensorFlow nor Keras."""
