"""The log of a training, read back as a recording."""

from __future__ import annotations

import collections
import dataclasses
import os
from collections.abc import Iterator

import tensorflow as tf

from keras_het.planning.diagnosis.recording import Recording
from keras_het.telemetry.event_files import READ_ERRORS, event_files, read_events
from keras_het.tensorboard.log_content import LogContent, NoSetupError, Value, log_content


@dataclasses.dataclass(frozen=True)
class Run:
    """A training that has left a log.

    Args:
        name: its folder, relative to the log directory; "." for that directory itself.
        content: all that its files say.
    """

    name: str
    content: LogContent

    @property
    def recording(self) -> Recording:
        """Times, shares, hardware and changes."""
        return self.content.recording

    @property
    def messages(self) -> tuple[str, ...]:
        """What could not be read, for people."""
        return self.content.messages


def read_log(log_dir: str | os.PathLike[str]) -> list[Run]:
    """Read the logs of all trainings below a directory, sorted by name.

    Other files are not opened, nor are event files of other writers. A file whose end is torn is
    read up to there. A damaged record costs itself only, and the run's `messages` say so.

    Args:
        log_dir: a log directory, as TensorBoard's `--logdir`.

    Raises:
        FileNotFoundError: if there is no such directory.
    """
    root = os.fspath(log_dir)
    if not tf.io.gfile.isdir(root):
        raise FileNotFoundError(f"There is no log directory. Received: log_dir={root!r}.")
    runs = []
    for directory, _, _ in tf.io.gfile.walk(root):
        if paths := event_files(directory):
            name = os.path.relpath(directory, root)
            damage: list[str] = []
            try:
                content = log_content(_values(paths, damage))
            except NoSetupError:  # nothing in these files can be told
                continue
            messages = (*content.messages, *_damaged_records(damage))
            runs.append(Run(name, dataclasses.replace(content, messages=messages)))
    return sorted(runs, key=lambda run: run.name)


def _damaged_records(paths: list[str]) -> Iterator[str]:
    for path, number in collections.Counter(paths).items():
        records = "1 record" if number == 1 else f"{number} records"
        yield f"{records} of {path} could not be read: damaged, and left out."


def _values(paths: list[str], damage: list[str]) -> Iterator[Value]:
    """Values of files; their times never go back, whatever the clocks of the writers said."""
    latest = 0.0
    for path in paths:
        try:
            for each in read_events(path, damage):
                latest = max(latest, each.time)
                yield dataclasses.replace(each, time=latest)
        except READ_ERRORS:  # thinned away or removed while it was read
            continue
