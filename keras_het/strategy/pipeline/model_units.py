"""A Keras model as a list of layer calls that can be cut anywhere."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import keras

from keras_het import keras_graphs_adapter, private_api
from keras_het.strategy.batches.gathered_rows import refuse_other_rows
from keras_het.value_types import Rows

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


# Any prefix of the list may be a stage.
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

    def cut_after(self, name: str) -> int:
        found = [i for i, unit in enumerate(self.units) if unit.name == name]
        if not found:
            names = ", ".join(dict.fromkeys(unit.name for unit in self.units))
            raise ValueError(
                "A cut is given as the name of the layer before it. Received: "
                f"{name!r}, which is not among the model's layers. Choose among: {names}. "
                "Names that Keras makes up change with the number of layers made before: name the "
                "layers you cut after, as in Dense(64, name='block_2')."
            )
        if found[-1] + 1 == len(self.units):
            raise ValueError(
                "A cut needs layers before it and after it. Received: "
                f"{name!r}, the model's last layer. Leave it out of the plan."
            )
        return found[-1] + 1


_ELSEWHERE = "train it under keras_het.HeterogeneousStrategy"


def check_can_be_cut(units: ModelUnits) -> None:
    model = units.model
    if method := keras_graphs_adapter.own_step_of(model):
        raise ValueError(
            f"A pipeline replaces Keras's own step, and would not run {method}. Received: "
            f"{type(model).__name__}, which overrides it. Leave the method out, or {_ELSEWHERE}."
        )
    for name, is_set in (
        ("run_eagerly=True", model.run_eagerly),
        ("jit_compile=True", model.jit_compile),
        (f"steps_per_execution={model.steps_per_execution}", model.steps_per_execution != 1),
    ):
        if is_set:
            raise ValueError(
                "A pipeline's step is one graph over several devices, built once. Received: "
                f"model.compile({name}). Leave that argument out"
                + (", or set jit_compile=False." if name.startswith("jit") else ".")
            )
    layers = {id(unit.layer): unit.layer for unit in units.units if unit.layer is not None}
    for layer in layers.values():
        for part in private_api.layers_with_state(layer):
            _check_layer(part)
    refuse_other_rows(
        lambda rows: keras_graphs_adapter.outputs_for(units.graph, rows),
        "A pipeline joins the rows of all micro-batches",
        f"Leave that output out, or {_ELSEWHERE}.",
    )


def check_inputs(inputs: Iterable[Rows | None]) -> None:
    if any(value is None for value in inputs):
        raise ValueError(
            "A pipeline needs a tensor for each input of the model. Received: None for an optional "
            f"one. Build the model without it, or {_ELSEWHERE}."
        )


def _check_layer(layer: keras.layers.Layer) -> None:
    if getattr(layer, "stateful", False) and isinstance(layer, keras.layers.RNN):
        raise ValueError(
            "A stateful layer continues with the rows of the batch before, which a pipeline cuts "
            f"into micro-batches. Received: {type(layer).__name__} {layer.name!r} with "
            f"stateful=True. Set stateful=False, or {_ELSEWHERE}."
        )
    if getattr(layer, "synchronized", False):
        raise ValueError(
            "Synchronized batch normalization needs all micro-batches at once. Received: "
            f"{type(layer).__name__} {layer.name!r} with synchronized=True. Set it to False (each "
            "micro-batch is then normalized by itself), or use LayerNormalization."
        )
