"""Workers that train independently and exchange weights by a synchronous update rule."""

from keras_het.local_training.local_steps import LocalSteps
from keras_het.local_training.periodic_exchange import PeriodicExchange
from keras_het.local_training.variables_of_the_chief import adopt_variables_of_the_chief

__all__ = ["LocalSteps", "PeriodicExchange", "adopt_variables_of_the_chief"]
