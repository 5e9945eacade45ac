"""Statistics, schema and anomalies of data, and differences between the workers' shards.

TensorFlow Data Validation computes and compares them; it is installed by the extra
`data-validation`.
"""

from keras_het.loader.validation.schema import (
    Anomaly,
    DataAnomalyError,
    ShardDistance,
    compare_shards,
    find_anomalies,
    infer_schema,
    set_comparison_thresholds,
    write_schema,
)
from keras_het.loader.validation.statistics import (
    ShardStatistics,
    StatisticsBuilder,
    features_of_batch,
    statistics_of_dataset,
    statistics_of_tfrecord,
)
from keras_het.loader.validation.tfdv_adapter import read_schema, read_statistics

__keras_het_stability__ = "experimental"
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
    "read_schema",
    "read_statistics",
    "set_comparison_thresholds",
    "statistics_of_dataset",
    "statistics_of_tfrecord",
    "write_schema",
]
