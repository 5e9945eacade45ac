"""Version and rule state of a partition, in pieces that fit into messages."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from keras_het.rpc.partitions import LARGEST_MESSAGE_BYTES

LARGEST_PIECE = LARGEST_MESSAGE_BYTES // 8
"""Number of elements of a piece, of up to 8 bytes each."""
NOT_FINITE_STATE = (
    "The saved state of the parameter service must be finite, and its versions at least 0, or no "
    "push could be taken with it."
)
REMOVE_BACKUP = "Remove the backup (the training was diverging, or the file is damaged)."


@dataclasses.dataclass(frozen=True)
class PartState:
    """State of a partition besides its center."""

    sizes: tuple[int, ...]
    pieces: tuple[bytes, ...]


def piece_places(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Return the pieces of variables: number of the variable and first element."""
    return [
        (place, start)
        for place, size in enumerate(sizes)
        for start in range(0, size, LARGEST_PIECE)
    ]


def check_values(state: Mapping[str, np.ndarray], before: Mapping[str, np.ndarray]) -> None:
    """Refuse versions and rule state with which no push could be accepted any more."""
    found = [
        name
        for name, values in state.items()
        if np.isfinite(before[name]).all() and not np.isfinite(values).all()
    ]
    if (state["versions"] < 0).any():
        found.append("versions")
    if found:
        raise ValueError(
            f"{NOT_FINITE_STATE} Received: such values in {sorted(found)}. {REMOVE_BACKUP}"
        )


def to_arrays(states: Sequence[PartState]) -> dict[str, np.ndarray]:
    """Return the states of all partitions as named arrays, which a backup can keep."""
    found: dict[str, np.ndarray] = {}
    for index, state in enumerate(states):
        found[f"part_{index}/sizes"] = np.array(state.sizes, np.int64)
        for number, piece in enumerate(state.pieces):
            found[f"part_{index}/{number}"] = np.frombuffer(piece, np.uint8)
    return found


def from_arrays(saved: Mapping[str, np.ndarray], num_partitions: int) -> list[PartState]:
    """Restore states from the result of `to_arrays`."""
    expected = {f"part_{index}" for index in range(num_partitions)}
    has_sizes = all(f"{part}/sizes" in saved for part in expected)
    if not has_sizes or {name.partition("/")[0] for name in saved} != expected:
        raise ValueError(
            "The saved state is not that of a parameter service on tasks of its own, or of another "
            f"model. Received: {sorted(saved)}; expected: {num_partitions} partitions. Remove the "
            "backup, or use the model and cluster that it was made with."
        )
    states = []
    for index in range(num_partitions):
        sizes = tuple(map(int, saved[f"part_{index}/sizes"]))
        numbers = range(len(piece_places(sizes)))
        pieces = tuple(saved[f"part_{index}/{number}"].tobytes() for number in numbers)
        states.append(PartState(sizes, pieces))
    return states
