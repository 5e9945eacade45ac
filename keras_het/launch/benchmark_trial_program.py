"""The program that trains one model on some devices, and prints how fast it is."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_het import private_api
from keras_het.launch.doctor.tensorflow_facts import say

_CLASSES, _WORDS = 1000, 32_000
_SEED = 0


def convnet(is_small: bool) -> keras.Model:
    """Return ResNet50 for images of 224 x 224 pixels, or a few convolutions for 16 x 16."""
    if not is_small:
        inputs = keras.Input((224, 224, 3), dtype="uint8")
        images = keras.layers.Rescaling(1 / 127.5, offset=-1.0)(inputs)
        network = keras.applications.ResNet50(weights=None, classes=_CLASSES)
        return keras.Model(inputs, network(images))
    layers = [
        keras.Input((16, 16, 3), dtype="uint8"),
        keras.layers.Rescaling(1 / 127.5, offset=-1.0),
        keras.layers.Conv2D(8, 3, activation="relu"),
        keras.layers.GlobalAveragePooling2D(),
        keras.layers.Dense(_CLASSES, activation="softmax"),
    ]
    return keras.Sequential(layers)


def transformer(is_small: bool) -> keras.Model:
    """Return a decoder of six blocks for 256 words, or of one small block for 16."""
    blocks, width, heads, length = (1, 16, 2, 16) if is_small else (6, 512, 8, 256)
    words = _WORDS if not is_small else 64
    inputs = keras.Input((length,), dtype="int32")
    hidden = keras.layers.Embedding(words, width)(inputs)
    for _ in range(blocks):
        normalized = keras.layers.LayerNormalization()(hidden)
        attention = keras.layers.MultiHeadAttention(heads, width // heads)
        hidden = hidden + attention(normalized, normalized, use_causal_mask=True)
        normalized = keras.layers.LayerNormalization()(hidden)
        wide = keras.layers.Dense(4 * width, activation="gelu")(normalized)
        hidden = hidden + keras.layers.Dense(width)(wide)
    outputs = keras.layers.Dense(words, activation="softmax", dtype="float32")(hidden)
    return keras.Model(inputs, outputs)


MODELS: dict[str, Callable[[bool], keras.Model]] = {
    "convnet": convnet,
    "transformer": transformer,
}


def endless_batches(model: keras.Model, batch_size: int) -> tf.data.Dataset:
    """Return the same random batch again and again, so that no step waits for data."""
    random = np.random.default_rng(_SEED)
    shape, classes = model.input_shape[1:], model.output_shape[-1]
    highest = 256 if len(shape) == 3 else classes
    x = random.integers(0, highest, (batch_size, *shape), "int32")
    y = random.integers(0, classes, (batch_size, *model.output_shape[1:-1]), "int32")
    return tf.data.Dataset.from_tensors((x.astype(model.inputs[0].dtype), y)).repeat()


# What kernels of TensorFlow 2.21's CUDA build want in host memory, after the attribute that has its
# type; conditions need none.
_HOST_INPUTS: dict[str, tuple[str, tuple[int, ...]]] = {
    "BroadcastTo": ("Tidx", (1,)),
    "Fill": ("index_type", (0,)),
    "If": ("Tcond", (0,)),
    "LoopCond": ("", (0,)),
    "Range": ("Tidx", (0, 1, 2)),
    "Reshape": ("Tshape", (1,)),
    "Slice": ("Index", (1, 2)),
    "SplitV": ("Tlen", (1,)),
    "StatelessIf": ("Tcond", (0,)),
    "StridedSlice": ("Index", (1, 2, 3)),
    "StridedSliceGrad": ("Index", (0, 1, 2, 3)),
    "Switch": ("", (1,)),
    "Tile": ("Tmultiples", (1,)),
    "UnsortedSegmentSum": ("Tnumsegments", (2,)),
}
# What these make is there, as are integers of 32 bits and what is computed of them.
_ON_HOST: tuple[str, ...] = ("Const", "LoopCond", "PyFunc", "Range", "Shape", "ShapeN", "Size")
_ON_HOST += ("_HostRecv", "_Recv", "_XlaCompile")
_KEPT = ("ReadVariableOp", "_Arg")  # so are integers and conditions among these
_INT32, _INT64, _BOOL = (kind.as_datatype_enum for kind in (tf.int32, tf.int64, tf.bool))
_HOST = "CPU:0"
# First arguments of the functions of a step: of Keras's two, and of our own of several steps.
_STEP_ARGUMENTS = ("data", "iterator", "steps")


def steps_of(graphs: Iterable[Any]) -> list[Any]:
    """Return those of the `FunctionGraphs` that are a step."""
    return [graph for graph in graphs if _is_step(graph.pre_optimization_graph.node)]


def _is_step(nodes: Any) -> bool:
    # a single operation that runs eagerly has a graph, too
    is_function = sum(not node.op.startswith("_") for node in nodes) > 1
    return is_function and nodes[0].name in _STEP_ARGUMENTS


def copies_to_host(graphs: Iterable[Any]) -> list[str]:
    """Return the names of what devices other than CPU:0 copy to the host."""
    parts = [part for graph in graphs for part in graph.partition_graphs]
    return [name for part in parts for name in sorted(_copied_of(part))]


def _copied_of(part: Any) -> set[str]:
    """What some operations of a device leave in its memory, and others want in the host's."""
    producers = {node.name: node for node in part.node}
    found = set()
    for node in part.node:
        is_sent = node.op == "_Send" and node.attr["recv_device"].s.decode().endswith(_HOST)
        kind, places = ("", (0,)) if is_sent else _HOST_INPUTS.get(node.op, ("", ()))
        if node.device.endswith(_HOST) or (kind and node.attr[kind].type not in (_INT64, _BOOL)):
            continue
        for place in places:
            producer = producers[node.input[place].split(":")[0]]
            types = (producer.attr["T"].type, node.attr["T"].type if is_sent else None)
            is_kept = producer.op in _ON_HOST or (producer.op in _KEPT and not is_sent)
            if not is_kept and _INT32 not in types:
                found.add(f"{node.device[-5:]}: {producer.name}")
    return found


