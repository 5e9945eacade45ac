"""Files of statistics, which any process can compare later."""

from __future__ import annotations

from pathlib import Path

from keras_het.loader.validation.tfdv_adapter import Statistics, statistics_pb2


def write_statistics(statistics: Statistics, path: str | Path) -> None:
    """Write statistics as a serialised protocol buffer, as TFDV does.

    Args:
        statistics: the statistics.
        path: the file, usually with the suffix ".stats"; its directory is created.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # A reader sees the old file or the new one, never half of it.
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_bytes(statistics.SerializeToString())
    temporary.replace(path)


def read_statistics(path: str | Path) -> Statistics:
    """Read statistics.

    Args:
        path: file written by `write_statistics` or TFDV.

    Raises:
        ValueError: if the file holds something else.
    """
    statistics = statistics_pb2.DatasetFeatureStatisticsList()
    try:
        statistics.ParseFromString(Path(path).read_bytes())
    except Exception as error:  # protobuf's error types differ between its implementations
        raise ValueError(
            f"{path} holds no statistics. Expected a file of "
            "keras_het.loader.validation.write_statistics or TFDV."
        ) from error
    return statistics
