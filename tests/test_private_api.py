"""Every private symbol of TensorFlow and Keras that the package relies on, and how it is called.

A release that moves or changes one fails here first, by name.
"""

import concurrent.futures
import inspect
import tempfile
import traceback

import keras
import pytest
import tensorflow as tf

from keras_het import HeterogeneousStrategy, private_api
from keras_het import keras_graphs_adapter as adapter
from keras_het.loader import iterator_adapter
from keras_het.loader.input.step_iterator import GraphDataset, GraphIterator, StepIterator
from keras_het.strategy.exact import keras_hooks

# Module or class; attribute with the names of its first parameters.
SIGNATURES = [
    (keras.losses.Loss, "__call__(self, y_true, y_pred, sample_weight)"),
    (private_api.keras_loss, "scale_loss_for_distribution(value)"),
    (private_api.keras_loss, "unscale_loss_for_distribution(value)"),
    *[
        (module, f"{name}(values, sample_weight, mask, reduction, dtype)")
        for module, name in keras_hooks._REDUCTIONS
    ],
    (tf.GradientTape, "gradient(self, target, sources, output_gradients)"),
    (tf.nn, "compute_average_loss(per_example_loss, sample_weight, global_batch_size)"),
    (private_api.keras_loss, "apply_mask(sample_weight, mask, dtype, reduction)"),
    (private_api.keras_reduction_metrics.Mean, "update_state(self, values, sample_weight)"),
    (private_api.keras_reduction_metrics.Sum, "update_state(self, values, sample_weight)"),
    (private_api.keras_base_optimizer.BaseOptimizer, "scale_loss(self, loss)"),
    (private_api.keras_base_optimizer.BaseOptimizer, "apply(self, grads, trainable_variables)"),
    (private_api.keras_loss_scale_optimizer.LossScaleOptimizer, "scale_loss(self, loss)"),
    (
        private_api.keras_loss_scale_optimizer.LossScaleOptimizer,
        "apply(self, grads, trainable_variables)",
    ),
    (private_api.keras_tf_optimizer.TFOptimizer, "_all_reduce_sum_gradients(self, grads_and_vars)"),
    (private_api.keras_python_utils, "pythonify_logs(logs)"),
    (keras.callbacks.ProgbarLogger, "on_train_batch_end(self, batch, logs)"),
    (keras.callbacks.ProgbarLogger, "on_test_batch_end(self, batch, logs)"),
    (keras.layers.Layer, "add_loss(self, loss)"),
    (keras.layers.Layer, "_get_own_losses(self)"),
    (keras.layers.Layer, "_clear_losses(self)"),
    (private_api.BaseTrainer, "_aggregate_additional_loss(self, loss)"),
    (private_api.TensorFlowTrainer, "_maybe_symbolic_build(self, iterator, data_batch)"),
    (private_api.TensorFlowTrainer, "_make_function(self, step_function)"),
    (private_api.KerasTensorFlowVariable, "_direct_assign(self, value)"),
    (private_api.keras_nn, "_compute_moments_sync(x, axes, keepdims)"),
    *[(private_api.ResourceVariable, f"assign{kind}(self)") for kind in ("", "_add", "_sub")],
    *[
        (private_api.ResourceVariable, f"scatter_{kind}(self)")
        for kind in ("add", "sub", "mul", "div", "max", "min", "update")
    ],
    *[
        (private_api.ResourceVariable, f"scatter_nd_{kind}(self, indices, updates)")
        for kind in ("add", "sub", "max", "min", "update")
    ],
    (private_api.ResourceVariable, "batch_scatter_update(self)"),
    (private_api.ResourceVariable, "_strided_slice_assign(self, begin, end)"),
    (private_api.keras_batch_normalization.BatchNormalization, "_moments(self, inputs, mask)"),
    (private_api.keras_seed_generator.SeedGenerator, "next(self, ordered)"),
    (private_api.keras_seed_generator, "global_seed_generator()"),
    (private_api.DropoutRNNCell, "get_dropout_mask(self, step_input)"),
    (private_api.DropoutRNNCell, "get_recurrent_dropout_mask(self, step_input)"),
    (private_api.DropoutRNNCell, "reset_dropout_mask(self)"),
    (private_api.DropoutRNNCell, "reset_recurrent_dropout_mask(self)"),
    (
        private_api.distribute_values,
        "apply_aggregation_replica_context(value, aggregation, destinations)",
    ),
    (private_api.CollectiveAllReduceExtended, "_initialize_local(self, cluster_resolver)"),
    (
        private_api.CollectiveAllReduceExtended,
        "_initialize_local_devices(self, cluster_resolver, worker_device)",
    ),
    (private_api.CollectiveAllReduceExtended, "_initialize_multi_worker(self, cluster_resolver)"),
    (private_api.CollectiveAllReduceExtended, "_use_merge_call(self)"),
    (private_api.CollectiveAllReduceExtended, "_create_variable(self, next_creator)"),
    (
        private_api.CollectiveAllReduceExtended,
        "_validate_colocate_with_variable(self, colocate_with_variable)",
    ),
    (private_api.distribute_lib, "_wrong_strategy_scope(strategy, context)"),
    (private_api.distribute_lib, "_assert_strategy(strategy)"),
    (
        private_api.CollectiveAllReduceExtended,
        "_get_variable_creator_initial_value(self, replica_id, device, primary_var)",
    ),
    (private_api.KerasTensorFlowVariable, "_initialize(self, value)"),
    (private_api.CollectiveAllReduceExtended, "_get_replica_id_in_sync_group(self, replica_id)"),
    (
        private_api.CollectiveAllReduceExtended,
        "_get_local_replica_id(self, replica_id_in_sync_group)",
    ),
    (private_api.StrategyExtended, "_replica_ctx_all_reduce(self, reduce_op, value, options)"),
    (private_api.CollectiveAllReduce, "_all_reduce(self, reduce_op, value, replica_id, options)"),
    (
        private_api.CollectiveAllReduce,
        "_all_reduce_per_replica_values(self, reduce_op, per_replica_values, options)",
    ),
    (private_api.CollectiveAllReduce, "_batch_all_gather(self, per_replica_values, axis, options)"),
    (private_api.CollectiveKeys, "__init__(self, group_key_start)"),
    (private_api.CollectiveKeys, "get_instance_key(self, group_key, device)"),
    (
        private_api.cross_device_utils.CollectiveReplicaLauncher,
        "all_reduce(self, input_tensor, control_input, options)",
    ),
    (private_api.cross_device_utils.CollectiveReplicaLauncher, "_next_instance_key(self)"),
    (private_api.autograph, "convert(recursive)"),
    (private_api.autograph_loader, "load_source(source, delete_on_exit)"),
    (private_api.ag_ctx.ControlStatusCtx, "__init__(self, status)"),
    (adapter.Node, "__init__(self, operation, call_args, call_kwargs, outputs)"),
    (adapter.Functional, "call(self, inputs, training, mask)"),
    (adapter.Functional, "_standardize_inputs(self, inputs)"),
    (
        adapter.collective_ops,
        "broadcast_send_v2(t, group_size, group_key, instance_key, communication_hint, timeout)",
    ),
    (
        adapter.collective_ops,
        "broadcast_recv_v2(shape, dtype, group_size, group_key, instance_key)",
    ),
    (adapter.collective_ops, "all_reduce_v2(t, group_size, group_key, instance_key)"),
    (adapter.device_lib, "list_local_devices()"),
    (private_api.keras_base_optimizer.BaseOptimizer, "_clip_gradients(self, grads)"),
    (private_api.keras_base_optimizer.BaseOptimizer, "_get_variable_index(self, variable)"),
    (private_api.keras_base_optimizer.BaseOptimizer, "_var_key(self, variable)"),
    (
        keras.optimizers.LossScaleOptimizer,
        "_stateful_handle_finite_grads(self, grads, trainable_variables)",
    ),
    (keras.optimizers.LossScaleOptimizer, "_stateful_handle_non_finite_grads(self)"),
    (private_api.BaseTrainer, "compute_loss(self, x, y, y_pred, sample_weight)"),
    (private_api.BaseTrainer, "_compute_loss(self, x, y, y_pred, sample_weight)"),
    (private_api.TensorFlowTrainer, "predict_step(self, data)"),
]


