"""What a micro-batch costs: time, memory and bytes of every unit of a model."""

from __future__ import annotations

import dataclasses

import numpy as np

from keras_het.planning.bounded_shares import FloatArray


@dataclasses.dataclass(frozen=True)
class ModelProfile:
    """What one micro-batch costs, for each of L units (calls of layers, in order) on D devices.

    A cut at i lies before unit i: units 0 .. i - 1 come before it, and 0 <= i <= L.

    Args:
        names: name of each unit, [L].
        forward_seconds: time of the forward pass, float64 [L, D].
        backward_seconds: time of the backward pass without recomputation, float64 [L, D].
        activation_bytes: what is kept from forward to backward, float64 [L].
        weight_bytes: weights that have a gradient, float64 [L]; the all-reduce moves as many bytes.
        state_bytes: weights, gradients and optimizer slots together, float64 [L].
        cut_bytes: what crosses a cut before unit i forward, float64 [L + 1]; 0 at both ends.
        gradient_bytes: what comes back over that cut, float64 [L + 1].
        together: (first, last) of units that must be in one stage, because they share weights.

    Raises:
        ValueError: if a shape does not fit, or a number is negative or not finite.
    """

    names: tuple[str, ...]
    forward_seconds: FloatArray
    backward_seconds: FloatArray
    activation_bytes: FloatArray
    weight_bytes: FloatArray
    state_bytes: FloatArray
    cut_bytes: FloatArray
    gradient_bytes: FloatArray
    together: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        units = len(self.names)
        if not units:
            raise ValueError("A profile needs at least one unit. Received: no names. Name them.")
        for name in ("forward_seconds", "backward_seconds"):
            given = _checked(self, name)
            if given.ndim != 2 or len(given) != units or not given.shape[1]:
                raise ValueError(
                    f"{name} must have a row for each of {units} units and a column for each "
                    f"device. Received: shape {given.shape}. Measure every unit on every device."
                )
        if self.forward_seconds.shape != self.backward_seconds.shape:
            raise ValueError(
                "forward_seconds and backward_seconds must have the same devices. Received: "
                f"{self.forward_seconds.shape[1]} and {self.backward_seconds.shape[1]} columns. "
                "Measure both on every device."
            )
        for name, length in (
            *((name, units) for name in ("activation_bytes", "weight_bytes", "state_bytes")),
            *((name, units + 1) for name in ("cut_bytes", "gradient_bytes")),
        ):
            if (given := _checked(self, name)).shape != (length,):
                raise ValueError(
                    f"{name} must have {length} numbers, because there are {units} units. "
                    f"Received: shape {given.shape}. Give one number for each "
                    f"{'unit' if length == units else 'cut, both ends included'}."
                )
        for first, last in self.together:
            if not 0 <= first <= last < units:
                raise ValueError(
                    f"Units that stay together must be from 0 to {units - 1}. "
                    f"Received: together={self.together}. Give the first and the last of them."
                )

    @property
    def num_units(self) -> int:
        """Number of units, L."""
        return len(self.names)

    @property
    def num_devices(self) -> int:
        """Number of devices, D."""
        return int(self.forward_seconds.shape[1])

    def allowed_cuts(self) -> tuple[int, ...]:
        """Return where the model may be cut, 0 and L included."""
        inside = {cut for first, last in self.together for cut in range(first + 1, last + 1)}
        return tuple(cut for cut in range(self.num_units + 1) if cut not in inside)


def _checked(profile: ModelProfile, name: str) -> FloatArray:
    """Make the field float64, and return it."""
    given = np.array(getattr(profile, name), np.float64)
    if not np.isfinite(given).all() or (given < 0).any():
        wrong = given[~np.isfinite(given) | (given < 0)].flat[0]
        raise ValueError(
            f"Every number in {name} must be finite and not negative. Received: {wrong}. "
            "Measure the unit again."
        )
    given.flags.writeable = False
    object.__setattr__(profile, name, given)
    return given
