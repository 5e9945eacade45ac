"""One traced function for all partitions of a kind, run on the variables of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from keras_het import private_api
from keras_het.strategy.parameter_service.part import Part


class BoundFunction:
    """A traced function that runs on variables of its own, though others share the trace.

    Not to be called by several threads at a time.

    Args:
        function: `tf.function`'s concrete function.
        captures: tensors that take the place of what it captured.
    """

    def __init__(self, function: Any, captures: Sequence[Any]) -> None:
        self._function, self._captures = function, list(captures)

    def concrete(self) -> Any:
        """The concrete function, bound until another one that shares the trace is."""
        private_api.bind_captures(self._function, self._captures)
        return self._function

    def __call__(self, *arguments: Any) -> Any:
        """Runs it."""
        return self.concrete()(*arguments)


class PartFunction:
    """A function that each partition has, traced once for all partitions of the same kind.

    A function costs TensorFlow 1 to 4 MB of memory and 30 to 250 ms before its first call, as much
    as a partition itself, and a service has six of them for each. Where a function uses anything
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