def _name_and_parameters(signature):
    name, _, parameters = signature.removesuffix(")").partition("(")
    return name, parameters.split(", ") if parameters else []


@pytest.mark.parametrize(
    ("owner", "signature"),
    SIGNATURES,
    ids=[f"{getattr(owner, '__name__', owner)}.{signature}" for owner, signature in SIGNATURES],
)
def test_signature(owner, signature):
    name, parameters = _name_and_parameters(signature)
    found = list(inspect.signature(getattr(owner, name)).parameters)
    assert found[: len(parameters)] == parameters


def test_a_distributed_variable_without_a_replica_has_no_handle():
    getter = private_api.distribute_values.DistributedVariable.handle.fget
    assert [*inspect.signature(getter).parameters] == ["self"]


def test_a_distributed_variable_has_a_value():
    signature = inspect.signature(private_api.distribute_values.DistributedVariable.numpy)
    assert [*signature.parameters] == ["self"]


def test_every_exported_symbol_exists():
    missing = [name for name in private_api.__all__ if not hasattr(private_api, name)]
    assert not missing


def test_distributed_input_is_iterated_as_keras_and_autograph_expect():
    """Keras passes its subclass into a graph, and AutoGraph makes a loop of the interface."""
    assert issubclass(tf.distribute.DistributedIterator, private_api.IteratorInterface)
    assert issubclass(StepIterator, private_api.IteratorInterface)
    assert not issubclass(StepIterator, tf.distribute.DistributedIterator)
    source = inspect.getsource(private_api.keras_tf_trainer)
    assert "tf.distribute.DistributedIterator" in source
    for kind in (GraphIterator, GraphDataset):
        assert issubclass(kind, private_api.CompositeTensor)  # so that a graph finds its tensors
    assert issubclass(GraphIterator, tf.distribute.DistributedIterator)
    assert issubclass(GraphDataset, tf.distribute.DistributedDataset)


