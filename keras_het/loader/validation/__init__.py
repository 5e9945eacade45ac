"""Statistics, schema and anomalies of data, and differences between the workers' shards.

TensorFlow Data Validation computes and compares them; it is installed by the extra
`data-validation`.
"""

from keras_het.loader.validation.anomalies import Anomaly, DataAnomalyError, find_anomalies
from keras_het.loader.validation.batch_features import features_of_batch
from keras_het.loader.validation.data_statistics import (
    StatisticsBuilder,
    statistics_of_dataset,
    statistics_of_tfrecord,
)
from keras_het.loader.validation.report import write_report
from keras_het.loader.validation.schema import (
    infer_schema,
    read_schema,
    set_comparison_thresholds,
    write_schema,
)
from keras_het.loader.validation.shard_comparison import (
    ShardDistance,
    compare_shards,
    measure_drift,
)
from keras_het.loader.validation.shard_statistics import ShardStatistics
from keras_het.loader.validation.statistics_files import read_statistics, write_statistics

__all__ = [
    "Anomaly",
    "DataAnomalyError",
    "ShardDistance",
    "ShardStatistics",
    "StatisticsBuilder",
    "compare_shards",
    "features_of_batch",
    "find_anomalies",
    "infer_schema",
    "measure_drift",
    "read_schema",
    "read_statistics",
    "set_comparison_thresholds",
    "statistics_of_dataset",
    "statistics_of_tfrecord",
    "write_report",
    "write_schema",
    "write_statistics",
]
