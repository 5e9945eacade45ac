"""A rule of one's own, for tasks that run a script and for those of `--import`."""

from keras_het.rules import Delta, register_rule


@register_rule
class OwnDelta(Delta):
    name = "own_delta"
