r"""Dependence of a step's values on the replica's samples, read off its graph.

State that a layer assigns is a function of the batch. To give it the value of one device, the
aggregates over samples in it must cover the global batch:

* a value that no sample affects is equal on all replicas already (a counter of steps);
* sums over samples, and their number, are summed over replicas;
* means over samples become :math:`\sum_i w_i m_i`;
* maxima and minima become the largest and the smallest;
* results of metrics are computed from the states of all replicas.

Whatever is computed from these aggregates, such as `old + sum`, `0.9 * old + 0.1 * mean`,
`maximum(old, largest)` or `sum / count`, is recomputed from the combined ones.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Iterable, Sequence

import tensorflow as tf

from keras_het import private_api


class Kind(enum.Enum):
    """Relation of a tensor to the samples of its replica."""

    EQUAL = "the same on every replica"
    ROWS = "one row or more for each sample"
    SUBSET = "rows of some samples"
    SHAPE = "the shape of rows"
    COUNT = "proportional to the number of samples"
    SUM = "a sum over samples"
    MEAN = "a mean over samples"
    MAX = "the largest of samples"
    MIN = "the smallest of samples"
    RESULT = "a metric's result"
    OTHER = "anything else"


AGGREGATES = (Kind.COUNT, Kind.SUM, Kind.MEAN, Kind.MAX, Kind.MIN)
_ROWS = (Kind.ROWS, Kind.SUBSET)
_OF_ROWS = {
    "Sum": Kind.SUM,
    "Mean": Kind.MEAN,
    "Max": Kind.MAX,
    "Min": Kind.MIN,
    "EuclideanNorm": Kind.OTHER,
}
_SUMS_OF_ROWS = ("L2Loss", "Bincount", "DenseBincount", "UnsortedSegmentSum", "ScatterNd")
_SAME_KIND = (
    *("Identity", "Snapshot", "StopGradient", "PreventGradient", "CheckNumerics", "EnsureShape"),
    *("Reshape", "Squeeze", "ExpandDims", "Transpose", "Pack", "ConcatV2", "Cast"),
)
# The inputs after the first are sizes and positions.
_RESHAPES = ("Reshape", "BroadcastTo", "Tile", "Slice", "StridedSlice", "GatherV2", "Pad", "PadV2")
# Stateful as soon as they read a variable.
_BRANCHES = ("If", "Case", "While", "PartitionedCall", "StatefulPartitionedCall")
_SUBSETS = ("Where", "DynamicPartition")
# Each row of the output depends on the others, or on its position.
_COUPLES_ROWS = ("Cumsum", "Cumprod", "Unique", "UniqueV2", "UniqueWithCounts")


@dataclasses.dataclass(frozen=True)
class Combination:
    """A value as a function of aggregates over samples."""

    aggregates: tuple[tuple[Kind, tf.Tensor], ...]
    compute: Callable[[Sequence[tf.Tensor]], tf.Tensor]


class SampleDependence:
    """Reader of the graph that one replica's step has traced."""

    def __init__(
        self,
        rows: Iterable[tf.Tensor],
        equal: Iterable[tf.Tensor],
        unequal: Iterable[tf.Tensor],
        assigned: dict[str, list[tf.Tensor] | None],
        keeps_equal: bool = False,
        results: Iterable[tf.Tensor] = (),
        means: Iterable[tf.Tensor] = (),
    ) -> None:
        self._collected = (*AGGREGATES, Kind.RESULT, *([Kind.EQUAL] if keeps_equal else []))
        known = {
            Kind.ROWS: rows,
            Kind.EQUAL: equal,
            Kind.OTHER: unequal,
            Kind.RESULT: results,
            Kind.MEAN: means,
        }
        self._kinds = {tensor.name: kind for kind, found in known.items() for tensor in found}
        self._unequal = {name for name, kind in self._kinds.items() if kind is Kind.OTHER}
        self._assigned = assigned

    def kind(self, tensor: tf.Tensor) -> Kind:
        waiting = [tensor]  # no recursion: a network may be deeper than Python's stack
        while waiting:
            latest = waiting[-1]
            inputs = [] if latest.name in self._kinds else self._inputs(latest)
            missing = [each for each in inputs if each.name not in self._kinds]
            waiting.extend(missing)
            if not missing:
                waiting.pop()
                if latest.name not in self._kinds:
                    self._kinds[latest.name] = self._judge(latest, inputs)
        return self._kinds[tensor.name]

    def combination(self, tensor: tf.Tensor) -> Combination | None:
        """Return the tensor as a function of aggregates over samples, None if it is not one."""
        aggregates = self._collect(tensor)
        if aggregates is None:
            return None
        if any(kind is Kind.MEAN and not t.dtype.is_floating for kind, t in aggregates.values()):
            return None

        def compute(values: Sequence[tf.Tensor]) -> tf.Tensor:
            return self._again(tensor, dict(zip(aggregates, values, strict=True)))

        return Combination(tuple(aggregates.values()), compute)

    def adds_samples(self, tensor: tf.Tensor, handle: str, partial: Iterable[str]) -> bool:
        """Tell whether a tensor is a variable's value plus what samples alone say."""
        held, waiting, terms = 0, [tensor], list[tf.Tensor]()
        while waiting:
            latest = waiting.pop()
            operation = latest.op
            if operation.type == "ReadVariableOp" and operation.inputs[0].name == handle:
                held += 1
            elif operation.type in ("Add", "AddV2", "AddN"):
                waiting.extend(operation.inputs)
            elif operation.type in (*_SAME_KIND, "Sub"):
                waiting.append(operation.inputs[0])
                terms.extend(operation.inputs[1:] if operation.type == "Sub" else [])
            else:
                terms.append(latest)
        made = made_from(tensor.graph, partial)
        return held == 1 and all(
            self.kind(term) is not Kind.EQUAL and term.name not in made for term in terms
        )

    def _collect(self, tensor: tf.Tensor) -> dict[str, tuple[Kind, tf.Tensor]] | None:
        waiting, seen = [tensor], set[str]()
        found: dict[str, tuple[Kind, tf.Tensor]] = {}
        while waiting:
            latest = waiting.pop()
            kind = self.kind(latest)
            if kind in self._collected:
                found[latest.name] = (kind, latest)
            elif kind is not Kind.EQUAL and latest.name not in seen:
                is_computed_from_others = kind is Kind.OTHER and _can_repeat(latest.op)
                is_alias = latest.op.type in ("ReadVariableOp", "IdentityN")
                inputs = self._inputs(latest)
                is_known = latest.name not in self._unequal and inputs
                if not is_known or not (is_computed_from_others or is_alias):
                    return None
                waiting.extend(inputs)
            seen.add(latest.name)
        return found

    def _again(self, tensor: tf.Tensor, values: dict[str, tf.Tensor]) -> tf.Tensor:
        if tensor.name in values:
            return values[tensor.name]
        if self.kind(tensor) is Kind.EQUAL:
            return tensor
        inputs = [self._again(each, values) for each in self._inputs(tensor)]
        is_alias = tensor.op.type in ("ReadVariableOp", "IdentityN")
        values[tensor.name] = (
            inputs[0] if is_alias else private_api.repeat_operation(tensor.op, inputs)
        )
        return values[tensor.name]

    def _inputs(self, tensor: tf.Tensor) -> list[tf.Tensor]:
        operation = tensor.op
        if operation.type == "IdentityN":
            return [operation.inputs[tensor.value_index]]
        if operation.type != "ReadVariableOp":
            return list(operation.inputs)
        # read again after the step has assigned it: that value, on this replica only
        order = private_api.order_of_operation(operation)
        values = self._assigned.get(operation.inputs[0].name) or []
        return [v for v in values if private_api.order_of_operation(v.op) < order][-1:]

    def _judge(self, tensor: tf.Tensor, inputs: Sequence[tf.Tensor]) -> Kind:
        operation = tensor.op
        kinds = [self._kinds[each.name] for each in inputs]
        if operation.type == "ReadVariableOp":
            is_unknown = self._assigned.get(operation.inputs[0].name, ()) is None
            return Kind.OTHER if is_unknown else next(iter(kinds), Kind.EQUAL)
        if operation.type == "IdentityN":
            return kinds[0]
        if operation.type == "Placeholder":
            captured = getattr(operation.graph, "internal_captures", ())
            is_captured = any(tensor is each for each in captured)
            return Kind.EQUAL if is_captured else Kind.OTHER
        if all(kind is Kind.EQUAL for kind in kinds):
            is_free = private_api.is_stateful(operation) and operation.type not in _BRANCHES
            return Kind.OTHER if is_free else Kind.EQUAL
        found = _shape_kind(operation, kinds) or _row_kind(operation, kinds)
        if found is not None:
            return found
        has_rows = any(kind in (*_ROWS, Kind.SHAPE) for kind in kinds)
        if not has_rows:
            return _aggregate_kind(operation, kinds)
        if not tensor.shape.rank or tensor.shape[0] is not None or _couples(operation):
            return Kind.OTHER
        # What a sum over the replica's rows turns a row into is not what one device would compute.
        is_random = operation.type.startswith(("Random", "Stateless"))
        of_values = kinds[:1] if operation.type in _RESHAPES else kinds
        if not is_random and not set(of_values) <= {Kind.EQUAL, Kind.SHAPE, *_ROWS}:
            return Kind.OTHER
        return Kind.SUBSET if _leaves_rows_out(operation, kinds) else Kind.ROWS


