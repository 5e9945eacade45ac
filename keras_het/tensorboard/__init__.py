"""The tab, in TensorBoard or as one file: reads logs, and imports neither TensorFlow nor Keras."""
