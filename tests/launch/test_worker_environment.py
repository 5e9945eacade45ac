from keras_het.launch.local.worker_environment import worker_environment


def test_the_backend_of_keras_is_tensorflow_unless_the_user_says_otherwise() -> None:
    """A keras.json that names another one must not decide."""
    address = ["127.0.0.1:1"]
    assert worker_environment(0, address, 1, {})["KERAS_BACKEND"] == "tensorflow"
    assert worker_environment(0, address, 1, {"KERAS_BACKEND": ""})["KERAS_BACKEND"] == "tensorflow"
    given = {"KERAS_BACKEND": "jax"}
    assert worker_environment(0, address, 1, given)["KERAS_BACKEND"] == "jax"
