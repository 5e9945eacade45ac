"""TensorFlow's own base tests of strategies, on ours with two devices and with one."""

import functools

import pytest
import tensorflow as tf
from tensorflow.python.distribute import distribute_lib, strategy_test_lib

import keras_het

ALL_REDUCE = [
    f"all_reduce_{operation}{kind}"
    for operation in ("sum", "mean")
    for kind in ("", "_gradients", "_gradient_tape")
]
GENERAL = [
    "minimize_loss_eager",
    "minimize_loss_graph",
    "summary_for_replica_zero_only",
    "replica_id",
    "call_and_merge_exceptions",
    "global_step_update",
    "trainable_variable",
]


@functools.cache
def strategy_of(*devices):
    return keras_het.HeterogeneousStrategy(devices=devices)


# Not of module scope: the logical devices must exist before.
@pytest.fixture
def two_devices(logical_devices):
    return strategy_of("CPU:0", "CPU:1")


@pytest.fixture
def one_device(logical_devices):
    return strategy_of("CPU:0")


def run_base_test(base, name, strategy, *args, **kwargs):
    """Calls a test method of one of TensorFlow's base classes."""

    class Case(base):
        def runTest(self):
            getattr(self, f"_test_{name}")(strategy, *args, **kwargs)

    result = Case().run()
    problems = [text for _, text in [*result.failures, *result.errors]]
    assert not problems, "\n".join(problems)
    assert result.testsRun == 1
    for _, reason in result.skipped:
        pytest.skip(reason)


# A TF1 session makes its own devices and knows one CPU only, so that test runs on one device.
@pytest.mark.parametrize("name", [name for name in GENERAL if name != "minimize_loss_graph"])
def test_two_devices(two_devices, name):
    run_base_test(strategy_test_lib.DistributionTestBase, name, two_devices)


@pytest.mark.parametrize("in_function", [False, True])
@pytest.mark.parametrize("name", ["run", *ALL_REDUCE])
def test_communication_of_two_devices(two_devices, name, in_function):
    if name.endswith("_gradients") and not in_function:
        pytest.skip("tf.gradients needs a graph")
    run_base_test(
        strategy_test_lib.TwoDeviceDistributionTestBase,
        name,
        two_devices,
        run_in_function=in_function,
    )


@pytest.mark.parametrize(
    "name",
    [
        "run",
        "all_reduce_sum",
        "all_reduce_sum_gradient_tape",
        "all_reduce_mean",
        "all_reduce_mean_gradient_tape",
        "device_and_input_device_are_colocated",
        "device_and_input_device_are_colocated_with_function",
    ],
)
def test_one_device(one_device, name):
    run_base_test(strategy_test_lib.OneDeviceDistributionTestBase, name, one_device)


def test_input_functions(two_devices):
    class Case(strategy_test_lib.DistributionTestBase):
        def runTest(self):
            def dataset():
                return tf.data.Dataset.range(10)

            input_fn = self._input_fn_to_test_input_context(
                dataset,
                expected_num_replicas_in_sync=2,
                expected_num_input_pipelines=1,
                expected_input_pipeline_id=0,
            )
            expected = [[i, i + 1] for i in range(0, 10, 2)]
            self._test_input_fn_iterable(two_devices, input_fn, expected)

    result = Case().run()
    assert not [text for _, text in [*result.failures, *result.errors]]
    assert result.testsRun == 1


def test_it_is_our_strategy_that_the_base_tests_run(two_devices, monkeypatch):
    entered = []
    original = keras_het.HeterogeneousStrategy.run

    def counted(self, *args, **kwargs):
        entered.append(distribute_lib.in_cross_replica_context())
        return original(self, *args, **kwargs)

    monkeypatch.setattr(keras_het.HeterogeneousStrategy, "run", counted)
    run_base_test(strategy_test_lib.TwoDeviceDistributionTestBase, "run", two_devices)
    assert len(entered) == 3


def test_a_failing_base_test_is_noticed(one_device):
    # a single device gives 1, not the values of two
    with pytest.raises(AssertionError):
        run_base_test(strategy_test_lib.TwoDeviceDistributionTestBase, "run", one_device)
