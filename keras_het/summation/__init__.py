"""Gradients summed by the CPUs of all machines, spare ones included (BytePS, OSDI 2020).

A spare machine needs no TensorFlow, and a strategy that sums otherwise nothing but the settings.
"""

from keras_het.summation.options import Summation, read_gradient_reduction

__keras_het_stability__ = "experimental"
__all__ = ["Summation", "read_gradient_reduction"]
