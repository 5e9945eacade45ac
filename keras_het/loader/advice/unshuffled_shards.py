"""Detection of files that are read in the same order in every epoch."""

from __future__ import annotations

from keras_het.loader import tf_data_adapter as adapter
from keras_het.loader.advice import nodes
from keras_het.loader.advice.advice import UNSHUFFLED_SHARDS, Advice
from keras_het.loader.advice.cost import has_more_than
from keras_het.loader.advice.examination import Examination

Dataset = adapter.Dataset


def find(examination: Examination) -> list[Advice]:
    """Advise shuffling the names of files that hold many samples each.

    A shuffle of the samples that holds all of them works as well.
    """
    found = []
    for node, _ in examination.all_nodes():
        if nodes.is_file_reader(node) and not adapter.draws_from_generator(node):
            advice = _advice(examination, node)
            found += [advice] if advice else []
    return found


def _advice(examination: Examination, node: Dataset) -> Advice | None:
    sources = adapter.inputs_of(node)
    upstream = [each for source in sources for each in adapter.upstream_of(source)]
    if any(adapter.is_shuffle(each) or nodes.kind(each) == "Random" for each in upstream):
        return None
    files = sum(max(int(source.cardinality()), 0) for source in sources)
    if files == 1 or _is_shuffled_in_full(examination, node):
        return None
    number = str(files) if files > 1 else "the"
    names = "list_files(..., shuffle=True), or shuffle() of the names, before the files are read"
    message = (
        f"The samples of {number} files come in the same order in each epoch, and a shuffle of "
        f"samples that does not hold all of them mixes only neighbours. Use {names}."
    )
    return Advice(UNSHUFFLED_SHARDS, nodes.label(node), message)


def _is_shuffled_in_full(examination: Examination, node: Dataset) -> bool:
    """Tell whether a shuffle after the files holds all their samples, or may hold them."""
    sizes = [
        int(adapter.constant(other._buffer_size) or 0)
        for other, _ in examination.all_nodes()
        if adapter.is_shuffle(other) and any(each is node for each in adapter.upstream_of(other))
    ]
    if not sizes:
        return False
    # no advice on unknown numbers
    return has_more_than(node, max(sizes), max(4 * examination.seconds, 2.0)) is not True