def made_from(graph: tf.Graph, handles: Iterable[str]) -> set[str]:
    """Names of all tensors that are computed from what variables hold."""
    waiting = [graph.get_tensor_by_name(handle) for handle in handles]
    found = set[str]()
    while waiting:
        outputs = [out for each in waiting.pop().consumers() for out in each.outputs]
        waiting.extend(each for each in outputs if each.name not in found)
        found.update(each.name for each in outputs)
    return found


def _shape_kind(operation: tf.Operation, kinds: Sequence[Kind]) -> Kind | None:
    if operation.type in ("Shape", "Size", "Rank", "ZerosLike", "OnesLike"):
        if operation.type == "Rank" or operation.inputs[0].shape.is_fully_defined():
            return Kind.EQUAL
        of_rows = {"Shape": Kind.SHAPE, "Size": Kind.COUNT}
        of_subset = {"Size": Kind.SUM}
        found = {Kind.ROWS: of_rows, Kind.SUBSET: of_subset}.get(kinds[0])
        return None if found is None else found.get(operation.type)
    if kinds[0] is not Kind.SHAPE:
        return None
    if operation.type == "Cast":
        return Kind.SHAPE
    if operation.type == "Prod":
        return Kind.COUNT
    if operation.type in ("StridedSlice", "GatherV2"):
        position = tf.get_static_value(operation.inputs[1])
        length = operation.inputs[0].shape[0]
        if position is not None and position.size == 1 and length:
            return Kind.EQUAL if position.item() % length else Kind.COUNT
    return None


