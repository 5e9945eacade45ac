"""Every option of the public classes and functions refuses six wrong values when it is given.

A new option fails here until it has a row: the rows are compared with the signatures.
"""

import functools
import inspect
import math
import re
from pathlib import Path

import keras
import pytest
import tensorflow as tf
from devices import DEVICES

import keras_het
from keras_het import callbacks, loader, ray, rules, summation

NAN = math.nan
# Six wrong values of each kind of option; None is a seventh unless it is the default.
WRONG = {
    "whole, one or more": ("42", -1, 0, NAN, 2.5, [3]),
    "whole, zero or more": ("42", -1, NAN, 2.5, [3], {}),
    "above zero": ("42", -1, 0, NAN, [3], {}),
    "zero or more": ("42", -1, NAN, [3], {}, True),
    "choice": ("", "Auto", 3, True, ["auto"], NAN),
    "flag": ("yes", "False", 2, NAN, [True], {}),
    "verbose": ("yes", -1, NAN, 2.5, [1], 3),
    "folder": (3, "", NAN, ["folder"], {}, Path(__file__)),
    "text": (3, True, NAN, ["text"], "", b"text"),
    "function": ("print", 3, True, NAN, [print], {}),
    "functions": ("print", 3, True, NAN, ["print"], {}),
    "numbers": (3, "42", [NAN], [-1], [2.5], [[2]]),
    "save_freq": ("sometimes", "", 0, -1, NAN, [1]),
    "sizes": (2**20, [], "42", [0], [NAN], [[2]]),
    "bound": ("42", -1, NAN, [], ["a"], {}),
    "granularity": ("Auto", 0, -8, NAN, 2.5, [8]),
    "micro_batch_size": ("Auto", 0, -1, NAN, [], [0, 2, 2]),
    "devices": ("CPU:0", [], [3], 3, ["CPU:99"], {}),
    "weights": ("42", -1, [], [NAN, 1, 1], [-1, 1, 1], ["a", 1, 1]),
    "object": ("NCCL", 3, True, NAN, [3], {"a": 1}),
    "rule": ("nothing", "", 3, NAN, ["delta"], {}),
    "split_after": (3, True, NAN, {}, [3], "stage"),
    "memory": ("42", -1, 0, NAN, [], [-1]),
    "port": ("9400", -1, 70000, NAN, 2.5, [9400]),
    "names": ("a file", 3, [], [3], NAN, {}),
    "whole": ("42", NAN, 2.5, [3], {}, b"1"),
    "schema": (3, True, NAN, {}, [3], ""),
    "dict": ("CPU", 3, True, NAN, ["CPU"], []),
    "fraction": ("42", -1, 1, NAN, [0.5], {}),
    "optimizer": ("nothing", 3, True, ["adam"], keras.optimizers.Lamb, NAN),
    "rates": ("fast", 3, [0], [NAN], [-1], {}),
    "range": ("2", 0, -1, (3, 2), NAN, [1, 2, 3]),
    "priority": ("42", -1, 20, NAN, 2.5, [3]),
}
VERBOSE = {"verbose": "verbose"}
SECONDS = {"startup_timeout_seconds": "above zero", "peer_timeout_seconds": "above zero"}
BACKUPS = {
    "backup_dir": "folder",
    "save_freq": "save_freq",
    "double_checkpoint": "flag",
    "delete_checkpoint": "flag",
    **VERBOSE,
}
DISTRIBUTED = {
    "dataset": "object",
    "global_batch_size": "whole, one or more",
    "batch_map": "functions",
    "lookahead": "whole, zero or more",
}
EASGD = {
    "alpha": "above zero",
    "learning_rate": "zero or more",
    "num_workers": "whole, one or more",
}
EXCHANGES = {"period": "whole, one or more", "overlap": "whole, zero or more"}
NESTEROV = {"learning_rate": "above zero", "momentum": "fraction"}
OPTIONS = {
    "HeterogeneousStrategy": {
        "devices": "devices",
        "share_weights": "weights",
        "cluster_resolver": "object",
        "communication_options": "object",
        "gradient_reduction": "choice",
        "micro_batch_size": "micro_batch_size",
        "communication_dtype": "choice",
        "powersgd_rank": "whole, one or more",
        "on_drift": "choice",
        **SECONDS,
    },
    "PipelineStrategy": {
        "split_after": "split_after",
        "plan": "object",
        "num_micro_batches": "whole, one or more",
        "devices": "devices",
        "device_memory_bytes": "memory",
        "recompute": "choice",
        "schedule": "choice",
        "cluster_resolver": "object",
        **SECONDS,
    },
    "reduce_over_replicas": {"aggregation": "choice"},
    "BackupAndRestore": BACKUPS,
    "ElasticBackup": BACKUPS,
    "BatchBalancer": {
        "policy": "choice",
        "max_share": "bound",
        "min_share": "bound",
        "granularity": "granularity",
        "memory_dir": "folder",
        "history_size": "whole, one or more",
        "dead_band": "zero or more",
        "least_gain_seconds": "zero or more",
        "window": "whole, one or more",
        "weights": "weights",
        **VERBOSE,
    },
    "BucketTuner": {"sizes": "sizes", "steps": "whole, one or more", **VERBOSE},
    "DataValidation": {
        "schema": "schema",
        "on_anomaly": "choice",
        "num_batches_to_check": "whole, one or more",
        "compare_shards": "flag",
        "directory": "folder",
        "features": "function",
        "schema_environment": "text",
        **VERBOSE,
    },
    "AsyncWorkers": {
        "rule": "rule",
        "period": "whole, one or more",
        "async_batch_size": "whole, one or more",
        "max_staleness": "whole, zero or more",
        "on_service_loss": "choice",
        "timeout_seconds": "above zero",
        "startup_timeout_seconds": "zero or more",
        "shutdown_timeout_seconds": "zero or more",
        "communication_dtype": "choice",
        "top_k_ratio": "above zero",
        "service_placement": "choice",
        "partition_bytes": "whole, one or more",
        "roles": "choice",
        "profile_steps": "whole, one or more",
        "noise_scale": "above zero",
        **VERBOSE,
    },
    "LoaderTuner": {
        "controller": "choice",
        "max_memory": "above zero",
        "nice": "priority",
        "cooperate_with_other_jobs": "flag",
        "max_reader_threads": "whole, one or more",
        **VERBOSE,
    },
    "LocalTraining": {
        "rule": "rule",
        "period": "whole, one or more",
        "balance": "flag",
        **VERBOSE,
    },
    "Telemetry": {
        "log_dir": "folder",
        "keep_steps": "whole, one or more",
        "progress": "flag",
        "prometheus_port": "port",
        "prometheus_address": "text",
        **VERBOSE,
    },
    "Knobs": dict.fromkeys(("num_parallel_calls", "prefetch", "threads"), "whole, one or more"),
    "InputWaitMeter": {"memory": "whole, one or more"},
    "inspect": {"seconds": "zero or more", "dataset_or_iterator": "object"},
    "tunable_pipeline": {"build": "function", "knobs": "object"},
    "distribute": DISTRIBUTED,
    "distribute_files": {
        "global_batch_size": "whole, one or more",
        "filenames": "names",
        "reader": "function",
        "samples_per_file": "numbers",
        "map_function": "function",
        "shuffle_buffer": "whole, zero or more",
        "seed": "whole",
    },
    "set_share_weights": {"share_weights": "weights"},
    "Delta": {"scale": "above zero"},
    "AsyncSGD": {
        "learning_rate": "above zero",
        "momentum": "fraction",
        "reference_batch_size": "above zero",
        "staleness_damping": "flag",
        "warmup_pushes": "whole, zero or more",
        "optimizer": "optimizer",
    },
    "DelayCompensated": {
        "learning_rate": "above zero",
        "compensation": "zero or more",
        "num_workers": "whole, one or more",
        "decay": "fraction",
    },
    **dict.fromkeys(
        ("AsyncEASGD", "AsyncMEASGD", "HogwildEASGD", "RoundRobinEASGD", "ElasticAveraging"), EASGD
    ),
    "SyncEASGD": {**EASGD, **EXCHANGES},
    "DiLoCo": {**NESTEROV, **EXCHANGES},
    "DelayedNesterov": {
        **NESTEROV,
        "num_workers": "whole, one or more",
        "period": EXCHANGES["period"],
    },
    "Summation": {
        "link_rates": "rates",
        "spare_link_rates": "rates",
        "partition_bytes": "whole, one or more",
        "partitions_in_flight": "whole, one or more",
        "timeout_seconds": "above zero",
    },
    "KerasTrainer": {
        "train_loop_per_worker": "function",
        "num_workers": "range",
        "resources_per_worker": "dict",
        "grace_seconds": "zero or more",
        "resize_interval_seconds": "above zero",
        "run_config": "object",
        "scaling_config": "object",
    },
}
PUBLIC = {
    name: getattr(module, name)
    for module in (keras_het, callbacks, loader, rules, summation, ray)
    for name in module.__all__
    if callable(getattr(module, name))
}
# What the package makes for users, and values that are no options.
MADE_BY_US = {
    "WorkerLostError",
    "ServiceLostError",
    *("TunablePipeline", "FileShardedDataset", "GlobalOrderDataset", "StepIterator"),
    *("HandoverError", "PipelineReport"),
    *("PushMeta", "Update", "TrainFunctionError", "MaxFailuresExceededError", "ReportCallback"),
    # Base classes, and names and rules that users give.
    *("UpdateRule", "SynchronousRule", "get", "serialize", "register_rule"),
    "read_gradient_reduction",
}
INTERNAL = {"layout", "wrap", "claims", "values", "lower", "upper", "micro_batch_sizes"}


