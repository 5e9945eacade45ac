"""Kinds of pipeline operations, and what their functions do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from keras_het.loader import tf_data_adapter as adapter

Dataset = adapter.Dataset

_CHANGING_PREFIXES = ("ShuffleDataset", "ShuffleAndRepeat", "RandomDataset", "AnonymousRandomSeed")
_CHANGING = (
    adapter.RANDOM_VALUE_OPERATIONS
    | adapter.GENERATOR_OPERATIONS
    | adapter.PYTHON_OPERATIONS
    | {"ReadVariableOp", "ResourceGather", "Timestamp", "RandomShuffle"}
)
_FILE_READERS = ("TFRecordDataset", "TextLineDataset", "FixedLengthRecordDataset")
_NAMES = {
    "FlatMap": "flat_map",
    "TFRecord": "TFRecordDataset",
    "TextLine": "TextLineDataset",
    "FixedLengthRecord": "FixedLengthRecordDataset",
}
_WORK = (
    "Map",
    "Interleave",
    "FlatMap",
    "Filter",
    "TFRecord",
    "TextLine",
    "FixedLengthRecord",
)


def kind(node: Dataset) -> str:
    """Kind of an operation, such as "ParallelMap"."""
    name = type(node).__name__.removeprefix("_")
    return name.removesuffix("V2").removesuffix("Dataset")


def python_function(node: Dataset) -> Callable[..., Any] | None:
    """Return the user's function in `map`, `filter`, `interleave` and the like."""
    wrapper = getattr(node, "_map_func", None) or getattr(node, "_predicate", None)
    return getattr(wrapper, "_func", None)


def label(node: Dataset) -> str:
    """Describe an operation for people: its kind, its function and the location of that."""
    code = getattr(python_function(node), "__code__", None)
    if code is None or adapter.draws_from_generator(node):
        return name(node)
    return f"{name(node)} {Path(code.co_filename).name}:{code.co_firstlineno}"


def name(node: Dataset) -> str:
    """Describe an operation for people: its kind and its function."""
    if adapter.draws_from_generator(node):
        return "from_generator"
    text = kind(node).removeprefix("Parallel")
    text = _NAMES.get(text, text[:1].lower() + text[1:])
    function = python_function(node)
    if function is None:
        return text
    return f"{text}({getattr(function, '__name__', type(function).__name__)})"


def is_file_reader(node: Dataset) -> bool:
    """Tell whether an operation opens the files that its input names."""
    if type(node).__name__.removesuffix("V2") in _FILE_READERS:
        return True
    if not kind(node).endswith(("Interleave", "FlatMap")):
        return False
    operations = adapter.operations_in_functions(node)
    return any(name.startswith(_FILE_READERS) for name in operations)


def is_work(node: Dataset) -> bool:
    """Tell whether an operation computes or reads."""
    return kind(node).removeprefix("Parallel") in _WORK


def is_own(node: Dataset) -> bool:
    """Tell whether an operation belongs to this package and only passes elements on."""
    return type(node).__module__.startswith("keras_het.") and not adapter.is_map(node)


def may_change(node: Dataset) -> bool:
    """Tell whether an operation may yield other elements, or another order, in the next epoch.

    What a Python function does is unknown, so it may.
    """
    if adapter.is_reshuffled(node) or kind(node) in ("Random", "DataService"):
        return True
    operations = adapter.operations_in_functions(node)
    return bool(operations & _CHANGING) or any(
        name.startswith(_CHANGING_PREFIXES) for name in operations
    )


def is_cache(node: Dataset) -> bool:
    """Tell whether an operation keeps its elements for later epochs."""
    return kind(node) in ("Cache", "Snapshot", "Save", "Load")


def ends_early(node: Dataset) -> bool:
    """Tell whether an operation may end before the one that it reads from."""
    if kind(node) == "TakeWhile":
        return True
    if kind(node) != "Take":
        return False
    count = adapter.constant(node._count)
    (source,) = adapter.inputs_of(node)
    return count is None or (count >= 0 and not 0 <= int(source.cardinality()) <= count)


def with_scales(node: Dataset, scale: float = 1.0) -> Iterator[tuple[Dataset, float]]:
    """Yield every operation, and how many of its elements make one of the whole pipeline.

    The number is 0 for everything before file readers: names of files cost nothing. Filters are
    assumed to let everything through.
    """
    yield node, scale
    inner = scale * (batch_size(node) or 1)
    if is_file_reader(node) or kind(node).endswith(("Interleave", "FlatMap")):
        inner = 0.0
    for source in adapter.inputs_of(node):
        yield from with_scales(source, inner)


def batch_size(node: Dataset) -> int | None:
    """Number of samples that an operation combines into one element, None if it does not."""
    size = getattr(node, "_batch_size", None)
    if size is None:
        return None
    value = adapter.constant(size)
    return int(value) if value else None
