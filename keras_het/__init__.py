"""Train Keras 3 models over workers of different speed with the numbers of one device."""

__version__ = "0.1.0"

__all__ = ["__version__"]