def _row_kind(operation: tf.Operation, kinds: Sequence[Kind]) -> Kind | None:
    """Classify an operation that adds up, or selects from, rows of samples."""
    if operation.type in _OF_ROWS and kinds[0] in _ROWS:
        axes = tf.get_static_value(operation.inputs[1])
        rank = operation.inputs[0].shape.rank
        if axes is None or rank is None:
            return Kind.OTHER
        if 0 not in [int(axis) % rank for axis in axes.reshape(-1)]:
            return kinds[0]
        is_mean_of_some = operation.type == "Mean" and kinds[0] is Kind.SUBSET
        return Kind.OTHER if is_mean_of_some else _OF_ROWS[operation.type]
    if operation.type in _SUMS_OF_ROWS and kinds[0] in _ROWS:
        return Kind.SUM
    return _product_kind(operation, kinds)


def _product_kind(operation: tf.Operation, kinds: Sequence[Kind]) -> Kind | None:
    """Classify a product of two matrices that sums over samples, as x^T y does."""
    attribute = {"MatMul": "transpose_a", "BatchMatMulV2": "adj_x"}.get(operation.type)
    if attribute is None or kinds[1] not in _ROWS:
        return None
    first = operation.inputs[0]
    if first.shape.rank != 2:
        return None
    is_transposed = first.op.type == "Transpose" and first.shape[1] is None
    is_turned = kinds[0] in _ROWS and operation.get_attr(attribute)
    return Kind.SUM if is_turned or (is_transposed and first.shape[0] is not None) else None


