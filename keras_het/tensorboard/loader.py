"""What TensorBoard loads at its start; nothing here may stop it from starting."""

from __future__ import annotations

import logging
from typing import Any

from tensorboard.plugins import base_plugin

_logger = logging.getLogger(__name__)
_PLUGIN = "keras_het"
# Of each tag; TensorBoard's own defaults are 10 and 100, which would leave out most of a training.
# A value is a block of steps, of one where steps are slow: this holds what a log keeps one by one.
_SAMPLES = 30_000


class HetLoader(base_plugin.TBLoader):
    """Loads the plugin behind the tab "Heterogeneous"."""

    def fix_flags(self, flags: Any) -> None:
        """Let TensorBoard keep the steps of a training, unless the user has said how many."""
        try:
            flags.samples_per_plugin.setdefault(_PLUGIN, _SAMPLES)
        except Exception as error:  # TensorBoard would end
            _logger.warning("The tab of keras_het may leave out steps: %s", error)

    def load(self, context: Any) -> Any:
        """Return the plugin, or None where it cannot work."""
        try:
            from keras_het.tensorboard.plugin import HetPlugin

            return HetPlugin(context)
        except Exception as error:
            _logger.warning("TensorBoard runs without the tab of keras_het: %s", error)
            return None
