"""What happens when a function of Keras is called for a model of one of our strategies.

Importing this module replaces the functions in the table at its end, once and for all. A call for a
model of ours passes through its handlers there, in their order, the outermost first. A call for any
other model continues to Keras as it is, unless a callback of ours takes part in it.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from keras_het import private_api
from keras_het.fit.model_strategy import OwnStrategy, tell
from keras_het.fit.session import STEP_FUNCTIONS, FitSession, Rank, step_property
from keras_het.loader.input.distributed_steps import DistributedSteps
from keras_het.seen_versions import check_keras_backend, import_part
from keras_het.strategy.agreed_calls import StepWatch, agree_on_call
from keras_het.strategy.batches.gathered_rows import refusal_in
from keras_het.strategy.cluster.agreement import pass_on
from keras_het.strategy.cluster.peer_watch import message_in
from keras_het.strategy.drift import DriftWatch
from keras_het.strategy.exact.created_in_scope import explain_scope_errors, move_optimizer
from keras_het.strategy.exact.step import current_step
from keras_het.strategy.exact.xla import compiles_by_default, is_wanted
from keras_het.strategy.executions import Execution
from keras_het.strategy.measure.late_reads import keep_unread, keras_passes_unread_logs
from keras_het.value_types import Leaf, TensorLike

if TYPE_CHECKING:
    from keras_het.strategy.heterogeneous_strategy import HeterogeneousStrategy

_logger = logging.getLogger(__name__)
_ON_BATCHES = ("train_on_batch", "test_on_batch", "predict_on_batch")
_TRAINING = ("fit", "train_on_batch")
_clusters: weakref.WeakSet[HeterogeneousStrategy] = weakref.WeakSet()


@dataclass
class Call:
    """A call of one of Keras's functions, which its handlers may change."""

    name: str
    function: Callable[..., Any]
    model: keras.Model
    strategy: Any
    bound: inspect.BoundArguments
    ends: contextlib.ExitStack

    @property
    def given(self) -> dict[str, Any]:
        """The arguments by their names, without the model."""
        given = {**self.bound.arguments, **self.bound.arguments.get("kwargs", {})}
        return {name: value for name, value in given.items() if name not in ("self", "kwargs")}

    @property
    def callbacks(self) -> list[keras.callbacks.Callback]:
        """The callbacks, in whatever form they were given."""
        given = self.bound.arguments.get("callbacks")
        listed = getattr(given, "callbacks", given)
        listed = listed if isinstance(listed, (list, tuple)) else [listed]
        return [callback for callback in listed if callback is not None]

    def add_callback(self, callback: keras.callbacks.Callback, is_first: bool = False) -> None:
        """Add a callback before all others, or after them, for this call."""
        given = self.bound.arguments["callbacks"]
        if isinstance(given, keras.callbacks.CallbackList):
            callback.set_model(self.model)
            callback.set_params(given.params)
            given.callbacks.insert(0 if is_first else len(given.callbacks), callback)
            self.ends.callback(given.callbacks.remove, callback)
        else:
            own, others = [callback], self.callbacks
            self.bound.arguments["callbacks"] = own + others if is_first else others + own


Handler = Callable[[Call], AbstractContextManager[None] | None]
"""Prepares a call, or surrounds it."""


def strategy_of(model: keras.Model | None) -> HeterogeneousStrategy | None:
    """Return the strategy of a model if it is one of ours."""
    strategy = getattr(model, "distribute_strategy", None)
    return strategy if isinstance(strategy, OwnStrategy) else None


def refuse_models_outside(strategy: HeterogeneousStrategy) -> None:
    """Refuse, as long as a strategy lives, to train a model that is not in any strategy's scope."""
    _clusters.add(strategy)


def _check_was_made_in_scope(model: keras.Model, name: str) -> None:
    if getattr(model, "_distribute_strategy", None) is not None:
        return
    for cluster in _clusters:
        raise ValueError(
            f"Every worker would train this model by itself. Received: model.{name} of a model "
            "that was created outside of strategy.scope(), in a process that belongs to a cluster "
            f"of {cluster.num_workers + cluster.num_async_workers} workers. Create or load it in "
            "`with strategy.scope():`. A model that each worker is to train for itself is created "
            'in `with tf.distribute.OneDeviceStrategy("CPU:0").scope():` (or "GPU:0").'
        )


def _ending_if_asked(call: Call) -> AbstractContextManager[None]:
    """A signal ends the script between two steps, on all workers after the same one."""
    return call.strategy.extended.stop_request.loop()


