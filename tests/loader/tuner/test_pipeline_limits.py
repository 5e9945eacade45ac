"""What bounds a pipeline, from models with known numbers, as TensorFlow reports them."""

import itertools

import pytest
from tensorflow.core.framework import model_pb2

from keras_het.loader.iterators import inspection

RATIO, ASYNC_RATIO, UNKNOWN = "KNOWN_RATIO", "ASYNC_KNOWN_RATIO", "UNKNOWN_RATIO"
GONE = None  # an input that was made with the operation, and has ended
INTERLEAVE, ASYNC_INTERLEAVE = "INTERLEAVE_MANY", "ASYNC_INTERLEAVE_MANY"


def node(name, elements, ms, *inputs, kind=RATIO, ratio=1.0, buffered=0, **parameters):
    """An operation: elements that it gave, and the time of one, its inputs, value and maximum."""
    found = model_pb2.ModelProto.Node(
        name=name,
        num_elements=elements,
        buffered_elements=buffered,
        processing_time=round((elements + buffered) * ms * 1e6),
        node_class=model_pb2.NodeClass.Value(kind),
        ratio=ratio,
    )
    for key, (value, most) in parameters.items():
        found.parameters.add(name=key, value=value, state_value=value, max=most)
    return found, inputs


def source(elements, name="Range"):
    return node(name, elements, 0.0, ratio=0.0)


def prefetch(batches, *inputs):
    return node("Prefetch", batches, 0.0, *inputs, kind=ASYNC_RATIO, buffer_size=(2.0, 2.0))


def batch(batches, *inputs):
    return node("BatchV2", batches, 0.0, *inputs, ratio=8.0)


def parallel_map(elements, ms, calls, threads, *inputs, buffered=0):
    return node(
        "ParallelMapV2",
        elements,
        ms,
        *inputs,
        kind=ASYNC_RATIO,
        buffered=buffered,
        parallelism=(calls, threads),
    )


def numbered(nodes, tree, numbers):
    found, inputs = tree
    found.id = next(numbers)
    nodes[found.id].CopyFrom(found)
    for child in inputs:
        if child is GONE:
            next(numbers)
        else:
            nodes[found.id].inputs.append(numbered(nodes, child, numbers))
    return found.id


@pytest.fixture
def report_of(monkeypatch):
    def report(tree, consumer_ms):
        root = node("Root", tree[0].num_elements, 0.0, tree)
        model = model_pb2.ModelProto(gap_times=[round(consumer_ms * 1e3)] * 5)
        model.output = numbered(model.nodes, root, itertools.count(1))
        monkeypatch.setattr(
            "keras_het.loader.iterator_adapter.iterator_model", lambda iterator: model
        )
        monkeypatch.setattr(
            "keras_het.loader.iterator_adapter.iterated_data_set", lambda iterator: None
        )
        monkeypatch.setattr(inspection, "own_cpus", lambda: {0, 1}, raising=False)
        return inspection.read_report(object())

    return report


def maps(*times, below=None):
    tree = source(50) if below is None else below
    for ms in reversed(times):
        tree = node("Map", 50, ms, tree)
    return tree


def files(elements, ms, *, kind, counts=(3, 5, 0), names=None, **parameters):
    names = source(40) if names is None else names
    inner = [node("Map", count, ms, source(count, "TFRecord")) for count in counts]
    name = "Interleave" if kind == INTERLEAVE else "ParallelInterleaveV4"
    return node(name, elements, 0.0, names, *inner, kind=kind, ratio=0.0, **parameters)


def readers(count):
    return [node("TFRecord", 4, 4.0, ratio=0.0) for _ in range(count)]


def parallel(name, *inputs, **parameters):
    return node(name, 160, 0.0, *inputs, kind=ASYNC_INTERLEAVE, ratio=0.0, **parameters)


def behind_batches(*inputs):
    return prefetch(20, batch(20, *inputs))