_MIB = 2**20


class Stopwatch(keras.callbacks.Callback):
    """Time of the steps after a warm-up, until the last one is computed; then training ends."""

    def __init__(self, warm_up_seconds: float, seconds: float) -> None:
        super().__init__()
        self._warm_up_seconds, self._seconds = warm_up_seconds, seconds
        self._began = self.steps = self.seconds = 0.0
        self._is_warm = False
        self.copies: list[int] = []

    def on_train_begin(self, logs: Mapping[str, float] | None = None) -> None:
        """Look at the functions that the warm-up runs."""
        private_api.start_collecting_graphs()

    def on_train_batch_end(self, batch: int, logs: Mapping[str, float] | None = None) -> None:
        """Start after the warm-up, and stop after the measured time."""
        now = time.perf_counter()
        if self._began == 0:  # the first step traces and compiles
            self._began = now
        if not self._is_warm and now - self._began >= self._warm_up_seconds:
            self._wait()
            steps = steps_of(private_api.stop_collecting_graphs())
            self.copies = sorted({len(copies_to_host([step])) for step in steps})
            self._is_warm, self._began, self.steps = True, time.perf_counter(), 0
            return
        self.steps += 1
        if self._is_warm and now - self._began >= self._seconds:
            self._wait()
            self.seconds = time.perf_counter() - self._began
            self.model.stop_training = True

    def _wait(self) -> None:
        """Wait for the update of the latest step, which a device may still compute."""
        np.array(self.model.optimizer.iterations)


def make_strategy(request: Mapping[str, Any]) -> Any:
    """Return the strategy of a trial, none for plain Keras."""
    if request["mode"] == "plain":
        return None
    import keras_het

    options: dict[str, Any] = {}
    if request["mode"] == "copies":
        experimental = tf.distribute.experimental
        ring = experimental.CommunicationImplementation.RING
        options["communication_options"] = experimental.CommunicationOptions(implementation=ring)
    return keras_het.HeterogeneousStrategy(devices=request["devices"], **options)


def run(request: Mapping[str, Any]) -> dict[str, Any]:
    """Train, and return samples per second, time of a step, shares and peak memory."""
    if request["is_emulated"]:
        cpu = tf.config.list_physical_devices("CPU")[0]
        # CPU:0 is their host
        parts = [tf.config.LogicalDeviceConfiguration()] * (1 + len(request["devices"]))
        tf.config.set_logical_device_configuration(cpu, parts)
    keras.utils.set_random_seed(0)
    if request["precision"] != "float32":
        keras.config.set_dtype_policy(request["precision"])
    strategy = make_strategy(request)
    stopwatch = Stopwatch(request["warm_up_seconds"], request["seconds"])
    callbacks: list[keras.callbacks.Callback] = [stopwatch]
    if request["mode"] in ("balanced", "copies"):
        from keras_het.callbacks import BatchBalancer

        callbacks.insert(0, BatchBalancer())
    with strategy.scope() if strategy else tf.device(None):
        model = MODELS[request["model"]](request["is_emulated"])
        model.compile("adam", "sparse_categorical_crossentropy")
    data = endless_batches(model, request["batch_size"])
    # an emulated device takes what nobody has placed, as a GPU does
    with tf.device(request["devices"][0] if request["is_emulated"] else None):
        model.fit(data, steps_per_epoch=10**9, epochs=1, verbose=0, callbacks=callbacks)
    return {
        "samples_per_second": stopwatch.steps * request["batch_size"] / stopwatch.seconds,
        "step_seconds": stopwatch.seconds / stopwatch.steps,
        "steps": stopwatch.steps,
        "copies_per_step": stopwatch.copies,
        "shares": list(strategy.current_shares) if strategy else [request["batch_size"]],
        "peak_mib": [
            round(tf.config.experimental.get_memory_info(name)["peak"] / _MIB)
            for name in ([] if request["is_emulated"] else request["devices"])
        ],
        "xla": bool(model.jit_compile),
    }


if __name__ == "__main__":
    say(run(json.load(sys.stdin)))
