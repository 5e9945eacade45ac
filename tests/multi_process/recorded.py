"""What checks and the tests that compare their results share; imports no TensorFlow."""

from pathlib import Path

import numpy as np

# Results that all workers share but one device has no counterpart of (an unseeded order).
ONLY_WORKERS = "only_workers/"
# Results that may differ between workers (the sizes of their own batches).
OWN = "own/"
# Of the checks of the loader.
LOADER_ROWS, LOADER_EPOCHS = 90, 3


def arrays(samples: int = 22, features: int = 5) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    x = random.normal(size=(samples, features)).astype("float32")
    y = random.normal(size=(samples, 1)).astype("float32") + 0.5
    return x, y


def assert_same_variables(
    found: Path, expected: Path, rtol: float = 1e-4, atol: float = 2e-6, steps: int | None = None
) -> None:
    """Fails unless two trainings have ended with the same variables, and after so many steps."""
    with np.load(found) as ours, np.load(expected) as theirs:
        assert ours.keys() == theirs.keys()
        assert steps is None or ours["variable_4"] == steps
        for name in theirs:
            np.testing.assert_allclose(ours[name], theirs[name], rtol, atol)