@functools.cache
def strategy():
    return keras_het.HeterogeneousStrategy(DEVICES[:3])


def function_of(name):
    return PUBLIC[name] if name in PUBLIC else getattr(strategy(), name)


# What the call needs beside the option.
def others(name, option, folder):
    rows = tf.data.Dataset.range(8).batch(8)
    needed = {
        "HeterogeneousStrategy": {"devices": DEVICES[:3]},
        "reduce_over_replicas": {"values": [tf.ones(2)]},
        "BackupAndRestore": {"backup_dir": folder},
        "ElasticBackup": {"backup_dir": folder},
        "BatchBalancer": {"policy": "static"} if option == "weights" else {},
        "DataValidation": {"schema": "schema.pbtxt"},
        "AsyncSGD": {} if option == "optimizer" else {"learning_rate": 0.1},
        "DelayCompensated": {"learning_rate": 0.1, "compensation": 0.1, "num_workers": 2},
        **dict.fromkeys(
            (each for each in OPTIONS if "EASGD" in each or each == "ElasticAveraging"),
            {"alpha": 0.4} if option == "num_workers" else {"num_workers": 2},
        ),
        "DelayedNesterov": {"num_workers": 2},
        "KerasTrainer": {"train_loop_per_worker": print, "num_workers": 2},
        "Summation": {"link_rates": [1.0]},
        "Knobs": {"num_parallel_calls": 1, "prefetch": 1, "threads": 1},
        "inspect": {"dataset_or_iterator": rows},
        "tunable_pipeline": {"build": lambda knobs: rows},
        "distribute": {"dataset": rows},
        "distribute_files": {
            "filenames": [__file__],
            "reader": tf.data.TextLineDataset,
            "global_batch_size": 8,
        },
    }
    return needed.get(name, {})