WAITS, KEEPS_UP = "it waits for data", "the pipeline keeps up"
VERDICTS = {
    "stages of one thread are added": (
        prefetch(50, maps(4.0, 4.0, 4.0)),
        6.0,
        ["Map, Map and Map one after the other, 12.00 ms a batch", WAITS],
    ),
    "a buffer between two stages gives each a thread": (
        prefetch(50, maps(3.0, 2.0, below=prefetch(50, maps(4.0)))),
        6.0,
        ["Map and Map one after the other, 5.00 ms", KEEPS_UP],
    ),
    "the consumer waits for what it does itself": (
        maps(4.0, below=prefetch(50, maps(5.0))),
        6.0,
        ["Map, 4.00 ms", "it waits, because it does this itself"],
    ),
    "the thread below has the time of both": (
        maps(4.0, below=prefetch(50, maps(10.1))),
        6.0,
        ["Map, 10.10 ms", WAITS],
    ),
    "as many calls as threads": (
        behind_batches(parallel_map(160, 10.0, 2, 2, source(200))),
        30.0,
        ["ParallelMap, 40.00 ms a batch (2 calls at once)", WAITS],
    ),
    "calls without a thread do not run": (
        behind_batches(parallel_map(160, 10.0, 64, 2, source(200))),
        30.0,
        ["ParallelMap, 40.00 ms a batch (64 calls, 2 at once)", WAITS],
    ),
    "fewer calls than threads": (
        behind_batches(parallel_map(160, 10.0, 4, 8, source(200))),
        30.0,
        ["20.00 ms a batch (4 calls at once)", KEEPS_UP],
    ),
    "parallel maps share the threads": (
        behind_batches(parallel_map(160, 5.0, 4, 2, parallel_map(160, 10.0, 4, 2, source(200)))),
        50.0,
        ["ParallelMap and ParallelMap in the same 2 threads, 60.00 ms", WAITS],
    ),
    "work for what is in a buffer is not that of the batches taken": (
        prefetch(2, batch(2, parallel_map(16, 10.0, 64, 8, source(80), buffered=48))),
        30.0,
        ["10.00 ms a batch"],
    ),
    "rounds that have ended do not make a stage fast": (
        prefetch(43, node("ForeverRepeat", 43, 0.0, batch(3, node("Map", 24, 4.0, source(25))))),
        6.0,
        ["Map, 32.00 ms a batch", WAITS],
    ),
    "the last files when their names have ended": (
        behind_batches(
            parallel("LegacyParallelInterleaveV2", GONE, *readers(2), cycle_length=(4.0, 4.0))
        ),
        6.0,
        ["TFRecord, 8.00 ms a batch (4 at once)"],
    ),
    "maps of files in parallel need threads": (
        behind_batches(files(160, 4.0, kind=ASYNC_INTERLEAVE, parallelism=(8.0, 8.0))),
        6.0,
        ["Map, 16.00 ms a batch (2 at once)"],
    ),
    "a thread for each of two files": (
        behind_batches(files(160, 4.0, kind=ASYNC_INTERLEAVE, parallelism=(2.0, 8.0))),
        6.0,
        ["Map, 16.00 ms a batch (2 at once)"],
    ),
    "files in parallel have threads to read them": (
        behind_batches(
            parallel("ParallelInterleaveV4", source(40), *readers(8), parallelism=(8.0, 8.0))
        ),
        6.0,
        ["TFRecord, 4.00 ms a batch (8 at once)", KEEPS_UP],
    ),
    "an unknown ratio is that of the elements": (
        prefetch(
            50, node("Filter", 50, 0.0, node("Map", 100, 4.0, source(100)), kind=UNKNOWN, ratio=0.0)
        ),
        6.0,
        ["Map, 8.00 ms a batch"],
    ),
    "a full cache reads nothing more": (
        prefetch(8, node("MemoryCache", 8, 0.001, node("MemoryCacheImpl", 8, 0.001))),
        6.0,
        ["Bottleneck: ", KEEPS_UP],
    ),
    "a data service is a source": (prefetch(50, node("DataService", 50, 1.0)), 6.0, [KEEPS_UP]),
    "of what is concatenated the last is read": (
        prefetch(100, node("Concatenate", 100, 0.0, maps(4.0), maps(3.0))),
        5.0,
        ["Map, 3.00 ms", KEEPS_UP],
    ),
    "the rest of a pass is in a full shuffle": (
        prefetch(50, node("Shuffle", 50, 1.0, GONE, buffered=20)),
        6.0,
        ["keeps up for the rest of the pass. What Shuffle read has ended: the rest of the pass"],
    ),
}


@pytest.mark.parametrize(("tree", "consumer_ms", "texts"), VERDICTS.values(), ids=VERDICTS)
def test_a_verdict_names_what_bounds_the_pipeline(report_of, tree, consumer_ms, texts):
    verdict = report_of(tree, consumer_ms).verdict
    assert [text for text in texts if text not in verdict] == []


def test_files_of_an_interleave_are_one_stage(report_of):
    tree = files(160, 4.0, kind=INTERLEAVE, cycle_length=(4.0, 4.0))
    report = report_of(behind_batches(tree), 6.0)
    elements = {stage.name: stage.elements for stage in report.stages}
    assert (elements["Map"], elements["Range"]) == (8, 40)
    assert "Map, 32.00 ms a batch" in report.verdict


@pytest.mark.parametrize("counts", [(), (0, 0)])
def test_files_that_have_ended_are_no_proof_that_the_pipeline_keeps_up(report_of, counts):
    report = report_of(behind_batches(files(160, 4.0, kind=INTERLEAVE, counts=counts)), 6.0)
    assert not report.is_complete
    assert "keeps up" not in report.verdict
    assert "Of what Interleave read nothing is recorded" in report.verdict


def test_a_full_cache_takes_its_time_for_what_it_gives(report_of):
    cache = node("MemoryCacheImpl", 50, 4.0)
    cache[0].buffered_elements = 10_000
    assert "MemoryCacheImpl, 4.00 ms" in report_of(prefetch(50, cache), 6.0).verdict
