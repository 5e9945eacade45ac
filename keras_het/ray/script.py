"""A script, such as `keras-het run` starts, as the training function of Ray's workers."""

from __future__ import annotations

import runpy
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ray

from keras_het.ray.trainer import KerasTrainer


def run_on_ray(
    target: Sequence[str],
    num_workers: int | tuple[int, int],
    address: str,
    resources_per_worker: Mapping[str, float] | None,
) -> None:
    """Run a script, or a module after "-m", with its arguments on workers of Ray.

    Raises:
        TrainFunctionError: if it fails.
        MaxFailuresExceededError: if workers are lost again and again without progress.
    """
    ray.init(address=address, log_to_driver=True)
    script, *arguments = target
    is_module = script == "-m"
    config = {
        "name": arguments[0] if is_module else str(Path(script).absolute()),
        "arguments": arguments[is_module:],
        "source": None if is_module else Path(script).read_bytes(),
    }
    KerasTrainer(
        run_script,
        num_workers,
        resources_per_worker=resources_per_worker,
        train_loop_config=config,
    ).fit()


def run_script(config: Mapping[str, Any]) -> None:
    """Run the script on a worker; from a copy where the machine has no such file."""
    name, source = config["name"], config["source"]
    sys.argv = [name, *config["arguments"]]
    if source is None:
        runpy.run_module(name, run_name="__main__", alter_sys=True)
        return
    path = Path(name)
    sys.path.insert(0, str(path.parent))
    if not path.exists() or path.read_bytes() != source:
        path = Path(tempfile.mkdtemp(prefix="keras_het-")) / path.name
        path.write_bytes(source)
    runpy.run_path(str(path), run_name="__main__")
