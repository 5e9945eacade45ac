"""The command `keras-het validate`: anomalies of data, and skew between shards."""

from __future__ import annotations

import argparse
import glob
import os
import re
import sys
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from keras_het.launch.grammar import Commands, add_command

if TYPE_CHECKING:
    from keras_het.loader.validation.tfdv_adapter import Schema, Statistics

_WRONG_USAGE = 2
_THRESHOLD = 0.1
_KINDS = ("skew", "drift")
_EPILOG = """\
examples:
  keras-het validate 'data/train-*.tfrecord' --write-schema schema.pbtxt
  keras-het validate 'data/new-*.tfrecord' --schema schema.pbtxt --html report.html
  keras-het validate shards/ --schema schema.pbtxt     what the replicas consumed in the last epoch
  keras-het validate fast=a.tfrecord slow=b.tfrecord --categorical label

Exit code: 0 if all is right, 1 if there are anomalies or distances above their thresholds, 2 for
wrong usage.
"""


def add_validate_command(commands: Commands) -> None:
    """Add the command to those of `keras-het`."""
    parser = add_command(
        commands,
        "validate",
        "check data against a schema, and compare shards",
        "Checks data against a schema and compares it with each other (TensorFlow Data "
        "Validation). DATA is a TFRecord file or pattern of tf.train.Examples, a .stats file, "
        "or a directory that keras_het.callbacks.DataValidation has written; NAME=DATA names it.",
        _EPILOG,
    )
    parser.add_argument("data", nargs="+", metavar="[NAME=]DATA", help="what to look at")
    _add_schema_options(parser)
    parser.add_argument(
        "--reference", metavar="NAME", help="what the others are compared with (default: most rows)"
    )
    parser.add_argument(
        "--epoch", type=int, metavar="N", help="of directories, from 1 (default: the last one)"
    )
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a report")
    parser.set_defaults(execute=run_validate)


def _add_schema_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--schema", type=Path, metavar="FILE", help="schema (default: inferred from the reference)"
    )
    parser.add_argument("--write-schema", type=Path, metavar="FILE", help="write the schema used")
    parser.add_argument(
        "--categorical",
        action="append",
        default=[],
        metavar="FEATURE",
        help="integer feature of TFRecord files whose values are categories; may be repeated",
    )
    parser.add_argument(
        "--numeric-ranges", action="store_true", help="infer ranges of numbers, too"
    )
    for kind, measure in (("categorical", "L-infinity"), ("numeric", "Jensen-Shannon")):
        parser.add_argument(
            f"--{kind}-threshold",
            type=float,
            metavar="D",
            help=f"{measure} distance that is too far for {kind} features, of those that the "
            f"schema compares, else of all (default: the schema's, else {_THRESHOLD})",
        )


