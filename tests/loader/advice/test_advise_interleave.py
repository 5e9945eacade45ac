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


def joined(files, **options):
    """Samples of the files beside others: what follows `zip` cannot be built again."""
    samples = files.interleave(slow_file, cycle_length=4, **options)
    return tf.data.Dataset.zip(samples, tf.data.Dataset.range(160)).batch(8)


def test_files_beside_other_data_could_be_read_in_parallel():
    files = tf.data.Dataset.range(4).shuffle(4)
    (advice,) = advices_for(joined(files))
    assert advice.gain_text.startswith("at most")
    assert advice.estimated_gain > 1.3
    assert advices_for(joined(files, num_parallel_calls=tf.data.AUTOTUNE)) == []


def test_files_in_parallel_are_fine():
    files = tf.data.Dataset.range(4).shuffle(4)
    parallel = files.interleave(slow_file, cycle_length=4, num_parallel_calls=tf.data.AUTOTUNE)
    assert advices_for(parallel.batch(8)) == []


def test_one_generator_is_no_interleave():
    spec = tf.TensorSpec([], tf.int64)
    generated = tf.data.Dataset.from_generator(lambda: iter([1, 2]), output_signature=spec)
    assert advices_for(generated.batch(2)) == []