def _couples(operation: tf.Operation) -> bool:
    is_over_rows = (
        operation.type in ("Softmax", "LogSoftmax") and operation.inputs[0].shape.rank == 1
    )
    return is_over_rows or operation.type in _COUPLES_ROWS


def _leaves_rows_out(operation: tf.Operation, kinds: Sequence[Kind]) -> bool:
    if Kind.SUBSET in kinds or operation.type in _SUBSETS:
        return True
    if kinds[0] is not Kind.ROWS:
        return False
    if operation.type == "GatherV2":
        return tf.get_static_value(operation.inputs[2]) in (0, None)
    if operation.type == "StridedSlice":
        if operation.get_attr("ellipsis_mask") & 1:
            return False
        return not operation.get_attr("begin_mask") & operation.get_attr("end_mask") & 1
    return operation.type == "Slice"


def _aggregate_kind(operation: tf.Operation, kinds: Sequence[Kind]) -> Kind:
    """Classify an operation on sums, means and equal values whose result is one of them again."""
    present = set(kinds) - {Kind.EQUAL}
    if len(present) > 1:
        return _pair_kind(operation, kinds)
    (kind,) = present
    if kind not in AGGREGATES:
        return Kind.OTHER
    has_equal = Kind.EQUAL in kinds
    if operation.type in _SAME_KIND:
        keeps = operation.type not in ("Pack", "ConcatV2") or kinds.count(kind) >= len(kinds) - 1
        is_rounded = operation.type == "Cast" and not operation.outputs[0].dtype.is_floating
        return Kind.OTHER if not keeps or (is_rounded and kind is Kind.MEAN) else kind
    if operation.type == "StridedSlice" and kinds[0] is kind:
        return kind
    is_linear = kind not in (Kind.MAX, Kind.MIN)
    if operation.type in ("Sum", "Mean", "Neg") and is_linear and kinds[0] is kind:
        return kind
    if operation.type in ("Add", "AddV2", "Sub", "AddN"):
        is_same = not has_equal and is_linear
        is_shifted_mean = kind is Kind.MEAN and operation.type != "AddN"
        return kind if is_same or is_shifted_mean else Kind.OTHER
    if operation.type == "Mul":
        return kind if has_equal and is_linear else Kind.OTHER
    if operation.type in ("RealDiv", "DivNoNan") and is_linear and has_equal:
        return kind if kinds[0] is kind else Kind.OTHER
    return Kind.OTHER


def _pair_kind(operation: tf.Operation, kinds: Sequence[Kind]) -> Kind:
    sums = {Kind.COUNT, Kind.SUM}
    if operation.type in ("Add", "AddV2", "Sub", "AddN") and set(kinds) == sums:
        return Kind.SUM
    if operation.type == "Mul" and set(kinds) == {Kind.MEAN, Kind.COUNT}:
        return Kind.SUM
    is_quotient = operation.type in ("RealDiv", "DivNoNan")
    if is_quotient and list(kinds) == [Kind.SUM, Kind.COUNT]:
        return Kind.MEAN
    return Kind.OTHER


def _can_repeat(operation: tf.Operation) -> bool:
    return len(operation.outputs) == 1 and not (
        private_api.is_stateful(operation) or private_api.calls_functions(operation)
    )
