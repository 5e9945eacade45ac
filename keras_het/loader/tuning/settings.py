"""The settings found, as code."""

from __future__ import annotations

import dataclasses

from keras_het.loader.iterators.knobs import Knobs
from keras_het.loader.tuning.stall_meter import StallMeter


@dataclasses.dataclass(frozen=True)
class LoaderSettings:
    """Final settings of a tuner; `str()` of them is code to paste."""

    knobs: Knobs | None
    is_plain: bool
    nice: int
    observes_only: str | None
    meter: StallMeter
    has_prefetch: bool = True

    @property
    def code(self) -> str:
        """Python code that sets them without a tuner."""
        if self.knobs is None:
            return f"# Nothing was changed: {self.observes_only or 'no step was trained'}."
        lines = self._plain_lines() if self.is_plain else self._builder_lines()
        return "\n".join([self._headline(), *self._priority(), *lines])

    def __str__(self) -> str:
        return self.code

    def _headline(self) -> str:
        meter = self.meter
        text = f"# keras_het LoaderTuner, {meter.steps} steps, "
        return f"{text}{meter.idle_fraction:.1%} of the time waiting for data."

    def _priority(self) -> list[str]:
        if not self.nice:
            return []
        return [
            f"# Measured with the loader's threads at nice {self.nice}, which no option of tf.data "
            "sets. For them, and no moves:",
            "# keras_het.callbacks.LoaderTuner(lambda plan, cpus: "
            f"keras_het.planning.loader.FixedController(plan), nice={self.nice})",
        ]

    def _plain_lines(self) -> list[str]:
        knobs = self.knobs or Knobs(1, 1, 1)
        last = f"  # last: prefetch({knobs.prefetch})" if self.has_prefetch else ""
        return [
            "options = tf.data.Options()",
            f"options.threading.private_threadpool_size = {knobs.threads}",
            "dataset = dataset.with_options(options)" + last,
        ]

    def _builder_lines(self) -> list[str]:
        knobs = self.knobs or Knobs(1, 1, 1)
        values = ", ".join(
            f"{field.name}={getattr(knobs, field.name)}" for field in dataclasses.fields(knobs)
        )
        return [
            f"knobs = keras_het.loader.Knobs({values})",
            "dataset = keras_het.loader.pipeline(build, knobs)",
        ]
