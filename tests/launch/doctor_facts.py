"""Machines and clusters that the doctor's tests examine."""

import dataclasses
import json

from keras_het.launch.doctor.examination import run_checks
from keras_het.launch.doctor.facts import Facts, Gpu
from keras_het.launch.doctor.tensorflow_facts import TensorFlowFacts
from keras_het.strategy.cluster.cluster_config import read_cluster_config

GIB = 2**30
NOT_OURS = "192.0.2.1"  # set aside for documentation: no machine has it
TWO = {"worker": ["127.0.0.1:1001", "127.0.0.1:1002"]}
A100 = Gpu(0, "NVIDIA A100", "GPU-aaa", (8, 0), 40 * GIB, GIB)
GTX_750 = Gpu(1, "GTX 750", "GPU-bbb", (5, 0), 4 * GIB, 0)
RTX_5080 = Gpu(1, "RTX 5080", "GPU-ccc", (12, 0), 16 * GIB, 0)
CPU_BUILD = TensorFlowFacts(tensorflow="2.21.0", keras="3.15.1")
CUDA_BUILD = dataclasses.replace(
    CPU_BUILD,
    cuda="12.5.1",
    cudnn="9",
    kernels=("sm_60", "sm_70", "sm_80", "sm_89", "compute_90"),
    gpus=("NVIDIA A100",),
    replicas=1,
)
ALONE = Facts(
    host="here",
    affinity=8,
    cpus=8.0,
    memory_limit=64.0 * GIB,
    memory_used=4.0 * GIB,
    tensorflow=CPU_BUILD,
    environ={"KERAS_BACKEND": "tensorflow"},
)
WITH_GPU = dataclasses.replace(ALONE, tensorflow=CUDA_BUILD, gpus=(A100,), driver="550.54")


def having(base, environ=None, **changes):
    return dataclasses.replace(base, environ={**base.environ, **(environ or {})}, **changes)


def tf_config(cluster, task="worker", index=0):
    return json.dumps({"cluster": cluster, "task": {"type": task, "index": index}})


def in_cluster(text, environ=None, **changes):
    environ = {"TF_CONFIG": text, **(environ or {})}
    try:
        config, wrong = read_cluster_config(environ), ""
    except ValueError as error:
        config, wrong = None, str(error)
    return having(ALONE, environ, cluster=config, cluster_problem=wrong, **changes)


def found(given, check):
    return [finding for finding in run_checks(given) if finding.check == check]
