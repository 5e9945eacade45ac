"""The command `keras-het validate`: anomalies of data, and skew between shards."""

from __future__ import annotations

import argparse
import glob
import os
import re
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from keras_het.launch.grammar import Commands, Option, add_command, add_options

if TYPE_CHECKING:
    from keras_het.loader.validation.tfdv_adapter import Schema, Statistics

_EPILOG = """\
examples:
  keras-het validate 'data/train-*.tfrecord' --write-schema schema.pbtxt
  keras-het validate shards/ --schema schema.pbtxt     what the replicas consumed in the last epoch
  keras-het validate fast=a.tfrecord slow=b.tfrecord --categorical label

Exit code: 0 if all is right, 1 if there are anomalies or distances above their thresholds, 2 for
wrong usage.
"""
_OPTIONS = (
    Option("--schema FILE", "schema (default: inferred from the reference)"),
    Option("--write-schema FILE", "write the schema used"),
    Option(
        "--categorical FEATURE",
        "integer feature of TFRecord files whose values are categories; may be repeated",
        default=[],
        more={"action": "append"},
    ),
    Option("--numeric-ranges", "infer ranges of numbers, too"),
    Option("--reference NAME", "what others are compared with (default: most rows)"),
    Option("--epoch N", "of directories, from 1 (default: the last one)", int),
)


def add_validate_command(commands: Commands) -> None:
    parser = add_command(
        commands,
        "validate",
        run_validate,
        "check data against a schema, and compare shards",
        "Checks data against a schema and compares it with each other (TensorFlow Data "
        "Validation). DATA is a TFRecord file or pattern of tf.train.Examples, a .stats file, "
        "or a directory that keras_het.callbacks.DataValidation has written; NAME=DATA names it.",
        _EPILOG,
    )
    parser.add_argument("data", nargs="+", metavar="[NAME=]DATA", help="what to look at")
    add_options(parser, _OPTIONS)


def run_validate(options: argparse.Namespace) -> int:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    expected: tuple[type[Exception], ...] = (ImportError,)
    try:
        # Takes seconds to import, and needs TensorFlow Data Validation.
        import tensorflow as tf
        from google.protobuf import message, text_format

        from keras_het.loader import validation

        expected += (tf.errors.OpError, text_format.ParseError, message.DecodeError)  # from files
        return _validate(options, validation)
    except expected as error:
        raise ValueError(str(error)) from error


def _validate(options: argparse.Namespace, validation: ModuleType) -> int:
    given = validation.read_schema(options.schema) if options.schema else None
    data: dict[str, Statistics] = {}
    idle: set[str] = set()
    for argument in options.data:
        new = _read(argument, options, validation, given)
        if both := set(new) & set(data):
            raise ValueError(
                f"Two datasets are called {', '.join(both)}; give them names: NAME=DATA."
            )
        # a share may be zero, but not that of all
        without = {name for name, statistics in new.items() if not _num_rows(statistics)}
        idle |= without if len(without) < len(new) else set()
        data |= new
    reference = options.reference or max(data, key=lambda name: _num_rows(data[name]))
    if reference not in data:
        raise ValueError(f"There is no data {reference!r}; there is {', '.join(data)}.")
    schema = given or validation.infer_schema(
        data[reference], numeric_ranges=options.numeric_ranges
    )
    if given is None:
        print(f"schema: inferred from {reference}")
    if not any(feature.HasField("skew_comparator") for feature in schema.feature):
        validation.set_comparison_thresholds(schema)
    if options.write_schema:
        validation.write_schema(schema, options.write_schema)
        print(f"schema: written to {options.write_schema}")

    found = 0
    for name, statistics in data.items():
        anomalies = [] if name in idle else validation.find_anomalies(statistics, schema)
        counted = "" if name in idle else f", {len(anomalies)} anomalies"
        print(f"{name}: {_num_rows(statistics)} rows{counted}")
        for anomaly in anomalies:
            print(f"  {anomaly}")
        found += len(anomalies)
    if sum(_num_rows(statistics) > 0 for statistics in data.values()) > 1:
        for distance in validation.compare_shards(data, schema, reference):
            print(f"{'!' if distance.is_exceeded else ' '} {distance}")
            found += distance.is_exceeded
    return int(found > 0)


def _read(
    argument: str, options: argparse.Namespace, validation: ModuleType, schema: Schema | None
) -> dict[str, Statistics]:
    name, path, is_given = _name_and_path(argument)
    if Path(path).is_dir():
        prefix = f"{name} " if is_given else ""
        files = _files_of_epoch(Path(path), options.epoch)
        return {
            f"{prefix}replica {replica}": validation.read_statistics(str(file))
            for replica, file in files.items()
        }
    if path.endswith(".stats"):
        return {name: validation.read_statistics(path)}
    return {
        name: validation.statistics_of_tfrecord(
            path, name=name, schema=schema, categorical=options.categorical
        )
    }


def _name_and_path(argument: str) -> tuple[str, str, bool]:
    name, equals, path = argument.partition("=")
    # such as data/date=2024-01-01/train-*, which may also be remote (gs://...)
    # (not Path.glob, which raises for some names)
    is_path = "/" in name or Path(argument).exists() or glob.glob(argument)  # noqa: PTH207
    if not equals or is_path:
        return Path(argument).stem or argument, argument, False
    return name, path, True


def _files_of_epoch(directory: Path, epoch: int | None) -> dict[int, Path]:
    files: dict[int, dict[int, Path]] = {}
    for path in sorted(directory.glob("*.stats")):
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
    return dict(sorted(files[chosen].items()))


def _num_rows(statistics: Statistics) -> int:
    return int(statistics.datasets[0].num_examples) if statistics.datasets else 0