@contextlib.contextmanager
def _with_short_errors(call: Call) -> Iterator[None]:
    """Errors name the lost worker, or what another worker or a check in the graph has said."""
    try:
        with call.strategy.extended.naming_lost_workers():
            yield
    except StopIteration:
        raise ValueError(
            f"The dataset is empty: model.{call.name} got no batch. Expected at least one. Look "
            "for a filter that keeps nothing, a wrong file pattern, and "
            "batch(..., drop_remainder=True) with fewer samples than a batch."
        ) from None
    except Exception as error:
        message = message_in(error) or refusal_in(error)
        if message is None or isinstance(error, ValueError):
            raise
        # TensorFlow's error surrounds it with pages of graph nodes.
        pass_on(message)


def _with_own_optimizer(call: Call) -> None:
    """An optimizer that was made outside of the scope updates variables created in it."""
    if call.model._distribute_strategy is call.strategy:
        move_optimizer(call.strategy, call.model)


def _with_async_workers(call: Call) -> None:
    """Async workers and the sync group train one model, also where the script does not say how."""
    strategy, config = call.strategy, call.strategy.extended.cluster_config
    # claimed within a callback of such a training, which fits another model
    is_within = strategy.extended.data_path.claims_source is not None
    if call.name != "fit" or not strategy.num_async_workers or config.is_evaluator or is_within:
        return
    aggregation = import_part("keras_het.callbacks", "AsyncWorkers")
    if not any(isinstance(each, aggregation) for each in call.callbacks):
        call.add_callback(aggregation(), is_first=True)
        message = "TF_CONFIG has a job async: this fit trains as with AsyncWorkers()."
        tell(message, strategy, verbose=1)


def _agreed(call: Call) -> None:
    """The call begins only if it is the same on all workers, and `fit` continues only together."""
    strategy = call.strategy
    if strategy.num_workers > 1:
        is_short = call.name in _ON_BATCHES
        agree_on_call(call, is_short)
    if call.name == "fit" and max(strategy.num_workers, strategy.layout.num_replicas) > 1:
        call.add_callback(StepWatch() if strategy.num_workers > 1 else DriftWatch())
        call.ends.callback(setattr, strategy.extended, "is_between_steps", False)


@contextlib.contextmanager
def _in_session(call: Call) -> Iterator[None]:
    """Callbacks of ours may put layers around the steps, and prepare what later ones see."""
    strategy, model = call.strategy, call.model
    holds_parts = strategy is not None and strategy._holds_parts
    with contextlib.ExitStack() as stack:
        session = stack.enter_context(FitSession(model, call.name, call.callbacks))
        if strategy is not None and call.name in STEP_FUNCTIONS:
            strategy.extended.stop_request.watch(session)
            if strategy.extended.works_ahead:
                stack.enter_context(keras_passes_unread_logs())
                session.add_layer(Rank.KEEP_LOGS, keep_unread)
        if call.name == "fit" and (holds_parts or _takes_part(call)):
            methods = ("on_epoch_begin", "on_epoch_end", "on_test_begin", "on_train_end")
            told = {method: functools.partial(session.tell, method) for method in methods}
            call.add_callback(_BeforeOthers(**told), is_first=True)
        if call.name == "fit" and strategy is not None:
            _add_last_ones(call)
        if holds_parts:
            session.before_callbacks("on_epoch_end", lambda *_: strategy._put_together(model))
        yield
        if holds_parts and call.name == "train_on_batch":
            strategy._put_together(model)


def _add_last_ones(call: Call) -> None:
    """Callbacks that keep what the others do come after them, and after Keras's history."""
    last_ones = [each.after_others for each in call.callbacks if hasattr(each, "after_others")]
    if last_ones and not any(isinstance(each, keras.callbacks.History) for each in call.callbacks):
        last_ones.insert(0, keras.callbacks.History())
    for callback in last_ones:
        call.add_callback(callback)


def _built_without_a_look(call: Call) -> None:
    """Keras learns the shapes from the specs of data that must not be looked at before an epoch."""
    # It draws an element in each `fit` and `evaluate` under a strategy. Data that is told when its
    # epochs begin and end, or that shuffles then, would continue from where that has left it.
    iterator = call.bound.arguments["iterator"]
    data = private_api.distributed_data_of(iterator)
    if isinstance(data, DistributedSteps):
        data.epoch_steps = functools.partial(private_api.epoch_steps_of, weakref.ref(iterator))
        data.set_cardinality(private_api.pass_steps_of(iterator))
        session = FitSession.of(call.model)
        if session is not None and session.loop == "fit":
            for callback in session.callbacks:
                if hasattr(callback, "before_look"):
                    callback.before_look(data)
        # an iterator that has begun belongs to the validation before, which built the model
        if not data.may_be_looked_at or private_api.has_begun(iterator):
            batch = tf.nest.map_structure(_shape_and_type, data.replica_spec)
            call.bound.arguments.update(iterator=None, data_batch=batch)