def test_every_hook_has_a_place_and_is_listed_above():
    listed = {(id(owner), _name_and_parameters(each)[0]) for owner, each in SIGNATURES}
    for owner, name, _ in keras_hooks._hooks():
        assert callable(getattr(owner, name)), name
        assert (id(owner), name) in listed, f"{owner}.{name} is not in SIGNATURES"


def test_hooks_leave_nothing_behind():
    places = [(owner, name) for owner, name, _ in keras_hooks._hooks()]
    before = [vars(owner).get(name) for owner, name in places]
    with keras_hooks.keras_hooks(), keras_hooks.keras_hooks():
        inside = [vars(owner).get(name) for owner, name in places]
    assert all(a is not b for a, b in zip(before, inside, strict=True))
    after = [vars(owner).get(name) for owner, name in places]
    assert all(a is b for a, b in zip(before, after, strict=True))


def test_hooks_of_optimizers_of_ones_own_leave_nothing_behind():
    class Own(keras.optimizers.SGD):
        def apply(self, grads, trainable_variables=None):
            super().apply(grads, trainable_variables)

    class Child(Own):
        pass

    before = dict(vars(Own)), dict(vars(Child))
    with keras_hooks.keras_hooks():
        assert vars(Own)["apply"] is not before[0]["apply"]
        assert "apply" not in vars(Child)
    assert (dict(vars(Own)), dict(vars(Child))) == before


def test_steps_of_keras_are_recognised(logical_devices):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    assert private_api.keras_step_kind(model.train_step) == "train"
    assert private_api.keras_step_kind(model.test_step) == "test"
    assert private_api.keras_step_kind(model.predict_step) is None
    assert private_api.keras_step_kind(lambda data: data) is None


def test_the_step_behind_a_decorator_is_found(logical_devices):
    class Decorated(keras.Model):
        @tf.function
        def train_step(self, data):
            return data + 1 if data > 2 else data

        @tf.function(autograph=False)
        def test_step(self, data):
            return 10 * data

    model = Decorated()
    for kind, step in (("train", model.train_step), ("test", model.test_step)):
        assert private_api.keras_step_kind(step) is None
        plain = private_api.undecorated_step(step)
        assert plain.__self__ is model
        assert private_api.keras_step_kind(plain) == kind

    @tf.function
    @tf.autograph.experimental.do_not_convert
    def run(data):
        train, test = map(private_api.undecorated_step, (model.train_step, model.test_step))
        return train(data), test(data)

    results = [[int(value) for value in run(tf.constant(number))] for number in (2, 3)]
    assert results == [[2, 20], [4, 30]]
    alone = tf.function(lambda data: data)
    for other in (alone, model.predict_step, len):
        assert private_api.undecorated_step(other) == other


