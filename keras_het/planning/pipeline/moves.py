"""Small changes of a chain of stages, for a local search with simulated times."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

from keras_het.planning.pipeline.least_latency import Chain, ChainStage, Group


def neighbours(chain: Chain, num_devices: int) -> Iterator[Chain]:
    """Yield chains that differ by one cut, one device, or two stages that become one."""
    for number in range(1, len(chain)):
        yield from _moved_cuts(chain, number)
    groups = [stage.group for stage in chain]
    used = {device for group in groups for device in group}
    unused = [device for device in range(num_devices) if device not in used]
    for number, group in enumerate(groups):
        for device in group:
            for other in unused:
                yield _with_groups(chain, {number: _without(group, device, other)})
            if len(group) > 1:
                yield _with_groups(chain, {number: _without(group, device)})
                for to in (number - 1, number + 1):
                    if 0 <= to < len(groups):
                        moved = _sorted((*groups[to], device))
                        yield _with_groups(chain, {number: _without(group, device), to: moved})
        for device in unused:
            yield _with_groups(chain, {number: _sorted((*group, device))})
    for number in range(1, len(chain)):
        before, after = chain[number - 1], chain[number]
        for group in (before.group, after.group, _sorted(before.group + after.group)):
            merged = ChainStage(before.row, after.column, group, 0)
            yield (*chain[: number - 1], merged, *chain[number + 1 :])


def _moved_cuts(chain: Chain, number: int) -> Iterator[Chain]:
    before, after = chain[number - 1], chain[number]
    for row in (after.row - 1, after.row + 1):
        if before.row < row < after.column:
            stages = dataclasses.replace(before, column=row), dataclasses.replace(after, row=row)
            yield (*chain[: number - 1], *stages, *chain[number + 1 :])


def _with_groups(chain: Chain, groups: dict[int, Group]) -> Chain:
    return tuple(
        dataclasses.replace(stage, group=groups.get(number, stage.group))
        for number, stage in enumerate(chain)
    )


def _without(group: Group, device: int, *others: int) -> Group:
    return _sorted((*(member for member in group if member != device), *others))


def _sorted(group: Iterable[int]) -> Group:
    return tuple(sorted(group))