def run_validate(options: argparse.Namespace) -> int:
    """Run `keras-het validate`."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    try:
        # Takes seconds to import, and needs TensorFlow Data Validation.
        import tensorflow as tf

        from keras_het.loader import validation
    except ImportError as error:
        return _refuse(error)
    try:
        return _validate(options, validation)
    except (ImportError, ValueError, OSError, tf.errors.OpError) as error:  # OpError: from files
        return _refuse(error)


def _refuse(error: Exception) -> int:
    print(f"[keras-het] error: {error}", file=sys.stderr)
    return _WRONG_USAGE


def _validate(options: argparse.Namespace, validation: ModuleType) -> int:
    given = validation.read_schema(options.schema) if options.schema else None
    data, before, idle = _read(options, validation, given)
    reference = options.reference or max(data, key=lambda name: _num_rows(data[name]))
    if reference not in data:
        raise ValueError(f"There is no data {reference!r}; there is {', '.join(data)}.")
    schema = given or validation.infer_schema(
        data[reference], numeric_ranges=options.numeric_ranges
    )
    if given is None:
        print(f"schema: inferred from {reference}")
    _set_missing_thresholds(validation, schema)
    _set_given_thresholds(options, validation, schema)
    if options.write_schema:
        validation.write_schema(schema, options.write_schema)
        print(f"schema: written to {options.write_schema}")
    found = _show_anomalies(validation, data, schema, idle)
    found += _show_distances(validation, data, before, schema, reference)
    if options.html:
        validation.write_report(options.html, data, schema, reference)
        print(f"report: {options.html}")
    return int(found > 0)


def _show_anomalies(
    validation: ModuleType, data: Mapping[str, Statistics], schema: Schema, idle: Collection[str]
) -> int:
    found = 0
    for name, statistics in data.items():
        if name in idle:
            print(f"{name}: 0 rows")
            continue
        anomalies = validation.find_anomalies(statistics, schema)
        print(f"{name}: {_num_rows(statistics)} rows, {len(anomalies)} anomalies")
        for anomaly in anomalies:
            print(f"  {anomaly}")
        found += len(anomalies)
    return found


def _show_distances(
    validation: ModuleType,
    data: Mapping[str, Statistics],
    before: Mapping[str, Statistics],
    schema: Schema,
    reference: str,
) -> int:
    distances = []
    if sum(_num_rows(statistics) > 0 for statistics in data.values()) > 1:
        distances += validation.compare_shards(data, schema, reference)
    if any(feature.HasField("drift_comparator") for feature in schema.feature):
        for name in before:
            distances += validation.measure_drift(
                data[name], before[name], schema, name=name, previous_name="the epoch before"
            )
    for distance in distances:
        print(f"{'!' if distance.is_exceeded else ' '} {distance}")
    return sum(distance.is_exceeded for distance in distances)


def _read(
    options: argparse.Namespace, validation: ModuleType, schema: Schema | None
) -> tuple[dict[str, Statistics], dict[str, Statistics], set[str]]:
    """Return all data by name, any data of the epoch before, and replicas that had no share."""
    data: dict[str, Statistics] = {}
    before: dict[str, Statistics] = {}
    idle: set[str] = set()
    for argument in options.data:
        name, path, is_given = _name_and_path(argument)
        if Path(path).is_dir():
            prefix = f"{name} " if is_given else ""
            new, old = _read_directory(validation, Path(path), options.epoch, prefix)
            before |= old
            idle |= _without_share(new)
        elif path.endswith(".stats"):
            new = {name: validation.read_statistics(path)}
        else:
            statistics = validation.statistics_of_tfrecord(
                path, name=name, schema=schema, categorical=options.categorical
            )
            new = {name: statistics}
        if set(new) & set(data):
            raise ValueError(
                f"Two data sets are called {', '.join(set(new) & set(data))}; give them names: "
                "NAME=DATA."
            )
        data |= new
    return data, before, idle


def _without_share(replicas: Mapping[str, Statistics]) -> set[str]:
    """Return replicas without rows when others have some: a share may be zero."""
    without = {name for name, statistics in replicas.items() if not _num_rows(statistics)}
    return without if len(without) < len(replicas) else set()


def _name_and_path(argument: str) -> tuple[str, str, bool]:
    """Return name, path, and whether the user gave the name."""
    name, equals, path = argument.partition("=")
    # such as data/date=2024-01-01/train-*, which may also be remote (gs://...)
    # (not Path.glob, which raises for some names)
    is_path = "/" in name or Path(argument).exists() or glob.glob(argument)  # noqa: PTH207
    if not equals or is_path:
        return Path(argument).stem or argument, argument, False
    return name, path, True


def _read_directory(
    validation: ModuleType, directory: Path, epoch: int | None, prefix: str
) -> tuple[dict[str, Statistics], dict[str, Statistics]]:
    files: dict[int, dict[int, Path]] = {}
    for path in directory.glob("*.stats"):
        match = re.fullmatch(r"epoch-(\d+)-replica-(\d+)\.stats", path.name)
        if match:
            files.setdefault(int(match[1]), {})[int(match[2])] = path
    chosen = epoch if epoch is not None else max(files, default=None)
    if chosen not in files:
        raise ValueError(
            f"{directory} holds no statistics of epoch {chosen}; it has epochs {sorted(files)}. "
            "Expected files epoch-0001-replica-0.stats... as keras_het.callbacks.DataValidation("
            "..., directory=...) writes them."
        )

    def read(number: int) -> dict[str, Statistics]:
        return {
            f"{prefix}replica {replica}": validation.read_statistics(path)
            for replica, path in sorted(files.get(number, {}).items())
        }

    data = read(chosen)
    before = {
        name: statistics
        for name, statistics in read(chosen - 1).items()
        if name in data and _num_rows(statistics) and _num_rows(data[name])
    }
    return data, before


def _set_missing_thresholds(validation: ModuleType, schema: Schema) -> None:
    if not _compared(schema, "skew"):
        drift = _compared(schema, "drift")
        # A feature without a drift comparator either may be left out on purpose.
        names = drift or {feature.name for feature in schema.feature}
        _set(validation, schema, names, _THRESHOLD, ["skew"] if drift else _KINDS)


def _set_given_thresholds(
    options: argparse.Namespace, validation: ModuleType, schema: Schema
) -> None:
    kinds = [kind for kind in _KINDS if _compared(schema, kind)]
    for is_categorical, threshold in (
        (True, options.categorical_threshold),
        (False, options.numeric_threshold),
    ):
        features = {
            feature.name
            for feature in schema.feature
            if validation.schema.is_categorical(feature) == is_categorical
        }
        changed = {kind: features & _compared(schema, kind) for kind in kinds}
        for kind in kinds if threshold is not None else ():
            names = changed[kind] if any(changed.values()) else features
            _set(validation, schema, names, threshold, [kind])


def _set(
    validation: ModuleType,
    schema: Schema,
    features: Collection[str],
    threshold: float,
    kinds: Iterable[str],
) -> None:
    validation.set_comparison_thresholds(
        schema,
        categorical=None,
        numeric=None,
        of_features=dict.fromkeys(features, threshold),
        kinds=kinds,
    )


def _compared(schema: Schema, kind: str) -> set[str]:
    return {feature.name for feature in schema.feature if feature.HasField(f"{kind}_comparator")}


def _num_rows(statistics: Statistics) -> int:
    return int(statistics.datasets[0].num_examples) if statistics.datasets else 0