def test_the_predict_function_of_keras_is_recognised(logical_devices, monkeypatch):
    kinds = []
    strategy = tf.distribute.get_strategy()
    original = type(strategy).run

    def run(self, fn, *args, **kwargs):
        kinds.append(private_api.keras_step_kind(fn))
        assert private_api.model_of_prediction(fn) is model
        return original(self, fn, *args, **kwargs)

    monkeypatch.setattr(type(strategy), "run", run)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.predict(tf.ones((3, 2)), verbose=0)
    assert kinds == ["predict"]


def test_time_outs_of_a_cluster_that_is_joined(monkeypatch):
    context = private_api.eager_context.context()
    before = context.coordination_service
    monkeypatch.setattr(context, "_coordination_service_config", None)
    with private_api.coordination_timeouts(7.5, 45):
        context.configure_coordination_service("standalone")
    config = context.coordination_service
    assert config.cluster_register_timeout_in_ms == 7500
    assert config.heartbeat_timeout_in_ms == 45_000
    assert "configure_coordination_service" not in vars(context)
    monkeypatch.undo()
    assert context.coordination_service is before


def test_metrics_of_keras_are_recognised(logical_devices):
    class Own(keras.metrics.Mean):
        pass

    def own(y, y_pred):
        return y_pred

    m, losses = keras.metrics, keras.losses
    wrapper = losses.LossFunctionWrapper if hasattr(losses, "LossFunctionWrapper") else None
    of_keras = [m.AUC(), m.Mean(), m.MeanSquaredError(), m.MeanMetricWrapper(losses.Huber())]
    owns = [Own(), m.MeanMetricWrapper(own), m.MeanMetricWrapper(lambda a, b: a)]
    if wrapper is not None:
        owns.append(m.MeanMetricWrapper(wrapper(own)))
    assert [private_api.is_of_keras(metric) for metric in of_keras] == [True] * len(of_keras)
    assert [private_api.is_of_keras(metric) for metric in owns] == [False] * len(owns)


@pytest.mark.parametrize("is_model", [True, False])
def test_a_step_is_not_bound_to_an_attribute_named_target(logical_devices, is_model):
    class WithTarget(keras.Model):
        def __init__(self):
            super().__init__()
            self.target = keras.Sequential([keras.layers.Dense(1)]) if is_model else "label"
            self.train_step = tf.function(self.train_step, autograph=False)

        def train_step(self, data):
            return data

    model = WithTarget()
    step = private_api.undecorated_step(model.train_step)
    assert step.__self__ is model
    assert private_api.keras_step_kind(step) == "train"


