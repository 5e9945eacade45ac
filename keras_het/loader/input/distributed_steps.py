"""Common basis of distributed inputs: epochs, resumption, and acceptance by `fit`."""

from __future__ import annotations

import abc
import functools
import logging
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import tensorflow as tf

from keras_het.loader import tf_data_adapter as adapter
from keras_het.loader.input.data_pass import DataPass
from keras_het.loader.input.step_iterator import GraphIterator, State, StepIterator, Traced, Wrap
from keras_het.loader.nested import Spec, StepInput
from keras_het.loader.order.pass_counter import Pass, PassCounter, advance

_logger = logging.getLogger(__name__)


class DistributedSteps(Traced, adapter.DistributedDataset):
    """Base of the datasets that yield one element per training step of all workers."""

    # Keras draws one element of a throw-away iterator to build a model: an epoch of which only one
    # element was drawn, and whose iterator is gone, is handed to the next iterator from its start.
    # A `wrap` with a method `bound_to` gives its result for this dataset; its `element_spec` turns
    # the type of a batch into the type of a step's input. With `draws_once`, a new pass would miss
    # the elements that an earlier one has read.

    _is_iterator = False

    # The parent's constructor builds TensorFlow's own input pipeline, which ours replaces.
    def __init__(
        self,
        element_spec: Spec,
        cardinality: int,
        wrap: Wrap,
        may_be_looked_at: bool = True,
        passes: PassCounter | None = None,
        draws_once: bool = False,
    ) -> None:
        self.graph_number = None  # of a copy, a new one
        self.samples_delivered = 0
        self.input_wait_seconds = 0.0
        self._steps = np.int64(cardinality)
        self._wrap: Wrap = wrap.bound_to(self) if hasattr(wrap, "bound_to") else wrap
        to_element = getattr(self._wrap, "element_spec", lambda spec: spec)
        self.replica_spec = element_spec
        self._element_spec = to_element(element_spec)
        self.may_be_looked_at = may_be_looked_at
        self.epoch_steps: Callable[[], int | None] = lambda: None
        self._draws_once = draws_once
        self._passes = passes or PassCounter()
        self._first_step = 0
        self._looked_at: DataPass | None = None
        self._last: DataPass | None = None
        self._last_fingerprint: int | None = None
        self.passes_started = 0

    def reduce(self, initial_state: State, reduce_fn: Callable[[State, StepInput], State]) -> State:
        """Fold a function over all elements; AutoGraph turns `for batch in data_set` into this."""
        if not tf.executing_eagerly():
            return self._in_graph().reduce(initial_state, reduce_fn)
        for element in self:
            initial_state = reduce_fn(initial_state, element)
        return initial_state

    @property
    def takes_keras_arrays(self) -> bool:
        """Whether `fit` received arrays, for which Keras draws the order of samples."""
        return False

    @property
    def cardinality(self) -> np.int64:
        """Steps in an epoch, or tf.data's UNKNOWN_CARDINALITY or INFINITE_CARDINALITY."""
        return self._steps

    def set_cardinality(self, steps: int | None) -> None:
        """Tell an input of unknown size after how many steps its reader ends it."""
        if steps and self._steps < 0:
            self._steps = np.int64(steps)

    @property
    def fingerprint(self) -> int | None:
        """Hash of the first global batch's rows in the latest epoch, the same on all workers.

        None before its first step, and if the pipeline draws random values that make rows differ
        between workers. If it differs between workers their orders differ: a shuffle without a
        seed.
        """
        return self._last.fingerprint if self._last else self._last_fingerprint

    @property
    def content(self) -> Mapping[str, str]:
        """Properties that identify this data, equal on all workers; reads no element."""
        return {}

    @property
    def was_looked_at(self) -> bool:
        """Whether the first element of the next pass was looked at, and nothing since."""
        return self._looked_at is not None

    def __len__(self) -> int:
        if self._steps < 0:
            raise TypeError("This dataset has an unknown or infinite number of steps.")
        return int(self._steps)

    @property
    def running(self) -> DataPass | None:
        """The latest pass, None before the first or once nothing iterates it any more."""
        return self._last

    @property
    def position(self) -> tuple[tuple[Pass, ...], int]:
        """The dataset's position: what `start_at` needs to continue from here.

        Returns:
            The completed passes, each with whether it was iterated (or how many steps, if it was
            left before its end), and the completed steps of the present pass.
        """
        run = self._last
        if run is None or run.ended or run is self._looked_at:
            return self._passes.before(None), 0
        return self._passes.before(run.number), run.first_step + run.delivered

    def passes_beside(self, other: object) -> tuple[Pass, ...] | None:
        """All passes so far, as `start_at` takes them; None without its own shuffle."""
        # A running one counts as left where it is. `other` may count the passes of the same
        # shuffle.
        if getattr(other, "_passes", None) is self._passes or self._shuffle() is None:
            return None
        run, passes = self._last, list(self._passes.before(None))
        if run is not None and not run.ended and run is not self._looked_at:
            passes[run.number] = run.first_step + run.delivered
        return tuple(passes)

    def __iter__(self) -> StepIterator | GraphIterator:
        if not tf.executing_eagerly():
            return iter(self._in_graph())
        number = self._passes.reserve()
        return StepIterator(functools.partial(self._open, number), self._drop, self._wrap, self)

    def start_at(self, passes: int | Sequence[Pass], step: int) -> None:
        """Make the next passes continue where an earlier process stopped.

        Shuffles continue as after `passes`, and the first `step` global batches of the next one are
        skipped, before any map that runs only on the user of a row.

        Args:
            passes: completed passes over the data: a number of whole ones, or for each whether it
                was iterated (Keras starts one at the end of each epoch that it does not use), as in
                `position`.
            step: completed steps of the next pass; later passes start at 0.

        Raises:
            ValueError: if a number is negative, or the pipeline cannot return to that order.
        """
        if (isinstance(passes, int) and passes < 0) or step < 0:
            raise ValueError(
                f"passes and step must be zero or more. Received: passes={passes}, step={step}."
            )
        gone_by = (True,) * passes if isinstance(passes, int) else tuple(passes)
        if self._draws_once and self._looked_at is not None:
            self._go_on_at(self._looked_at, gone_by, step)
            return
        try:
            self._seek(gone_by)
        except ValueError:
            run = self._looked_at
            if run is None or run.number or run.first_step:
                raise
            if not gone_by:
                self._go_on_at(run, gone_by, step)
                return
            self._let_first_go_by(run, gone_by)
        self._note_position(len(gone_by))
        if self._looked_at is not None:
            self._looked_at.close()
        self._looked_at = self._last = None
        self._passes.set_to(gone_by)
        self._first_step = step

    def cut_again(self) -> None:
        """Apply weights set since a look at the first element from the first step on."""
        # If the pipeline cannot go back, they count `lookahead` steps later, as in any step.
        run = self._looked_at
        if run is None:
            return
        if self._draws_once and run.cut_first_again():
            return
        try:
            self.start_at(self._passes.before(run.number), run.first_step)
        except ValueError:
            _logger.info("The pipeline cannot go back: shares change in its first steps.")

    @abc.abstractmethod
    def _seek(self, passes: tuple[Pass, ...]) -> None:
        """Make the next pass the one after `passes`."""

    @abc.abstractmethod
    def _ordered_data(self) -> tf.data.Dataset:
        """The data whose shuffles determine the order of a pass."""

    def _shuffle(self) -> tf.data.Dataset | None:
        return adapter.first_reshuffled(self._ordered_data())

    def _note_position(self, passes: int) -> None:
        """Record that the data are at the pass after so many."""
        shuffle = self._shuffle()
        if shuffle is not None:
            self._passes.is_at(shuffle, passes)

    @abc.abstractmethod
    def _new_run(self, number: int, first_step: int) -> DataPass:
        """Start a pass."""

    def _go_on_at(self, run: DataPass, passes: tuple[Pass, ...], step: int) -> None:
        """Make the pass that was peeked at the one after `passes`, and continue in it."""
        if step < run.first_step:
            raise ValueError(
                "A generator that was given to `fit` can be drawn from once. Received: step="
                f"{step}, after the input was brought to step {run.first_step}. Call fit with a "
                "new generator."
            )
        run.leave_out(step - run.first_step)
        self._passes.set_to(passes)
        run.number = self._passes.start(len(passes))
        self._passes.give_back(run.number)
        run.on_end = functools.partial(self._passes.finish, run.number)

    def _let_first_go_by(self, run: DataPass, passes: tuple[Pass, ...]) -> None:
        """Finish the first pass, which was peeked at, where its shuffles cannot start again."""
        first, *others = passes
        while first is True and not run.ended:
            run.leave_out(1)
        run.leave_out(0 if first is True else int(first))
        advance(self._ordered_data(), others)

    def _open(self, number: int) -> DataPass:
        run, self._looked_at = self._looked_at, None
        if run is None:
            self.passes_started += 1
            number = self._passes.start(self._pass_to_start(number))
            shuffle = self._shuffle()
            if shuffle is not None:
                advance(self._ordered_data(), self._passes.catch_up(shuffle, number))
            run = self._new_run(number, self._first_step)
            run.on_end = functools.partial(self._passes.finish, number)
            self._first_step = 0
        self._last = run
        return run

    def _pass_to_start(self, number: int) -> int:
        """Return the pass that an iterator starts, by default the one it was numbered with."""
        return number

    def _drop(self, run: DataPass) -> None:
        # With a single step a look and a whole epoch are the same; only the first is a look.
        single = self._steps == 1 and self.passes_started > 1
        # The same may hold for the rest of a resumed pass; Keras executes nothing during a look.
        single |= run.first_step > 0 and run.ended and run.was_executed
        if self._steps < 0 and run.ended and run.first_step == 0 and run.delivered == 1:
            self._steps = np.int64(1)
        if self.may_be_looked_at and run is self._last and not single and run.rewind():
            self._looked_at = run
            self._passes.give_back(run.number)
            return
        if not run.ended:
            self._passes.leave(run.number, run.first_step + run.delivered)
        if run is self._last:
            self._last_fingerprint, self._last = run.fingerprint, None
