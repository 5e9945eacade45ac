"""Training steps that reduce within the worker, for the time of one `fit`."""

from __future__ import annotations

from typing import Any

from keras_het.strategy.local_training.variables_of_the_chief import adopt_variables_of_the_chief


class LocalSteps:
    """Puts the training steps of a model into local mode, and takes them out again.

    A `fit` that ended in an error leaves its compiled step behind. A step that was not announced by
    `expect_step` is therefore another training's: it leaves the local mode, and goes on from the
    chief's variables on all workers.

    Args:
        model: a compiled `keras.Model`.
        strategy: its `HeterogeneousStrategy`.
    """

    def __init__(self, model: Any, strategy: Any) -> None:
        self._model, self._strategy = model, strategy
        self._is_expected = False
        self._samples = 0

    def enter(self) -> None:
        """Replaces the model's train function, reduced within the worker."""
        self._model.make_train_function(force=True)
        compiled = self._model.train_function

        def train_function(iterator: Any) -> Any:
            if not self._is_expected:
                # weights of a training that failed are each worker's own
                adopt_variables_of_the_chief(self._model, self._strategy)
                self._strategy.service_state = None  # and its center belongs to no other backup
                self.leave()
                return self._model.train_function(iterator)
            self._is_expected = False
            before = self._strategy.own_samples_delivered
            with self._strategy.extended.reductions_within_worker():
                try:
                    return compiled(iterator)
                finally:  # not what callbacks evaluate or predict
                    self._samples += self._strategy.own_samples_delivered - before

        train_function.adopts_the_chiefs = True  # type: ignore[attr-defined]
        self._model.train_function = train_function

    def take_samples(self) -> int:
        """Samples of this worker's replicas in the steps since the last call."""
        samples, self._samples = self._samples, 0
        return samples

    def expect_step(self) -> None:
        """Announces that this training's next step comes now."""
        self._is_expected = True

    def check_step(self) -> None:
        """Checks that the step which was announced has run in local mode.

        Raises:
            ValueError: if another callback has replaced the train function meanwhile.
        """
        if self._is_expected:
            raise ValueError(
                "The steps of this training are not local any more: another callback has replaced "
                "the model's train function. BatchBalancer does; leave it out, and set shares by "
                "hand (strategy.set_shares). Put LocalTraining last if it is another one."
            )

    def leave(self) -> None:
        """Replaces the model's train function, reduced over all workers."""
        self._is_expected = False
        self._model.make_train_function(force=True)