def test_the_loop_of_a_running_fit_is_found(logical_devices):
    loops = []

    class Looks(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            loops.append(private_api.EpochLoop(self.model))

        def on_test_begin(self, logs=None):
            assert loops[0].validation_data is not None and not loops[0].validates_on_generator

    looks = Looks()
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    data = tf.ones((4, 2)), tf.ones((4, 1))
    options = {"steps_per_epoch": 3, "validation_data": data, "callbacks": [looks]}
    model.fit(*data, verbose=0, **options)
    (loop,) = loops
    assert loop.steps_per_epoch == 3
    state = vars(loop._iterator)
    assert {"_current_iterator", "_steps_seen", "_num_batches"} <= set(state)
    assert vars(keras.callbacks.TensorBoard())["_writers"] == {}
    assert loop.data is loop._iterator._distributed_dataset
    assert private_api.pass_steps_of(loop._iterator) == loop._iterator._num_batches
    outside = private_api.EpochLoop(model)
    assert outside.steps_per_epoch is None and outside.data is None
    assert looks in loop.callbacks and model.history in loop.callbacks
    assert outside.callbacks == []


@pytest.mark.parametrize(("rest", "batches", "loss"), [(2, [2, 3], None), (4, [], 7.0)])
def test_an_epoch_is_the_rest_of_one(logical_devices, rest, batches, loss):
    seen, logs_at_end = [], []

    class Resumes(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            self.loop = private_api.EpochLoop(self.model)
            if epoch == 0:
                self.loop.go_on_with_logs({"loss": 7.0})
                self.loop.resume_epoch(rest, rest) if loss is None else self.loop.skip_steps()

        def on_train_batch_end(self, batch, logs=None):
            seen.append((len(logs_at_end), batch))

        def on_epoch_end(self, epoch, logs=None):
            self.loop.end_resumed_epoch()
            logs_at_end.append(logs["loss"])

    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    x, y = tf.ones((4, 2)), tf.ones((4, 1))
    model.fit(x, y, batch_size=1, steps_per_epoch=4, epochs=2, verbose=0, callbacks=[Resumes()])
    assert [batch for epoch, batch in seen if epoch == 0] == batches
    assert [batch for epoch, batch in seen if epoch == 1] == [0, 1, 2, 3]
    assert loss is None or logs_at_end[0] == loss
    assert "_get_metrics_result_or_logs" not in vars(model)


def test_what_an_optimizer_keeps_of_its_rate(logical_devices):
    schedule = keras.optimizers.schedules.CosineDecay(0.1, 10)
    for given in (schedule, lambda: 0.1):
        assert private_api.learning_rate_of(keras.optimizers.SGD(given)) is given
    assert isinstance(private_api.learning_rate_of(keras.optimizers.SGD(0.1)), keras.Variable)


def test_operation_seeds_may_be_kept_from_a_global_seed(logical_devices, monkeypatch):
    seeds = iterator_adapter.random_seed
    monkeypatch.setattr(seeds, "get_seed", seeds.get_seed)

    def orders():
        data = tf.data.Dataset.range(20)
        return [[int(n) for n in data.shuffle(20, seed=seed)] for seed in (3, None)]

    tf.random.set_seed(None)
    seeded, _ = orders()
    tf.random.set_seed(5)
    assert iterator_adapter.global_seed() == 5
    under_global = orders()
    assert under_global[0] != seeded
    iterator_adapter.keep_operation_seeds(lambda: True)
    tf.random.set_seed(5)
    assert orders() == [seeded, under_global[1]]
    in_graph = tf.function(lambda: tf.random.uniform([], seed=3))()
    iterator_adapter.keep_operation_seeds(lambda: False)
    tf.random.set_seed(5)
    assert orders() == under_global
    tf.random.set_seed(None)
    assert float(in_graph) == float(tf.function(lambda: tf.random.uniform([], seed=3))())


def test_seeds_of_one_thread_may_come_from_a_sequence_apart(logical_devices):
    def seeds_of(count):
        return [iterator_adapter.random_seed.get_seed(None)[1] for _ in range(count)]

    tf.random.set_seed(5)
    state = iterator_adapter.operation_seed_state()
    expected = seeds_of(5)
    tf.random.set_seed(5)
    with (
        iterator_adapter.separate_operation_seeds(state),
        concurrent.futures.ThreadPoolExecutor(1) as other,
    ):
        assert seeds_of(2) == expected[:2]
        assert other.submit(seeds_of, 2).result() == expected[:2]
        tf.random.set_seed(5)  # a new generator of the process
        assert seeds_of(1) == expected[2:3]
        with iterator_adapter.separate_operation_seeds(state):
            assert seeds_of(2) == expected[:2]
        assert seeds_of(2) == expected[3:]
    assert seeds_of(5) == expected
    tf.random.set_seed(None)
    assert iterator_adapter.operation_seed_state() is None
    with iterator_adapter.separate_operation_seeds(None):
        assert tf.random.uniform([]).shape == []


def test_an_iterator_continues_in_another(logical_devices):
    def build(calls):
        numbers = tf.data.Dataset.range(20)
        return numbers.map(lambda value: value, num_parallel_calls=calls).batch(2).prefetch(2)

    old = iter(build(1))
    first = next(old).numpy().tolist()
    dataset = build(3)
    new = iter(dataset)
    iterator_adapter.restore_iterator(new, iterator_adapter.save_iterator(old))
    rest = [value for batch in new for value in batch.numpy().tolist()]
    assert first + rest == list(range(20))
    assert iterator_adapter.iterated_data_set(new) is dataset
    iterator_adapter.restart_iterator(old, build(1).take(0))
    assert list(old) == []


def test_the_model_of_an_iterator_has_what_is_read_from_it(logical_devices):
    iterator = iter(tf.data.Dataset.range(20).map(lambda value: value, num_parallel_calls=2))
    next(iterator)
    model = iterator_adapter.iterator_model(iterator)
    if not hasattr(tf.raw_ops, "IteratorGetModelProto"):
        assert model is None
        return
    node = model.nodes[model.output]
    names = ("id", "name", "inputs", "parameters", "processing_time", "num_elements", "ratio")
    for name in (*names, "node_class", "buffered_elements", "buffered_bytes"):
        assert hasattr(node, name), name
    kinds = node.DESCRIPTOR.fields_by_name["node_class"].enum_type.values_by_name
    assert {"INTERLEAVE_MANY", "ASYNC_INTERLEAVE_MANY", "ASYNC_KNOWN_RATIO"} <= set(kinds)
    options = tf.data.Options()
    options.autotune.enabled = False
    fixed = iter(tf.data.Dataset.range(2).with_options(options))
    assert iterator_adapter.iterator_model(fixed) is None


def test_a_dataset_may_pass_for_its_source(logical_devices):
    source = tf.data.Dataset.range(3)
    variant = iterator_adapter.data_set_variant(source)
    same = iterator_adapter.UnchangedElementsDataset(source, variant)
    assert [int(value) for value in same.map(lambda value: value + 1)] == [1, 2, 3]
    assert same.element_spec == source.element_spec


def test_what_tensorflow_may_take_of_a_device(logical_devices):
    limits = private_api.memory_limits()
    assert set(limits) >= set(HeterogeneousStrategy().extended.worker_devices)
    assert all(limit > 0 for limit in limits.values())
    with pytest.raises(ValueError, match="GPU:7"):
        tf.config.experimental.get_memory_info("GPU:7")


def test_graphs_of_functions_are_collected_as_placed():
    private_api.start_collecting_graphs()
    tf.function(lambda data: data + 1)(tf.ones(2))
    graphs = private_api.stop_collecting_graphs()
    assert "data" in [graph.pre_optimization_graph.node[0].name for graph in graphs]
    assert all(part.node for graph in graphs for part in graph.partition_graphs)
    private_api.start_collecting_graphs()
    assert private_api.stop_collecting_graphs() == []


def test_state_belongs_to_the_layer_that_made_it():
    network = keras.Sequential([keras.layers.BatchNormalization(), keras.layers.Dropout(0.5)])
    network.build((None, 3))
    layers = private_api.layers_with_state(network)
    assert layers[0] is network
    assert [v.name for layer in layers for v in private_api.own_state(layer)] == [
        "moving_mean",
        "moving_variance",
    ]


def test_what_keras_keeps_for_a_thread():
    key = private_api.GLOBAL_SEED_GENERATOR
    keras.utils.set_random_seed(1)
    generator = private_api.keras_seed_generator.global_seed_generator()
    assert private_api.keras_state_of_thread()[key] is generator
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        assert key not in pool.submit(private_api.keras_state_of_thread).result()


def test_variables_are_recreated_in_a_scope():
    optimizer = keras.optimizers.SGD(0.25)
    rate = optimizer._learning_rate
    before = rate.value
    private_api.recreate_variable(rate)
    assert rate.value is not before
    assert float(rate.value) == 0.25
    assert optimizer.learning_rate is rate


def test_a_function_of_tensorflow_is_replaced_under_every_name():
    by_name, originals = tf.nn.scale_regularization_loss, []
    private_api.replace_everywhere(
        by_name, lambda original: originals.append(original) or (lambda value: value + 1)
    )
    try:
        assert by_name(1) == tf.nn.scale_regularization_loss(1) == 2
    finally:
        private_api.replace_everywhere(by_name, lambda _: originals[0])
    assert float(by_name(tf.constant([1.0, 2.0]))) == 3.0


def test_an_optimizer_keeps_the_strategy_under_which_it_was_created():
    optimizer = keras.optimizers.SGD(0.25)
    assert optimizer._distribution_strategy is tf.distribute.get_strategy()
    strategy = tf.distribute.OneDeviceStrategy("CPU:0")
    private_api.move_optimizer(optimizer, strategy)
    assert optimizer._distribution_strategy is strategy


def test_a_model_knows_the_strategy_under_which_it_was_created():
    assert keras.Sequential()._distribute_strategy is None
    strategy = tf.distribute.OneDeviceStrategy("CPU:0")
    with strategy.scope():
        assert keras.Sequential()._distribute_strategy is strategy


def test_a_process_that_is_killed_leaves_no_generated_files(tmp_path, monkeypatch):
    """There are none even while it runs, and errors have what they have with the files."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    HeterogeneousStrategy()

    @tf.function
    def function(x):
        if tf.reduce_sum(x) > 0:
            x = x + 1
        else:
            raise ValueError("the message")
        return x

    with pytest.raises(ValueError, match="in user code:") as failure:
        function(tf.ones(2))
    assert list(tmp_path.rglob("*.py*")) == []
    assert f'File "{__file__}", line' in str(failure.value)
    assert "ag__.if_stmt(" in "".join(traceback.format_exception(failure.value))
