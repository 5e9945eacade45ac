"""One traced function for all partitions of a kind, run on the variables of each."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_het import private_api
from keras_het.asynchronous.parameter_service.part import Part
from keras_het.rpc.served_function import refusal


class BoundFunction:
    """A traced function that runs on variables of its own, though others share the trace.

    Not to be called by several threads at a time.

    Args:
        function: `tf.function`'s concrete function.
        captures: tensors that take the place of what it captured.
    """

    def __init__(self, function: Any, captures: Sequence[Any]) -> None:
        self.function, self.captures = function, list(captures)

    def __call__(self, *arguments: Any) -> Any:
        """Runs it."""
        private_api.bind_captures(self.function, self.captures)
        return self.function(*arguments)


class PartFunction:
    """A function that each partition has, traced once for all partitions of the same kind.

    A function costs TensorFlow 1 to 4 MB of memory and 30 to 250 ms before its first call, as much
    as a partition itself, and a service has ten of them for each. Where a function uses anything
    that is not the partition's own (a rule may keep what it likes), each partition gets its own.

    Args:
        make: gives the `tf.function` of a partition, with an input signature.
    """

    def __init__(self, make: Callable[[Part], Any]) -> None:
        self._make = make
        self._traced: dict[Any, tuple[Any, list[Any], list[Any]]] = {}

    def of(self, part: Part) -> BoundFunction:
        """The function of a partition.

        Args:
            part: on whose variables it runs.
        """
        if part.kind not in self._traced:
            function = self._make(part).get_concrete_function()
            captures = list(function.captured_inputs)
            self._traced[part.kind] = function, captures, part.resources()
        function, captures, resources = self._traced[part.kind]
        own = {id(first): mine for first, mine in zip(resources, part.resources(), strict=True)}
        if all(id(capture) in own for capture in captures):
            return BoundFunction(function, [own[id(capture)] for capture in captures])
        function = self._make(part).get_concrete_function()
        return BoundFunction(function, function.captured_inputs)

    def served(self, parts: Mapping[int, Part], num_partitions: int) -> Any:
        """One `tf.function` for several partitions, which is told the number of one.

        It takes it before the other arguments, and answers with `Status.REFUSED` and zeros, or
        nothing, for a partition that is not among them.

        Args:
            parts: of one kind, by the number of the partition.
            num_partitions: of all services together.
        """
        bound = [self.of(part) for part in parts.values()]
        places = np.full(num_partitions, -1, np.int32)
        places[list(parts)] = range(len(bound))
        specs, _ = bound[0].function.structured_input_signature
        is_shared = all(each.function is bound[0].function for each in bound)
        of_all = zip(*(each.captures for each in bound), strict=True) if is_shared else ()
        captures = [tf.stack(of_each) for of_each in of_all]

        def run(place: Any, *arguments: Any) -> Any:
            if is_shared:
                own = [tf.gather(of_each, place) for of_each in captures]
                return BoundFunction(bound[0].function, own)(*arguments)
            branches = [functools.partial(each, *arguments) for each in bound]
            return tf.switch_case(place, branches)

        @tf.function(input_signature=[tf.TensorSpec([], tf.int32), *specs], autograph=False)
        def serve(number: Any, *arguments: Any) -> Any:
            in_range = (number >= 0) & (number < num_partitions)
            place = tf.gather(places, tf.where(in_range, number, 0))
            return tf.cond(
                in_range & (place >= 0),
                lambda: run(place, *arguments),
                lambda: refusal(bound[0].function.structured_outputs),
            )

        return serve
