"""Backups from which all workers resume at the right sample."""

from __future__ import annotations

import dataclasses
import json
import logging
import random
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from keras_het import private_api
from keras_het.fit import callback_states, resume
from keras_het.fit.backup_folder import BackupFolder
from keras_het.fit.callback_states import CallbackStates, Snapshot, numbers_in
from keras_het.fit.model_strategy import data_of_fit, heterogeneous_strategy, tell
from keras_het.fit.resume import AUTO, BackupInterval
from keras_het.fit.session import FitSession, ShorterEpochs
from keras_het.planning.argument_checks import check_flag, check_folder, check_number, check_verbose
from keras_het.strategy.cluster.agreement import by_worker, exchange
from keras_het.strategy.cluster.stop_signals import stop_signals

if TYPE_CHECKING:
    from keras_het.strategy.heterogeneous_strategy import HeterogeneousStrategy

_logger = logging.getLogger(__name__)

_SERVICE = "service/"
_TIMES = "device_times"
_METRICS = "metrics"


class BackupAndRestore(keras.callbacks.BackupAndRestore):
    """`keras.callbacks.BackupAndRestore` that resumes in the middle of an epoch.

    Keras saves after `save_freq` batches but restarts an interrupted epoch from its first batch and
    thus uses the samples before the backup twice. This callback also tells the data path the
    position of the backup: shuffles continue in the same order, and the epoch continues with the
    next global batch. Only the chief writes; every worker reads, so `backup_dir` must be a shared
    path.

    A backup is one file, written atomically and verified when read. It also holds the metrics of
    the interrupted epoch and what all callbacks of the `fit` remember: the best weights and the
    waiting of Keras's, the rows of a CSVLogger, the history. Of a callback of your own it holds
    plain attributes, or what its `get_state()` returns, which `set_state(state)` gets back.
    Backups are written after the other callbacks have run, wherever this one is in their list.

    With `save_freq="auto"`, after a backup that took c seconds the next one follows

        n = ceil(max(1 s, min(c / 0.02, sqrt(2 c m))) / t)

    steps later. t is the duration of a step in seconds; c and t are the slowest worker's. m is the
    mean time between interruptions, in seconds. Until the first interruption it is infinite, and
    backups take at most 2 % of the time. Rarer backups would repeat many steps, more frequent ones
    would cost more than they save.

    Args:
        backup_dir: folder of the backup, the same for all workers.
        save_freq: "epoch", the number of batches between two backups, or "auto".
        verbose: 1 prints each backup, and the point at which a training resumes, on the chief.
        **kwargs: further arguments of `keras.callbacks.BackupAndRestore`.

    Raises:
        ValueError: if the model does not train under a `HeterogeneousStrategy`, the workers find
            different backups, a backup has another format or, within an epoch, batches of another
            size, or another training writes there.
        OSError: if the only backup is damaged, or a backup cannot be written.

    Reference:
        `keras.callbacks.BackupAndRestore`; Young, "A first order approximation to the optimum
        checkpoint interval", Communications of the ACM 17(9), 1974.
    """

    def __init__(
        self, backup_dir: str, save_freq: str | int = "epoch", *, verbose: int = 0, **kwargs: Any
    ) -> None:
        check_folder("backup_dir", backup_dir)
        if save_freq not in (AUTO, "epoch"):
            others = f', "epoch" or "{AUTO}"'
            check_number("save_freq", save_freq, least=1, whole=True, otherwise=others)
        check_verbose(verbose)
        for name in kwargs.keys() & {"double_checkpoint", "delete_checkpoint"}:
            check_flag(name, kwargs[name])
        self._is_auto = save_freq == AUTO
        super().__init__(str(backup_dir), save_freq=1 if self._is_auto else save_freq, **kwargs)
        self._interval = BackupInterval()
        self._verbose = verbose
        self._folder = BackupFolder(backup_dir, num_kept=2 if self.double_checkpoint else 1)
        self.backup_dir = str(self._folder.path)
        self._optimizer_at_first: list[Any] = []
        self._data: Any = None
        self._loop: private_api.EpochLoop
        self._shorter_epochs = ShorterEpochs()
        self._has_told_of_turns = False
        self.after_others = _AfterOthers(
            on_train_begin=self._begin_after_all,
            on_epoch_begin=self._begin_epoch,
            on_train_batch_end=self._end_batch,
            on_epoch_end=self._end_epoch,
        )
        self._forget()

    def _forget(self) -> None:
        """Discard the state of an earlier `fit`, which may have failed within an epoch."""
        self._shorter_epochs.end()
        self._epoch = self._first_step = self._step = 0
        # Completed steps of the interrupted pass, until its epoch begins; None after that.
        self._pass_step: int | None = None
        self._num_steps: int | None = None
        self._has_resumed = False
        # State of Python's random numbers when the present pass began; None if not Keras's matter.
        self._random_state: Any = None
        self._states = CallbackStates(())
        self._metrics: np.ndarray | None = None
        self._resumed: _Resumed | None = None
        # Of a resumed epoch that has no steps left, until the next one begins.
        self._given_position: dict[str, Any] | None = None
        self._logs: Mapping[str, Any] | None = None
        # What callbacks, the position and the metrics were when the validation of an epoch began.
        self._earlier: Snapshot = {}
        self._before_validation: tuple[dict[str, Any], np.ndarray | None] | None = None
        # Of a resumed training, until its first validation.
        self._validation_passes: Sequence[Any] | None = None

    def on_train_begin(self, logs: Mapping[str, float] | None = None) -> None:
        """Restore weights, optimizer, epoch and position in the data."""
        strategy = self._strategy()
        self._loop = private_api.EpochLoop(self.model)
        if self.after_others not in self._loop.callbacks:
            raise RuntimeError(
                f"{type(self).__name__} works within fit. Received: on_train_begin outside of one. "
                "Give it to model.fit among the callbacks; custom loops have tf.train.Checkpoint."
            )
        if strategy.is_async_worker:
            return  # it resumes from the group's center and epoch
        folder = self._find_backup(strategy)
        super().on_train_begin(logs)  # finds no backup in Keras's format
        self._forget()
        self._interval.begin()
        self._data = data_of_fit(self.model, strategy)
        self._optimizer_at_first = resume.about(self.model.optimizer)
        if folder.newest is not None:
            self._restore(strategy, folder)
            strategy.barrier()  # at its end, the chief deletes what others may still read
        if (session := FitSession.of(self.model)) is not None:
            session.before_callbacks("on_test_begin", self._begin_validation)
            session.on_end(self._shorter_epochs.end)
            session.on_end(self._loop.end_resumed_epoch)
            strategy.extended.stop_request.watch(session, saves=True)

    def _begin_after_all(self, logs: Mapping[str, float] | None = None) -> None:
        """Give all callbacks what they remembered, after each of them has begun."""
        if not self._strategy().is_async_worker:
            self._states = CallbackStates(self._loop.callbacks)
            if self._resumed is not None and not self._resumed.position["step"]:
                self._restore_again()

    def _find_backup(self, strategy: HeterogeneousStrategy) -> BackupFolder:
        """Find the folder from which all workers restore the same backup, if there is one."""
        error, place = self._lock_folder(strategy), self._folder.path
        sha256 = self._folder.find()
        found = f"backup {self._folder.number}, {sha256}" if sha256 else "no backup"
        own = {"found": found, "failed": error is not None}
        everyone = exchange(strategy.extended.gather_over_workers, own)
        if any(each["failed"] for each in everyone):
            raise error or ValueError(f"The chief cannot write backups to {place}: see its output.")
        if any(each["found"] != found for each in everyone):
            raise ValueError(
                "The workers found different backups, and would continue from different weights. "
                f"Received: in {place} {by_worker([each['found'] for each in everyone])}. Only "
                "the chief writes: give a backup_dir that all workers share, or copy the chief's "
                "to all of them."
            )
        return self._folder

    def _restore(self, strategy: HeterogeneousStrategy, folder: BackupFolder) -> None:
        state = folder.restore(self.model)
        position = json.loads(str(state.pop("position")))
        strategy.extended.training_state.restored_times = str(state.pop(_TIMES, ""))
        metrics = state.pop(_METRICS, None)
        remembered = {
            name: state.pop(name) for name in list(state) if name.startswith(callback_states.PREFIX)
        }
        if state:
            strategy.extended.training_state.restored = {
                name.removeprefix(_SERVICE): values for name, values in state.items()
            }
        self._validation_passes = position.pop("validation", None)
        self._interval.resume(position)
        resume.check_batch_size(getattr(self._data, "global_batch_size", None), position)
        resume.warn_of_another_optimizer(
            self._optimizer_at_first, self.model.optimizer, position.get("optimizers")
        )
        self._epoch, self._first_step = position["epoch"], position["step"]
        first_epoch, num_steps = self._epoch, self._steps_of_epoch()
        is_whole = bool(num_steps) and self._first_step >= (num_steps or 0)
        has_all_steps = self._first_step > 0 and (is_whole or position.get("has_all_steps", False))
        if has_all_steps:  # what follows the steps of this epoch is yet to come
            self._epoch, self._first_step = self._epoch + 1, 0
        self.model._initial_epoch = first_epoch
        self._data.start_at(position["passes"], position["pass_step"])
        self._has_resumed, self._pass_step = True, position["pass_step"]
        self._random_state = position.get("random_state")
        if self._pass_step:
            seeds = getattr(self._data, "seeds_of_orders", None)
            resume.warn_of_another_order(seeds, position.get("seeds"))
        self._last_batch_seen = max(0, position["step"] - 1)
        self._resumed = _Resumed(
            folder=None if state else folder,
            position=position,
            metrics=metrics,
            remembered=remembered,
            has_all_steps=has_all_steps,
        )
        place = f"epoch {self._epoch + 1}, step {self._first_step + 1}"
        tell(f"Training continues from {folder.newest} at {place}.", strategy, self._verbose)

    def _restore_again(self) -> None:
        """Undo what callbacks have just done, as they had done it before the backup."""
        if (resumed := self._resumed) is None:
            return
        self._resumed = None
        if resumed.folder is not None:
            resumed.folder.restore(self.model)
        if resumed.metrics is not None:
            resume.add_metrics(self.model, self._strategy(), resumed.metrics)
        self._states.restore(resumed.remembered)
        if resumed.position.get("is_stopped"):
            self.model.stop_training = True
        if self.model.stop_training and resumed.position["step"]:
            self._loop.skip_steps()
            self._given_position = resumed.position
        elif self.model.stop_training:
            self.model._initial_epoch = self.params["epochs"]

    def _begin_epoch(self, epoch: int, logs: Mapping[str, float] | None = None) -> None:
        self.model._initial_epoch = None  # a later fit sets its own
        self._given_position = None
        if self._resumed is not None:
            self._loop.go_on_with_logs(self._resumed.position.get("logs") or {})
        if self._resumed is not None and self._resumed.has_all_steps:
            self._loop.skip_steps()
            self._given_position = self._resumed.position
        else:
            self._begin_steps(epoch)
        self._restore_again()

    def _begin_steps(self, epoch: int) -> None:
        if epoch != self._epoch:
            self._epoch, self._first_step = epoch, 0
        self._step, self._num_steps = self._first_step, self._steps_of_epoch()
        pass_step = self._position_of_data()[1] if self._pass_step is None else self._pass_step
        if self._pass_step is not None:
            self._loop.resume_epoch(self._first_step, self._pass_step)
        if self._pass_step is not None and self._random_state is not None:
            version, numbers, normal = self._random_state
            random.setstate((version, tuple(numbers), normal))
        elif not pass_step:
            self._random_state = self._present_random_state()
        if self._first_step:
            # The rest of an epoch is shorter than Keras expects; the data has not run out.
            self._shorter_epochs.expect()

    def on_train_batch_end(self, batch: int, logs: Mapping[str, float] | None = None) -> None:
        """Wait for the other callbacks."""

    def _end_batch(self, batch: int, logs: Mapping[str, float] | None = None) -> None:
        """Save if a backup is due, or a signal ends all workers before the next step."""
        self._step = batch + 1
        self._interval.count_step()
        self._logs, self._before_validation = logs, None
        if not self.model.stop_training:  # else the end of the epoch follows
            super().on_train_batch_end(batch)
        self._save_if_it_ends()

    def _begin_validation(self, logs: Mapping[str, float] | None = None) -> None:
        # A signal may end the training during validation, which is then repeated. Keras resets the
        # metrics now, and the data may be those of training.
        if (session := FitSession.of(self.model)) is not None:
            self._strategy().extended.stop_request.watch(session, saves=True)
        if self._validation_passes:  # else none has begun
            resume.restore_validation(self._loop.validation_data, self._validation_passes)
            self._validation_passes = None
        validation = self._passes_of_validation()
        position = {**self._position(is_iterator_left=True), "validation": validation}
        self._before_validation = position, self._gathered_metrics()
        self._earlier = self._states.snapshot()
        if not self._has_told_of_turns:
            self._has_told_of_turns = resume.warn_of_turns(
                self._loop, self._data, position["pass_step"]
            )

    def on_test_batch_end(self, batch: int, logs: Mapping[str, float] | None = None) -> None:
        """Save if training ends during validation."""
        self._save_if_it_ends()

    def on_epoch_end(self, epoch: int, logs: Mapping[str, float] | None = None) -> None:
        """Wait for the other callbacks."""

    def _end_epoch(self, epoch: int, logs: Mapping[str, float] | None = None) -> None:
        """Save after the epoch if `save_freq` is "epoch"."""
        self._loop.end_resumed_epoch()
        self._earlier, self._logs, self._before_validation = {}, None, None
        if self._given_position is None:
            self._end_steps(epoch)
        else:
            self._given_position = {**self._given_position, "epoch": epoch + 1, "step": 0}
        super().on_epoch_end(epoch)
        self._save_if_it_ends()

    def _end_steps(self, epoch: int) -> None:
        self._check_has_trained(epoch)
        if self._shorter_epochs.end() and self._leaves_an_iterator():
            # Keras did not create this iterator after the shorter epoch.
            iter(self._data)
        self._pass_step = None
        self._epoch, self._first_step, self._step = epoch + 1, 0, 0

    def on_train_end(self, logs: Mapping[str, float] | None = None) -> None:
        """Delete the backup, unless it is to be kept."""
        self._strategy().extended.stop_request.end_if_agreed()
        super().on_train_end(logs)
        self.model._initial_epoch = None

    def _save_if_it_ends(self) -> None:
        """Save if a signal ends all workers before the next step."""
        if self._strategy().extended.stop_request.is_agreed:
            self._save_model()

    def _passes_of_validation(self) -> Sequence[Any] | None:
        """What its data have gone through, None if they begin again by themselves."""
        passes_beside = getattr(self._loop.validation_data, "passes_beside", lambda other: None)
        return self._validation_passes or passes_beside(self._data)

    def _position_of_data(self) -> tuple[tuple[Any, ...], int]:
        return ((), 0) if self._data is None else self._data.position

    def _present_random_state(self) -> Any:
        """State of the numbers by which Keras shuffles a PyDataset, None for other data."""
        is_py_dataset = not getattr(self._data, "may_be_looked_at", True)
        return random.getstate() if is_py_dataset else None

    def _check_has_trained(self, epoch: int) -> None:
        # The rest of an epoch of unknown length may be empty.
        is_only_the_end = self._first_step > 0 and self._num_steps is None
        if not self._has_resumed or self._step > self._first_step or is_only_the_end:
            return
        if self._strategy().num_async_workers:
            return  # they may have trained on all of it
        raise ValueError(
            "An epoch trained no step after training continued from a backup. Received: data that "
            f"had ended before epoch {epoch + 1}, step {self._first_step + 1}; expected: "
            f"{self._num_steps or 'some'} steps in this epoch. Give fit the data of the "
            "interrupted training from its beginning, and enough for all epochs: a new generator, "
            "or a dataset with repeat()."
        )

    def _steps_of_epoch(self) -> int | None:
        known = [self.params.get("steps"), int(getattr(self._data, "cardinality", -1))]
        return min((steps for steps in known if steps and steps > 0), default=None)

    def _leaves_an_iterator(self) -> bool:
        """Whether Keras creates an iterator after this epoch that it does not use.

        Such an iterator advances shuffles. Keras creates it after the data's initial number of
        steps.
        """
        is_counted = self._num_steps is not None and self._num_steps == self.params.get("steps")
        return is_counted and self._loop.steps_per_epoch is None

    def _save_model(self) -> None:
        began, strategy = time.monotonic(), self._strategy()
        strategy._complete(self.model, type(self).__name__)
        self._metrics = self._gathered_metrics()
        with stop_signals.saving:
            self._save(strategy)
        if self._is_auto and not (
            strategy.extended.stop_request.is_agreed or strategy.is_async_worker
        ):
            self.save_freq = self._interval.next_after(time.monotonic() - began, strategy)

    def _save(self, strategy: HeterogeneousStrategy) -> None:
        if strategy.is_chief:
            self._folder.add(self.model, self._state(self._position()))
            tell(f"Saved {self._folder.newest}.", strategy, self._verbose)

    def _gathered_metrics(self) -> np.ndarray | None:
        """Gather the metrics of the epoch that has begun, one row for each replica."""
        strategy = self._strategy()
        if self._before_validation is not None:
            return self._before_validation[1]
        if strategy.is_async_worker or strategy.num_async_workers or not self._position()["step"]:
            return None
        return strategy.extended.gather_over_workers(resume.metric_values(self.model))

    def _state(self, position: Mapping[str, Any]) -> dict[str, Any]:
        logs = numbers_in(self._logs) if position["step"] else None
        optimizers = [self._optimizer_at_first, resume.about(self.model.optimizer)]
        more = {"logs": logs, "optimizers": optimizers, "validation": self._passes_of_validation()}
        text = json.dumps({**more, **self._interval.position(), **position})
        state = {
            "position": np.array(text),
            **self._service_state(),
            **self._states.export(self._earlier),
        }
        if self._metrics is not None and position["step"]:
            state[_METRICS] = self._metrics
        if (times := self._strategy().extended.training_state.export_times) is not None:
            state[_TIMES] = np.array(times())
        return state

    def _service_state(self) -> dict[str, np.ndarray]:
        """Versions and rule state of a parameter service; the last saved ones if it is lost."""
        state = self._strategy().extended.training_state.export
        arrays = state() if state is not None else {}
        if arrays is None:
            return {n: v for n, v in self._folder.state().items() if n.startswith(_SERVICE)}
        return {_SERVICE + name: values for name, values in arrays.items()}

    def _lock_folder(self, strategy: HeterogeneousStrategy) -> Exception | None:
        """Lock the chief's folder for this `fit`, and return what prevents it."""
        session = FitSession.of(self.model)
        if not strategy.is_chief or session is None:
            return None
        try:
            self._folder.lock()
        except (OSError, ValueError) as error:
            return error
        session.on_end(self._folder.unlock)
        return None

    def _position(self, is_iterator_left: bool = False) -> dict[str, Any]:
        if self._given_position is not None:
            return self._given_position
        if self._before_validation is not None:
            return self._before_validation[0]
        passes, pass_step = self._position_of_data()
        if self._strategy().num_async_workers:
            # The assignment of an epoch's batches is not stored: the epoch restarts from its
            # beginning.
            return {"epoch": self._epoch, "step": 0, "passes": passes, "pass_step": 0}
        epoch, step = self._epoch, self._step
        # Keras ends an epoch with the pass, however short; without `steps_per_epoch` it is one
        is_over = self._loop.is_at_end_of_pass if self._loop.steps_per_epoch else not pass_step
        ends_pass = step > 0 and is_over
        is_at_end = bool(self._num_steps) and step >= (self._num_steps or 0)
        if is_at_end and not pass_step and self._leaves_an_iterator():
            # that iterator is yet to come
            passes = passes if is_iterator_left else (*passes, False)
        elif self._loop.steps_per_epoch and (ends_pass or not step) and not pass_step:
            # After epochs of given length, Keras has already begun the next pass.
            passes = passes[:-1] if passes[-1:] == (False,) else passes
        return {
            "epoch": epoch,
            "step": step,
            "has_all_steps": ends_pass or is_at_end,
            "is_stopped": bool(self.model.stop_training),
            "passes": passes,
            "pass_step": pass_step,
            "global_batch_size": getattr(self._data, "global_batch_size", None),
            "seeds": getattr(self._data, "seeds_of_orders", None),
            "random_state": self._random_state if pass_step else self._present_random_state(),
        }

    def _strategy(self) -> HeterogeneousStrategy:
        return heterogeneous_strategy(self.model, self)


@dataclasses.dataclass(frozen=True)
class _Resumed:
    """A backup from which a training resumes, until its first step is due."""

    folder: BackupFolder | None
    position: dict[str, Any]
    metrics: np.ndarray | None
    remembered: dict[str, np.ndarray]
    has_all_steps: bool


class _AfterOthers(keras.callbacks.LambdaCallback):
    """The last of all callbacks: what they do belongs to a backup."""