def _agreed_at_the_end(call: Call) -> AbstractContextManager[None]:
    """Workers compare what they build after the last variable."""
    agreeing: AbstractContextManager[None] = call.strategy.extended.agreeing_at_the_end()
    return agreeing


def _shape_and_type(spec: Leaf) -> Leaf:
    """Return a spec in the form Keras reads; None if an element has no tensor."""
    return spec if hasattr(spec, "dtype") else None


def _reading_ahead(call: Call) -> AbstractContextManager[None]:
    """Data of this call is prepared an execution ahead."""
    return call.strategy.extended.data_path.reading_ahead(call.model.steps_per_execution)


def _in_one_call(call: Call) -> None:
    """The steps of an execution start together."""
    make, model, data_path = call.function, call.model, call.strategy.extended.data_path
    if model.steps_per_execution > 1:
        call.function = lambda *arguments: Execution(data_path, model, make(*arguments))


@contextlib.contextmanager
def _compiled_in_parts(call: Call) -> Iterator[None]:
    """XLA compiles what is between the exchanges of a step, not the step as a whole."""
    model = call.model
    if is_wanted(model):
        # A convolution that TensorFlow has joined with its bias is unknown to XLA.
        tf.config.optimizer.set_experimental_options({"remapping": False})
    wanted, model.jit_compile = model.jit_compile, False
    try:
        yield
    finally:
        model.jit_compile = wanted


def _compiled_as_on_one_device(call: Call) -> None:
    """Keras compiles by default on GPUs, and under no strategy of TensorFlow."""
    strategy, devices = call.strategy, call.strategy.extended.worker_devices
    if strategy._compiles_steps:
        call.function = functools.partial(compiles_by_default, call.function, devices=devices)


def _whole(call: Call) -> None:
    """Every process gets the whole model first, where each holds a part of it."""
    call.strategy._complete(call.model, call.name)


def _on_chief(call: Call) -> None:
    """Only the chief writes: every worker runs the same script, and has the same callbacks."""
    if not call.strategy.is_chief:
        is_set_model = call.name == "set_model"  # TensorBoard opens its files there
        call.function = keras.callbacks.Callback.set_model if is_set_model else _do_nothing
        # within fit, the caller is a callback such as ModelCheckpoint, not a line of the script
        if call.name in _SAVING and FitSession.of(call.model) is None:
            _say_once(call.name, call.strategy.worker_index)


def _do_nothing(*args: object, **kwargs: object) -> None:
    pass


@functools.cache
def _say_once(name: str, worker_index: int) -> None:
    _logger.warning(
        "model.%s does nothing on worker %d: the chief, worker 0, writes for all workers.",
        name,
        worker_index,
    )


class SessionCallback(keras.callbacks.Callback):
    """A callback that takes part in the session of its `fit`, whatever the model's strategy."""

    @property
    def _fit_session(self) -> FitSession | None:
        """The session of the `fit` in which Keras has called this callback; None outside of one."""
        session = FitSession.of(self.model)
        return session if session is not None and session.loop == "fit" else None

    def _required_session(self) -> FitSession:
        session = self._fit_session
        if session is None:
            raise RuntimeError(
                f"{type(self).__name__} works within fit. Received: a call of its methods outside "
                "of one. Give it to model.fit among the callbacks."
            )
        return session


class _BeforeOthers(keras.callbacks.LambdaCallback):
    """What sessions do before the user's callbacks."""


def _takes_part(call: Call) -> bool:
    return any(
        isinstance(each, SessionCallback) or hasattr(each, "after_others")
        for each in call.callbacks
    )


