"""Advice on possible changes to an input pipeline, and on their gain."""

from keras_het.loader.advice.advice import Advice, AdviceReport
from keras_het.loader.advice.advise import advise

__all__ = ["Advice", "AdviceReport", "advise"]
