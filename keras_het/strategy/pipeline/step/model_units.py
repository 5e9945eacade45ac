"""A Keras model as a list of layer calls that can be cut anywhere."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import Any

import keras

from keras_het import keras_graphs_adapter

Token = int
"""Number of a tensor that travels between layer calls."""


@dataclasses.dataclass(frozen=True, eq=False)
class Unit:
    """One call of a layer, or of an operation of `keras.ops`."""

    operation: Any
    node: keras_graphs_adapter.Node
    inputs: dict[int, Token]
    outputs: list[Token]

    @property
    def name(self) -> str:
        return str(self.operation.name)

    @property
    def layer(self) -> keras.layers.Layer | None:
        return self.operation if isinstance(self.operation, keras.layers.Layer) else None

    @property
    def variables(self) -> list[keras.Variable]:
        return [] if self.layer is None else list(self.layer.variables)


class ModelUnits:
    """Layer calls of a model and its nested models, each after those that it depends on."""

    def __init__(self, model: keras.Model) -> None:
        graph = keras_graphs_adapter.graph_of(model)
        if graph is None:
            is_unbuilt = isinstance(model, keras.Sequential) and not model.built
            received = f"{type(model).__name__} {model.name!r}, " + (
                "a Sequential model without an input shape"
                if is_unbuilt
                else "whose call() is Python code"
            )
            remedy = (
                "Begin it with keras.Input(shape)."
                if is_unbuilt
                else "Build it with keras.Model(inputs, outputs) or keras.Sequential, or train it "
                "under keras_het.HeterogeneousStrategy."
            )
            raise ValueError(
                "A pipeline needs a Functional or Sequential model, whose graph of layers it can "
                f"cut. Received: {received}. {remedy}"
            )
        self.model, self.graph = model, graph
        self.units: list[Unit] = []
        tokens = itertools.count()
        self.inputs: list[Token] = [next(tokens) for _ in graph.inputs]
        made = self._expand(
            graph, dict(zip(map(id, graph.inputs), self.inputs, strict=True)), tokens
        )
        self.outputs: list[Token] = [made[id(tensor)] for tensor in graph.outputs]

    def _expand(
        self, graph: keras_graphs_adapter.Graph, made: dict[int, Token], tokens: Iterator[Token]
    ) -> dict[int, Token]:
        for node in keras_graphs_adapter.nodes_of(graph):
            if node.is_input or any(id(tensor) not in made for tensor in node.input_tensors):
                continue
            inner = keras_graphs_adapter.graph_of(node.operation)
            if inner is not None:
                given = [made[id(tensor)] for tensor in node.input_tensors]
                within = self._expand(
                    inner, dict(zip(map(id, inner.inputs), given, strict=True)), tokens
                )
                results = [within[id(tensor)] for tensor in inner.outputs]
            else:
                results = [next(tokens) for _ in node.outputs]
                taken = {id(tensor): made[id(tensor)] for tensor in node.input_tensors}
                self.units.append(Unit(node.operation, node, taken, results))
            made.update(zip(map(id, node.outputs), results, strict=True))
        return made

    @functools.cached_property
    def maker(self) -> dict[Token, int]:
        return {token: i for i, unit in enumerate(self.units) for token in unit.outputs}

    @functools.cached_property
    def last_use(self) -> dict[Token, int]:
        """The last unit that takes each tensor; L for the model's outputs."""
        uses = {token: i for i, unit in enumerate(self.units) for token in unit.inputs.values()}
        return uses | dict.fromkeys(self.outputs, len(self.units))

    @functools.cached_property
    def together(self) -> tuple[tuple[int, int], ...]:
        """Pairs (first, last) of units that share weights or state and need one stage."""
        first: dict[int, int] = {}
        pairs = set()
        for i, unit in enumerate(self.units):
            for variable in unit.variables:
                if first.setdefault(id(variable), i) != i:
                    pairs.add((first[id(variable)], i))
        return tuple(sorted(pairs))

    def cut_behind(self, name: str) -> int:
        found = [i for i, unit in enumerate(self.units) if unit.name == name]
        if not found:
            names = ", ".join(dict.fromkeys(unit.name for unit in self.units))
            raise ValueError(
                "A cut is given as the name of the layer before it. Received: "
                f"{name!r}, which is not among the model's layers. Choose among: {names}. "
                "Names that Keras makes up change with the number of layers made before: name the "
                "layers you cut behind, as in Dense(64, name='block_2')."
            )
        if found[-1] + 1 == len(self.units):
            raise ValueError(
                "A cut needs layers before it and behind it. Received: "
                f"{name!r}, the model's last layer. Leave it out of the plan."
            )
        return found[-1] + 1
