"""Files that wait for storage one after the other are found; time decides, not work."""

from __future__ import annotations

import tensorflow as tf
from advised_pipelines import slow_file

from keras_het.loader.advice import sequential_interleave
from keras_het.loader.advice.examination import Examination


def advices_for(dataset):
    return sequential_interleave.find(Examination(dataset, 0.3, 0.0))


def test_files_could_be_read_in_parallel():
    files = tf.data.Dataset.range(4).shuffle(4)
    (advice,) = advices_for(files.interleave(slow_file, cycle_length=4).batch(8))
    assert advice.is_measured
    assert advice.estimated_gain > 1.3
    assert "num_parallel_calls" in advice.message


def test_files_in_parallel_are_fine():
    files = tf.data.Dataset.range(4).shuffle(4)
    parallel = files.interleave(slow_file, cycle_length=4, num_parallel_calls=tf.data.AUTOTUNE)
    assert advices_for(parallel.batch(8)) == []


def test_one_generator_is_no_interleave():
    spec = tf.TensorSpec([], tf.int64)
    generated = tf.data.Dataset.from_generator(lambda: iter([1, 2]), output_signature=spec)
    assert advices_for(generated.batch(2)) == []
