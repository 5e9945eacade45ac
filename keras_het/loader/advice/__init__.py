"""Says what the author of an input pipeline could change, and what that would gain."""

from keras_het.loader.advice.advice import Advice, AdviceReport
from keras_het.loader.advice.advise import advise

__all__ = ["Advice", "AdviceReport", "advise"]