def options_of(name):
    """The options that signatures have, also of what takes the further ones."""
    further = {
        "BackupAndRestore": [keras.callbacks.BackupAndRestore],
        "ElasticBackup": [keras.callbacks.BackupAndRestore],
    }
    found = {}
    for each in (function_of(name), *further.get(name, [])):
        found = {**inspect.signature(each).parameters, **found}
    kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return {k: v for k, v in found.items() if v.kind not in kinds and k not in INTERNAL}


def test_each_option_has_a_row():
    assert OPTIONS.keys() >= PUBLIC.keys() - MADE_BY_US
    for name, rows in OPTIONS.items():
        own = options_of(name)
        left_out = {"save_before_preemption", "file"} - rows.keys()
        assert own.keys() - left_out == rows.keys(), name
    assert all(len(wrong) == 6 for wrong in WRONG.values())


CASES = [(name, option) for name, rows in OPTIONS.items() for option in rows]


@pytest.mark.parametrize(("name", "option"), CASES, ids=[".".join(case) for case in CASES])
def test_wrong_values_are_refused(name, option, tmp_path):
    given = others(name, option, tmp_path / "folder")
    default = options_of(name)[option].default
    needs_none = default is not None and OPTIONS[name][option] != "weights"
    for value in (*WRONG[OPTIONS[name][option]], *([None] if needs_none else [])):
        with pytest.raises((ValueError, TypeError)) as refusal:
            function_of(name)(**{**given, option: value})
        said = str(refusal.value)
        assert option in said and "Received: " in said, said
        parts = value if isinstance(value, list) else [value]
        assert repr(value) in said or any(repr(part) in said for part in parts) or not value, said
        assert re.search("must|[Ee]xpected|Did you mean|Names are|needs|available", said), said
    assert not list(tmp_path.iterdir()), "a refused call has left something behind"
