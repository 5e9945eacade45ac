"""Differences between data and its schema."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from keras_het.loader.validation.tfdv_adapter import Schema, Statistics, tfdv


@dataclasses.dataclass(frozen=True)
class Anomaly:
    """One way in which data deviates from its schema.

    Args:
        feature: name of the feature, "" for the whole data set.
        reason: in a few words.
        description: with the values found.
    """

    feature: str
    reason: str
    description: str

    def __str__(self) -> str:
        return f"{self.feature or 'data set'}: {self.reason} ({self.description})"


class DataAnomalyError(ValueError):
    """Data deviates from its schema.

    Args:
        message: the findings.
        anomalies: those of this worker's data; empty if only others found some.
    """

    def __init__(self, message: str, anomalies: Sequence[Anomaly] = ()) -> None:
        super().__init__(message)
        self.anomalies = tuple(anomalies)


def find_anomalies(
    statistics: Statistics, schema: Schema, environment: str | None = None
) -> list[Anomaly]:
    """Compare data with its schema.

    Args:
        statistics: statistics of the data.
        schema: what it should look like.
        environment: environment of the schema, such as "TRAINING", if it has some.

    Returns:
        The anomalies, by feature; none if the data is correct.

    Reference: `tensorflow_data_validation.validate_statistics`.
    """
    found = tfdv.validate_statistics(statistics, schema, environment=environment)
    anomalies = [
        Anomaly(feature, reason.short_description, reason.description)
        for feature, info in sorted(found.anomaly_info.items())
        for reason in info.reason
    ]
    if found.data_missing:
        anomalies.insert(0, Anomaly("", "No data", "there are no rows"))
    anomalies += [
        Anomaly("", reason.short_description, reason.description)
        for reason in found.dataset_anomaly_info.reason
    ]
    return anomalies
