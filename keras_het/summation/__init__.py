"""Gradients summed by the CPUs of all machines, spare ones included (BytePS, OSDI 2020)."""

from keras_het.summation.group import SummationGroup, check_is_no_summation_machine, start_summation
from keras_het.summation.machine import start_machine
from keras_het.summation.options import Summation, read_aggregation
from keras_het.summation.placement import Placement, place_partitions
from keras_het.summation.service import SummationService, summation_credential

__all__ = [
    "Placement",
    "Summation",
    "SummationGroup",
    "SummationService",
    "check_is_no_summation_machine",
    "place_partitions",
    "read_aggregation",
    "start_machine",
    "start_summation",
    "summation_credential",
]
