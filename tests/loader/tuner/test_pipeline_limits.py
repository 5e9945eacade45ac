"""What bounds a pipeline, from models with known numbers, as TensorFlow reports them."""

from __future__ import annotations

import itertools

import pytest
from tensorflow.core.framework import model_pb2

from keras_het.loader.inspection import inspection

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
    """Maps one after the other, the consumer's end first."""
    tree = source(50) if below is None else below
    for ms in reversed(times):
        tree = node("Map", 50, ms, tree)
    return tree


def test_stages_of_one_thread_are_added(report_of):
    verdict = report_of(prefetch(50, maps(4.0, 4.0, 4.0)), 6.0).verdict
    assert "Map, Map and Map one after the other, 12.00 ms a batch" in verdict
    assert "it waits for data" in verdict


def test_a_buffer_between_two_stages_makes_them_threads_of_their_own(report_of):
    below = prefetch(50, maps(4.0))
    report = report_of(prefetch(50, maps(3.0, 2.0, below=below)), 6.0)
    assert "Map and Map one after the other, 5.00 ms" in report.verdict
    assert "the pipeline keeps up" in report.verdict


def test_what_the_consumer_does_itself_makes_it_wait(report_of):
    report = report_of(maps(4.0, below=prefetch(50, maps(5.0))), 6.0)
    assert report.bottleneck.seconds_per_batch == pytest.approx(0.004)
    assert "it waits, as it does this itself" in report.verdict
    # the thread below has the time of both
    assert "Map, 10.10 ms" in report_of(maps(4.0, below=prefetch(50, maps(10.1))), 6.0).verdict


@pytest.mark.parametrize("calls", [2, 4, 64])
def test_calls_without_a_thread_do_not_run(report_of, calls):
    report = report_of(prefetch(20, batch(20, parallel_map(160, 10.0, calls, 2, source(200)))), 30)
    assert report.bottleneck.at_once == 2
    assert report.bottleneck.seconds_per_batch_in_parallel == pytest.approx(0.04)
    assert "40.00 ms a batch" in report.verdict
    assert "it waits for data" in report.verdict


def test_fewer_calls_than_threads_are_what_runs(report_of):
    report = report_of(prefetch(20, batch(20, parallel_map(160, 10.0, 4, 8, source(200)))), 30)
    assert "20.00 ms a batch (4 calls at once)" in report.verdict
    assert "the pipeline keeps up" in report.verdict


def test_parallel_maps_share_the_threads(report_of):
    first = parallel_map(160, 10.0, 4, 2, source(200))
    report = report_of(prefetch(20, batch(20, parallel_map(160, 5.0, 4, 2, first))), 50)
    assert "ParallelMap and ParallelMap in the same 2 threads, 60.00 ms" in report.verdict
    assert "it waits for data" in report.verdict


def test_work_for_what_waits_in_a_buffer_is_not_that_of_the_batches_taken(report_of):
    calls = parallel_map(16, 10.0, 64, 8, source(80), buffered=48)
    assert "10.00 ms a batch" in report_of(prefetch(2, batch(2, calls)), 30).verdict


def test_rounds_that_have_ended_do_not_make_a_stage_fast(report_of):
    round_now = batch(3, node("Map", 24, 4.0, source(25)))
    report = report_of(prefetch(43, node("ForeverRepeat", 43, 0.0, round_now)), 6.0)
    assert "Map, 32.00 ms a batch" in report.verdict
    assert "it waits for data" in report.verdict


def files(elements, ms, *, kind, counts=(3, 5, 0), names=None, **parameters):
    """An interleave in the middle of some files."""
    names = source(40) if names is None else names
    inner = [node("Map", count, ms, source(count, "TFRecord")) for count in counts]
    name = "Interleave" if kind == INTERLEAVE else "ParallelInterleaveV4"
    return node(name, elements, 0.0, names, *inner, kind=kind, ratio=0.0, **parameters)


def test_files_of_an_interleave_are_one_stage(report_of):
    tree = files(160, 4.0, kind=INTERLEAVE, cycle_length=(4.0, 4.0))
    report = report_of(prefetch(20, batch(20, tree)), 6.0)
    (stage,) = [stage for stage in report.stages if stage.name == "Map"]
    assert stage.elements == 8
    assert "Map, 32.00 ms a batch" in report.verdict
    (outer,) = [stage for stage in report.stages if stage.name == "Range"]
    assert outer.elements == 40