def _open(owner: type, name: str, handlers: tuple[Handler, ...]) -> None:
    original = getattr(owner, name)
    signature = inspect.signature(original)
    has_sessions = _in_session in handlers

    @functools.wraps(original)
    def handled(subject: Any, *args: Any, **kwargs: Any) -> Any:
        models = [each for each in (subject, *args[:1]) if isinstance(each, keras.Model)]
        model = models[0] if models else subject.model
        strategy = strategy_of(model)
        if name in _TRAINING:
            _check_was_made_in_scope(model, name)
        if strategy is None and not has_sessions:
            return original(subject, *args, **kwargs)
        try:
            bound = signature.bind(subject, *args, **kwargs)
        except TypeError:  # Keras's own message is better
            return original(subject, *args, **kwargs)
        with contextlib.ExitStack() as ends:
            call = Call(name, original, model, strategy, bound, ends)
            if strategy is not None:
                around = handlers
            elif FitSession.of(model) is not None or _takes_part(call):
                around = (_in_session,)
            else:
                return original(subject, *args, **kwargs)
            bound.apply_defaults()
            for handler in around:
                surrounds = handler(call)
                if surrounds is not None:
                    ends.enter_context(surrounds)
            return call.function(*bound.args, **bound.kwargs)

    setattr(owner, name, handled)


def _average_over_replicas(original: Callable[..., Any]) -> Callable[..., Any]:
    """Let `tf.nn.compute_average_loss` be right in Keras's steps, and in custom loops."""
    # TensorFlow takes the replica's own samples times the number of replicas for all samples.

    @functools.wraps(original)
    def compute_average_loss(
        per_example_loss: TensorLike,
        sample_weight: TensorLike | None = None,
        global_batch_size: tf.Tensor | int | None = None,
    ) -> tf.Tensor:
        step = current_step()
        if step is not None:
            return step.means.average(original, per_example_loss, sample_weight, global_batch_size)
        context = tf.distribute.get_replica_context()
        strategy = None if context is None else context.strategy
        has_shares = isinstance(strategy, OwnStrategy) and strategy.layout.num_replicas > 1
        if global_batch_size is None and has_shares:
            per_example_loss = tf.convert_to_tensor(per_example_loss)
            if per_example_loss.shape.rank != 0:  # TensorFlow explains what is wrong with a scalar
                own = tf.shape(per_example_loss, tf.int64)[0]
                global_batch_size = context.all_reduce("SUM", own)
        return original(per_example_loss, sample_weight, global_batch_size)

    return compute_average_loss


_ON_BATCH: tuple[Handler, ...] = (_with_short_errors, _with_own_optimizer, _agreed, _in_session)
_LOOP = (_ending_if_asked, _with_async_workers, *_ON_BATCH, _reading_ahead)
_SAVING = ("save", "save_weights", "export")
_WRITING_CALLBACKS = {
    # Every worker still reads the backup at the start of training.
    keras.callbacks.BackupAndRestore: ("on_train_end",),
    keras.callbacks.CSVLogger: ("on_train_begin", "on_epoch_end", "on_train_end"),
    keras.callbacks.TensorBoard: (
        "set_model",
        *(f"on_{part}_{end}" for part in ("train", "test", "epoch") for end in ("begin", "end")),
        *(f"on_{part}_batch_{end}" for part in ("train", "test") for end in ("begin", "end")),
    ),
}
_HANDLERS: dict[tuple[type, str], tuple[Handler, ...]] = {
    **{(keras.Model, name): _LOOP for name in STEP_FUNCTIONS},
    **{(keras.Model, name): _ON_BATCH for name in _ON_BATCHES},
    (keras.Model, "_make_function"): (_in_one_call, _compiled_in_parts),
    (keras.Model, "make_predict_function"): (_compiled_in_parts,),
    (keras.Model, "_resolve_auto_jit_compile"): (_compiled_as_on_one_device,),
    (keras.Model, "_maybe_symbolic_build"): (_built_without_a_look, _agreed_at_the_end),
    (keras.Model, "get_weights"): (_whole,),
    **{(keras.Model, name): (_whole, _on_chief) for name in _SAVING},
    (keras.callbacks.BackupAndRestore, "_save_model"): (_whole, _on_chief),
    **{
        (owner, name): (_on_chief,) for owner, names in _WRITING_CALLBACKS.items() for name in names
    },
}
# Other backends lack some of these functions. The environment alone does not tell the backend.
check_keras_backend(keras.backend.backend())
for (_owner, _name), _around in _HANDLERS.items():
    _open(_owner, _name, _around)
for _loop, _attribute in STEP_FUNCTIONS.items():
    setattr(keras.Model, _attribute, step_property(_loop))
# Functions of TensorFlow that know the strategy, and no model.
private_api.replace_everywhere(tf.nn.compute_average_loss, _average_over_replicas)
private_api.let_variables_be_numbers()
explain_scope_errors()
