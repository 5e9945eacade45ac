"""One traced function for all partitions of a kind, run on each one's variables."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_het import private_api
from keras_het.asynchronous.parameter_service.part import Part
from keras_het.rpc.served_function import TfFunction, refusal


class BoundFunction:
    """A traced function that runs on its own variables although others share the trace.

    Not safe for concurrent calls from several threads.
    """

    def __init__(
        self, function: tf.types.experimental.ConcreteFunction, captures: Sequence[tf.Tensor]
    ) -> None:
        self.function, self.captures = function, list(captures)

    def __call__(self, *arguments: tf.Tensor) -> Any:
        """Run the function."""
        private_api.bind_captures(self.function, self.captures)
        return self.function(*arguments)


class PartFunction:
    """A function of each partition, traced once for all partitions of the same kind.

    A function costs TensorFlow 1 to 4 MB of memory and 30 to 250 ms before its first call, as much
    as a partition itself, and a service has ten of them for each. If a function uses anything
    outside its partition (a rule may keep arbitrary state), each partition gets its own.
    """

    def __init__(self, make: Callable[[Part], TfFunction]) -> None:
        self._make = make
        self._traced: dict[Any, tuple[Any, list[Any], list[Any]]] = {}

    def of(self, part: Part) -> BoundFunction:
        """Return the function of a partition."""
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

    def served(self, parts: Mapping[int, Part], num_partitions: int) -> TfFunction:
        """Return one `tf.function` for several partitions, selected by number.

        It takes the number before the other arguments, and answers with `Status.REFUSED` and zeros,
        or empty tensors, for a partition that is not among them.
        """
        bound = [self.of(part) for part in parts.values()]
        places = np.full(num_partitions, -1, np.int32)
        places[list(parts)] = range(len(bound))
        specs, _ = bound[0].function.structured_input_signature
        is_shared = all(each.function is bound[0].function for each in bound)
        of_all = zip(*(each.captures for each in bound), strict=True) if is_shared else ()
        captures = [tf.stack(of_each) for of_each in of_all]

        def run(place: tf.Tensor, *arguments: tf.Tensor) -> Any:
            if is_shared:
                own = [tf.gather(of_each, place) for of_each in captures]
                return BoundFunction(bound[0].function, own)(*arguments)
            branches = [functools.partial(each, *arguments) for each in bound]
            return tf.switch_case(place, branches)

        @tf.function(input_signature=[tf.TensorSpec([], tf.int32), *specs], autograph=False)
        def serve(number: tf.Tensor, *arguments: tf.Tensor) -> Any:
            in_range = (number >= 0) & (number < num_partitions)
            place = tf.gather(places, tf.where(in_range, number, 0))
            return tf.cond(
                in_range & (place >= 0),
                lambda: run(place, *arguments),
                lambda: refusal(bound[0].function.structured_outputs),
            )

        return serve
