"""The log of a training, read back as a recording."""

from __future__ import annotations

import dataclasses
import os

import tensorflow as tf

from keras_het.planning.diagnosis.recording import Recording
from keras_het.telemetry.event_files import READ_ERRORS, content_at, event_files, parse_event
from keras_het.tensorboard.log_content import LogContent, NoSetupError
from keras_het.tensorboard.log_files import content_of


@dataclasses.dataclass(frozen=True)
class Run:
    """A training that has left a log."""

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


def read_log(
    log_dir: str | os.PathLike[str], unreadable: dict[str, str] | None = None
) -> list[Run]:
    """Read the logs of all trainings below a directory, sorted by name.

    Other files are not opened, nor are event files of other writers. A damaged record costs itself
    only, and the run's `messages` say so.
    """
    root = os.fspath(log_dir)
    if not tf.io.gfile.isdir(root):
        raise FileNotFoundError(f"There is no log directory. Received: log_dir={root!r}.")
    runs = []
    for directory, _, _ in tf.io.gfile.walk(root):
        if paths := event_files(directory):
            name = os.path.relpath(directory, root)
            try:
                runs.append(Run(name, content_of(paths, content_at, parse_event, READ_ERRORS)))
            except NoSetupError as error:  # nothing in these files can be told
                if unreadable is not None:
                    unreadable[name] = str(error)
    return sorted(runs, key=lambda run: run.name)
