"""Which features a batch has, and the Arrow columns they become."""

import numpy as np
import pytest
import tensorflow as tf

pytest.importorskip(
    "tensorflow_data_validation", reason="needs TFDV: `make test-validation` runs this"
)

from keras_het.loader.validation.statistics import features_of_batch, record_batch

RANDOM = np.random.default_rng(0)


def test_names_of_keras_batches() -> None:
    x = {"age": np.zeros(3), "city": np.array(["a", "b", "c"])}
    assert list(features_of_batch(x)) == ["age", "city"]
    assert list(features_of_batch((x, np.zeros(3), np.ones(3)))) == [
        "age",
        "city",
        "label",
        "sample_weight",
    ]
    assert list(features_of_batch((np.zeros(3), None, np.ones(3)))) == ["x", "sample_weight"]
    several = ((np.zeros(3), {"a": np.zeros(3)}), (np.zeros(3), np.zeros(3)))
    assert list(features_of_batch(several)) == ["x/0", "x/1/a", "label/0", "label/1"]
    outputs = {"a": np.zeros(3), "b": np.zeros(3)}
    assert list(features_of_batch((np.zeros(3), outputs, outputs))) == [
        "x",
        "a",
        "b",
        "sample_weight/a",
        "sample_weight/b",
    ]


def test_two_features_of_one_name() -> None:
    with pytest.raises(ValueError, match="Two features of the batch are called 'label'"):
        features_of_batch(({"label": np.zeros(3)}, np.zeros(3)))


def test_too_many_parts() -> None:
    with pytest.raises(ValueError, match="a tuple of 4 parts"):
        features_of_batch((np.zeros(1),) * 4)


def test_scalars() -> None:
    with pytest.raises(ValueError, match="'x' is a scalar"):
        features_of_batch(tf.constant(1.0))
    with pytest.raises(ValueError, match=r"'a/0' is a scalar.*make it an array"):
        features_of_batch({"a": [1, 2, 3]})


def test_strings_in_matrices() -> None:
    for strings in (tf.constant([[["a"]]]), np.array([[["a"]]]), tf.ragged.constant([[["a"], []]])):
        with pytest.raises(TypeError, match=r"'x' has strings of shape \(1, .*expected \[rows\]"):
            features_of_batch(strings)


@pytest.mark.parametrize("dtype", [np.uint8, np.float32, tf.bfloat16.as_numpy_dtype])
def test_images(dtype: type) -> None:
    images = RANDOM.integers(0, 255, (5, 4, 6, 3)).astype(dtype)
    features = features_of_batch((tf.constant(images), np.arange(5)))
    pixels = images.astype(np.float64).reshape(5, -1)
    assert list(features) == [*(f"x/{name}" for name in EXPECTED), "label"]
    for name, expected in EXPECTED.items():
        np.testing.assert_allclose(features[f"x/{name}"], expected(pixels), 1e-5)


EXPECTED = {
    "mean": lambda rows: rows.mean(1),
    "standard_deviation": lambda rows: rows.std(1),
    "minimum": lambda rows: rows.min(1),
    "maximum": lambda rows: rows.max(1),
}


def test_images_of_different_sizes() -> None:
    small, large = np.ones((2, 3, 1), np.float32), 2 * np.ones((4, 5, 1), np.float32)
    images = tf.ragged.stack(
        [tf.RaggedTensor.from_tensor(i, ragged_rank=2) for i in (small, large)]
    )
    features = features_of_batch(images)
    assert [list(features[f"x/{name}"]) for name in EXPECTED] == [[1, 2], [0, 0], [1, 2], [1, 2]]


def test_spectrograms_of_different_lengths() -> None:
    """Only the heights differ: TensorFlow then gives dense images."""

    def image(height: tf.Tensor) -> tf.Tensor:
        return tf.ensure_shape(tf.fill([height, 3, 1], height / 2), [None, 3, 1])

    rows = tf.data.Dataset.from_tensor_slices([2, 0, 4]).map(image)
    images = next(iter(rows.ragged_batch(3)))
    features = features_of_batch((images, np.arange(3)))
    np.testing.assert_array_equal(features["x/maximum"], [1, np.nan, 2])


def test_sequences() -> None:
    values = RANDOM.normal(size=(4, 7, 2))
    features = features_of_batch(values)
    for name, expected in EXPECTED.items():
        np.testing.assert_allclose(features[f"x/{name}"], expected(values.reshape(4, -1)), 1e-5)


def test_columns() -> None:
    batch = record_batch(
        {
            "float": np.array([1.5, 2.5], np.float32),
            "double": np.array([1.5, 2.5]),
            "half": np.array([1.5, 2.5], np.float16),
            "integer": np.array([[1, 2], [3, 4]], np.uint8),
            "boolean": tf.constant([True, False]),
            "string": tf.constant(["a", "bc"]),
            "text": np.array(["ä", "b"]),
            "ragged": tf.ragged.constant([[1, 2, 3], []]),
            "sparse": tf.SparseTensor([[1, 4], [1, 2]], ["late", "early"], [2, 9]),
        }
    )
    assert batch.to_pydict() == {
        "float": [[1.5], [2.5]],
        "double": [[1.5], [2.5]],
        "half": [[1.5], [2.5]],
        "integer": [[1, 2], [3, 4]],
        "boolean": [[1], [0]],
        "string": [[b"a"], [b"bc"]],
        "text": [["ä".encode()], [b"b"]],
        "ragged": [[1, 2, 3], []],
        "sparse": [[], [b"early", b"late"]],
    }


def test_columns_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="There is no feature"):
        record_batch({})
    with pytest.raises(ValueError, match=r"same number of rows: \{'a': 2, 'b': 3\}"):
        record_batch({"a": np.zeros(2), "b": np.zeros(3)})
    with pytest.raises(TypeError, match=r"'a' has shape \(2, 3, 4\)"):
        record_batch({"a": np.zeros((2, 3, 4))})
    with pytest.raises(TypeError, match=r"feature 'a'\. Received: type complex64"):
        record_batch({"a": np.zeros(2, np.complex64)})
    with pytest.raises(TypeError, match=r"feature 'a'\. Received: .*None"):
        record_batch({"a": np.array(["x", None], object)})


def test_images_of_a_replica_without_rows() -> None:
    features = features_of_batch(np.zeros((0, 4, 4, 3), np.float32))
    assert features
    assert {len(values) for values in features.values()} == {0}


def test_integers_larger_than_tfdv_holds() -> None:
    with pytest.raises(TypeError, match=r"'id'. Received: .*9223372036854775808.*as_string"):
        record_batch({"id": np.array([1, 2**63], np.uint64)})
    batch = record_batch({"id": np.array([2**63 - 1], np.uint64)})
    assert batch.to_pydict() == {"id": [[2**63 - 1]]}
