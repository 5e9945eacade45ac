"""Gradients summed by the CPUs of all machines, spare ones included (BytePS, OSDI 2020).

A spare machine needs no TensorFlow: what does is imported from its module.
"""

from keras_het.summation.machine import SummationService, start_machine, summation_credential
from keras_het.summation.options import Summation, read_gradient_reduction
from keras_het.summation.placement import Placement, place_partitions

__keras_het_stability__ = "experimental"
__all__ = [
    "Placement",
    "Summation",
    "SummationService",
    "place_partitions",
    "read_gradient_reduction",
    "start_machine",
    "summation_credential",
]
