"""Detection of work that gives the same result in every epoch and could be cached."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from keras_het.loader import tf_data_adapter as adapter
from keras_het.loader.advice import nodes
from keras_het.loader.advice.advice import CACHEABLE_PREFIX, Advice, size_text
from keras_het.loader.advice.cost import count
from keras_het.loader.advice.examination import Examination, Gain
from keras_het.loader.host.memory import available_memory

Dataset = adapter.Dataset
_MOST_CANDIDATES = 3
_MOST_COUNTED = 1_000_000
_MEMORY_PART = 0.5


@dataclasses.dataclass(frozen=True)
class _Candidate:
    """A possible place for `cache()`.

    Args:
        last: the last operation before it.
        prefix: what would be cached.
        rest: the operations after it, None if the pipeline cannot be rebuilt.
        moved_past: operations, such as a shuffle, that must come after the cache.
    """

    last: Dataset
    prefix: Dataset
    rest: list[Dataset] | None
    moved_past: tuple[Dataset, ...]


def find(examination: Examination) -> list[Advice]:
    """Advise `cache()` after the last costly work that gives the same result in every epoch.

    Walks from the source to the first operation that may change: random values, Python functions,
    variables, shuffles. Maps behind a shuffle or a `repeat` count too, because they may swap places
    with it. Work that is already cached is left alone. The gain is that of the second and later
    epochs, measured with a part of the prefix in a real cache. The last place is the best; if it
    takes too much memory, an earlier one may do. A cache before a `take` would never be full, so it
    goes after it.
    """
    found = []
    for candidates in _branches(examination.dataset):
        best: Advice | None = None
        for candidate in reversed(candidates[-_MOST_CANDIDATES:]):
            advice, fits = _advice(examination, candidate)
            if fits or advice is None:
                best = advice or best
                break
            best = best or advice
        found += [best] if best else []
    return found


def _branches(root: Dataset) -> list[list[_Candidate]]:
    """Return the candidates, first to last, of each path from a source to the end."""
    path = [root]
    while not nodes.is_cache(path[-1]) and len(adapter.inputs_of(path[-1])) == 1:
        path.append(adapter.inputs_of(path[-1])[0])
    base = path.pop()
    # work before a cache costs nothing any more, and its result is constant from then on
    steady = nodes.is_cache(base) or not any(map(nodes.may_change, adapter.upstream_of(base)))
    if steady:
        return [_candidates(base, path[::-1])]
    found: list[list[_Candidate]] = []
    if _ends_early(path[::-1]):
        return found
    for source in adapter.inputs_of(base):
        for candidates in _branches(source):
            # an operation with several inputs is not rebuilt: an upper bound of the gain will do
            found.append([dataclasses.replace(each, rest=None) for each in candidates])
    return found


def _candidates(base: Dataset, path: list[Dataset]) -> list[_Candidate]:
    found: list[_Candidate] = []
    prefix = base
    aside: list[Dataset] = []
    if nodes.is_work(base):
        found.append(_Candidate(base, base, path, ()))
    for index, node in enumerate(path):
        changes = nodes.may_change(node)
        if adapter.is_repeat(node) or (changes and adapter.is_shuffle(node)):
            aside.append(node)
        elif changes or (aside and not adapter.is_map(node) and not _commutes(node)):
            break
        elif not aside:
            prefix = node
        elif adapter.is_map(node):
            prefix = adapter.rebuild_on(node, prefix)
        else:
            aside.append(node)
        if nodes.is_work(node) or (found and not aside and nodes.ends_early(node)):
            rest = [*aside, *path[index + 1 :]]
            found.append(_Candidate(node, prefix, rest, tuple(aside)))
    return [each for each in found if not _ends_early(each.rest or ())]


def _ends_early(path: Sequence[Dataset]) -> bool:
    """Tell whether an epoch leaves elements of what comes before `path` unread."""
    for node in path:
        if adapter.is_repeat(node):
            return False  # the rounds before the last one are complete
        if nodes.ends_early(node):
            return True
    return False


def _commutes(node: Dataset) -> bool:
    return adapter.commutes_with_map(node) or nodes.is_own(node)


def _advice(examination: Examination, candidate: _Candidate) -> tuple[Advice | None, bool]:
    """Return the advice for one place, and whether the memory suffices."""
    gain = _gain(examination, candidate)
    if gain is None:
        return None, True
    size = examination.cost(candidate.prefix).bytes
    elements = examination.quietly(
        lambda: count(candidate.prefix, _MOST_COUNTED, examination.seconds)
    )
    if elements is not None and elements < 0:
        return None, True
    memory = None if elements is None else int(elements * size)
    fits = memory is None or memory < _MEMORY_PART * available_memory()
    if not fits:
        note = ' That is too much for the memory here: use cache("file") on a local disk, slower.'
    elif memory is None:
        note = f" An element takes {size_text(size)}; how many there are is not known."
    else:
        note = ""
    message = (
        f"Everything up to here gives the same in each epoch. {_place(candidate)}.{note} The gain "
        "is that of the second and later epochs."
    )
    measured = gain.is_measured and fits
    label = nodes.label(candidate.last)
    return Advice(CACHEABLE_PREFIX, label, message, gain.ratio, measured, memory), fits


def _place(candidate: _Candidate) -> str:
    after = nodes.name(candidate.last)
    if not candidate.moved_past:
        return f"Put cache() after {after}"
    names = " and ".join(dict.fromkeys(nodes.name(node) for node in candidate.moved_past))
    return f"Move {after} before {names}, and put cache() between: the order is as random as it was"


def _gain(examination: Examination, candidate: _Candidate) -> Gain | None:
    if candidate.rest is not None and examination.can_build(candidate.prefix, candidate.rest):
        kept = examination.kept(candidate.prefix)
        return examination.gain_of(candidate.prefix, kept, candidate.rest)
    scale = next(s for node, s in examination.all_nodes() if node is candidate.last)
    return examination.most_gain(examination.cost(candidate.prefix).seconds * scale)