def test_the_last_files_are_known_when_their_names_have_ended(report_of):
    inner = [node("TFRecord", 4, 4.0, ratio=0.0) for _ in range(2)]
    tree = node(
        "LegacyParallelInterleaveV2",
        160,
        0.0,
        GONE,
        *inner,
        kind=ASYNC_INTERLEAVE,
        ratio=0.0,
        cycle_length=(4.0, 4.0),
    )
    report = report_of(prefetch(20, batch(20, tree)), 6.0)
    assert "TFRecord, 8.00 ms a batch (4 at once)" in report.verdict


@pytest.mark.parametrize("workers", [2, 8])
def test_files_in_parallel_need_threads_for_their_maps(report_of, workers):
    tree = files(
        160,
        4.0,
        kind=ASYNC_INTERLEAVE,
        cycle_length=(8.0, 8.0),
        parallelism=(workers, 8.0),
    )
    report = report_of(prefetch(20, batch(20, tree)), 6.0)
    assert "Map, 16.00 ms a batch (2 at once)" in report.verdict


def test_files_in_parallel_are_read_by_threads_of_their_own(report_of):
    inner = [node("TFRecord", 4, 4.0, ratio=0.0) for _ in range(8)]
    tree = node(
        "ParallelInterleaveV4",
        160,
        0.0,
        source(40),
        *inner,
        kind=ASYNC_INTERLEAVE,
        ratio=0.0,
        parallelism=(8.0, 8.0),
    )
    report = report_of(prefetch(20, batch(20, tree)), 6.0)
    assert "TFRecord, 4.00 ms a batch (8 at once)" in report.verdict
    assert "the pipeline keeps up" in report.verdict


def test_an_operation_of_unknown_ratio_has_that_of_its_elements(report_of):
    tree = node("Filter", 50, 0.0, node("Map", 100, 4.0, source(100)), kind=UNKNOWN, ratio=0.0)
    assert "Map, 8.00 ms a batch" in report_of(prefetch(50, tree), 6.0).verdict


@pytest.mark.parametrize("counts", [(), (0, 0)])
def test_files_that_have_ended_are_no_proof_that_the_pipeline_keeps_up(report_of, counts):
    tree = files(160, 4.0, kind=INTERLEAVE, counts=counts)
    report = report_of(prefetch(20, batch(20, tree)), 6.0)
    assert not report.is_complete
    assert "keeps up" not in report.verdict
    assert "Of what Interleave read nothing is recorded" in report.verdict


def test_a_full_cache_reads_nothing_more(report_of):
    cache = node("MemoryCache", 8, 0.001, node("MemoryCacheImpl", 8, 0.001))
    report = report_of(prefetch(8, cache), 6.0)
    assert report.is_complete
    assert "keeps up" in report.verdict


def test_a_full_cache_takes_its_time_for_what_it_gives(report_of):
    cache = node("MemoryCacheImpl", 50, 4.0)
    cache[0].buffered_elements = 10_000
    assert "MemoryCacheImpl, 4.00 ms" in report_of(prefetch(50, cache), 6.0).verdict


def test_a_data_service_is_a_source(report_of):
    report = report_of(prefetch(50, node("DataService", 50, 1.0)), 6.0)
    assert "the pipeline keeps up" in report.verdict


def test_of_what_is_concatenated_the_last_is_read(report_of):
    both = node("Concatenate", 100, 0.0, maps(4.0), maps(3.0))
    assert "Map, 3.00 ms" in report_of(prefetch(100, both), 5.0).verdict
    assert "keeps up" in report_of(prefetch(100, both), 5.0).verdict


def test_the_rest_of_a_pass_is_in_a_full_shuffle(report_of):
    report = report_of(prefetch(50, node("Shuffle", 50, 1.0, GONE, buffered=20)), 6.0)
    assert "keeps up for the rest of the pass" in report.verdict
    assert "What Shuffle read has ended" in report.verdict
    assert "Look again" not in report.verdict
