"""The only module that imports TensorFlow Data Validation (TFDV) and its dependencies."""

from __future__ import annotations

import contextlib
import io
import sys
from importlib import metadata
from typing import NoReturn, TypeAlias


def _explain(error: ImportError) -> NoReturn:
    versions = f"Python {sys.version_info.major}.{sys.version_info.minor}"
    for package in ("tensorflow", "tensorflow-cpu"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions += f", {package} {metadata.version(package)}"
    raise ImportError(
        "Data validation needs TensorFlow Data Validation, which needs Python 3.11 or older and "
        f"TensorFlow 2.16. Received: {versions}; {error}. To fix it: in an environment with Python "
        '3.11, run `uv pip install "tensorflow-data-validation==1.16.1" "tensorflow==2.16.2" dill` '
        "(or, in a checkout, `'.[data-validation]'`); pip's own resolver never finishes.",
        name=error.name,
    ) from error


try:
    # TFDV writes to stderr that notebooks need IPython.
    with contextlib.redirect_stderr(io.StringIO()):
        import tensorflow_data_validation as tfdv
    import pyarrow
    from tensorflow_data_validation.statistics import stats_impl
    from tensorflow_metadata.proto.v0 import anomalies_pb2, schema_pb2, statistics_pb2
    from tfx_bsl.coders import example_coder
except ImportError as missing:
    _explain(missing)

Statistics: TypeAlias = statistics_pb2.DatasetFeatureStatisticsList
"""Statistics of one dataset."""

Schema: TypeAlias = schema_pb2.Schema

get_generators = stats_impl.get_generators
Combiner = stats_impl._CombinerStatsGeneratorsCombineFn
"""Adds up statistics of record batches, a few thousand rows at a time. Private; TFDV 1.16.1."""

read_schema = tfdv.load_schema_text
"""Read a schema from a text file."""
read_statistics = tfdv.load_stats_binary
"""Read statistics, as `keras_het.callbacks.DataValidation` writes them, from a `.stats` file."""

__all__ = ["anomalies_pb2", "example_coder", "get_generators", "pyarrow", "schema_pb2"]
__all__ += ["statistics_pb2", "tfdv"]
