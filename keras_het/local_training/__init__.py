"""Workers that train independently and exchange weights by a synchronous update rule."""

from keras_het.local_training.local_steps import (
    LocalSteps,
    adopt_variables_of_the_chief,
    balanced_shares,
)
from keras_het.local_training.periodic_exchange import PeriodicExchange

__all__ = ["LocalSteps", "PeriodicExchange", "adopt_variables_of_the_chief", "balanced_shares"]
