"""Agreement of all workers, compared in one exchange and reported to all of them alike.

Whatever two workers are about to do, they meet in the same collective: if one calls `fit` and
another creates a variable, both get one error, instead of TensorFlow's error about two shapes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import random
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import keras
import numpy as np
import tensorflow as tf

from keras_het.ignored_errors import ignore_errors
from keras_het.loader import iterator_adapter
from keras_het.strategy.cluster.peer_watch import message_in

if TYPE_CHECKING:
    from keras_het.loader.input.distributed_steps import DistributedSteps
    from keras_het.strategy.extended import HeterogeneousExtended
    from keras_het.strategy.heterogeneous_strategy import HeterogeneousStrategy

PATIENCE_SECONDS = 30.0
"""How long a worker that has left a loop early waits for the others to leave it too."""
SECONDS_BETWEEN_STEPS = 300.0
"""How long a worker waits between two steps: another one may be saving a large model."""

NUM_NOTES = 4
_BYTES_PER_WORD, _WORDS_AT_ONCE = 8, 2**21
_SECONDS_TO_PASS_ON = 2.0

_ONE_DEVICE_TYPE = (
    "A collective group has one type of device: a machine without GPU beside machines with GPUs "
    'joins as a summation machine (job "summation") or as an async worker (job "async").'
)
_SAME_SCRIPT = (
    "All workers run the same script: what trains, evaluates, predicts, creates variables, reads "
    "metrics or waits at strategy.barrier() is called by all of them in the same order."
)
_MOST_DIFFERENCES = 5
_LONGEST_VALUE = 80


def agree(
    extended: HeterogeneousExtended,
    place: str,
    described: Mapping[str, str],
    *,
    opening: str = "",
    opening_if_only: Mapping[str, str] | None = None,
    advice: str = _SAME_SCRIPT,
    hints: Mapping[str, str] | None = None,
    about: str = "",
    notes: Sequence[int] = (),
) -> np.ndarray:
    """Compare what all workers are about to do; all of them must call it."""
    # One gather of five numbers; only a difference costs more of them, for the texts.
    own = np.zeros([1 + NUM_NOTES], np.int64)
    own[0] = _hash(json.dumps([place, dict(described)], sort_keys=True).encode())
    own[1 : 1 + len(notes)] = notes
    everyone = extended.meet(own).reshape(-1, len(own))
    if (everyone[:, 0] == everyone[0, 0]).all():
        return everyone[:, 1:]
    told = exchange(extended.meet, [place, dict(described), about])
    with ignore_errors("waiting for workers that still read"):
        extended.meet(np.zeros([1], np.int64))
    places, values, abouts = zip(*told, strict=True)
    if len(set(places)) > 1:
        where = [f"{at} ({more})" if more else at for at, more in zip(places, abouts, strict=True)]
        raise ValueError(
            "The workers have reached different points in their scripts: "
            f"{by_worker(where)}. {_SAME_SCRIPT}"
        )
    names = list(dict.fromkeys(name for each in values for name in each))
    differing = [name for name in names if len({each.get(name) for each in values}) > 1]
    differences = [
        f"{name} {by_worker([each.get(name, 'none') for each in values])}"
        for name in differing[:_MOST_DIFFERENCES]
    ]
    if (more := len(differing) - _MOST_DIFFERENCES) > 0:
        differences.append(f"and {more} more")
    if len(differing) == 1:
        opening = (opening_if_only or {}).get(differing[0], opening)
    detail = f" ({abouts[0]})" if abouts[0] else ""
    advice = " ".join(
        [advice, *(text for name, text in (hints or {}).items() if name in differing)]
    )
    raise ValueError(f"{opening}{detail}: {'; '.join(differences)}. {advice}")


def exchange(gather: Callable[[np.ndarray], np.ndarray], own: Any) -> list[Any]:
    """Return what each worker tells, which JSON can hold; all of them must call it."""
    return [json.loads(text) for text in exchange_bytes(gather, json.dumps(own).encode())]


def exchange_bytes(gather: Callable[[np.ndarray], np.ndarray], own: bytes) -> list[bytes]:
    """Return what each worker has, however long, in parts; most may have nothing."""
    lengths = gather(np.array([len(own)], np.int64))
    # in words: TensorFlow gathers no bytes
    words = np.frombuffer(own + bytes(-len(own) % _BYTES_PER_WORD), np.int64)
    num_words = -(-lengths // _BYTES_PER_WORD)
    found = [bytearray() for _ in lengths]
    for start in range(0, int(num_words.max()), _WORDS_AT_ONCE):
        gathered = gather(words[start : start + _WORDS_AT_ONCE])
        ends = np.cumsum(np.clip(num_words - start, 0, _WORDS_AT_ONCE))
        for whole, part in zip(found, np.split(gathered, ends[:-1]), strict=True):
            whole += part.tobytes()
    return [bytes(whole[:length]) for whole, length in zip(found, lengths, strict=True)]


def by_worker(values: Sequence[str]) -> str:
    """Describe which workers have which value: "20 on the chief, 25 on workers 1 and 3"."""
    of_value: dict[str, list[int]] = {}
    for worker, value in enumerate(values):
        of_value.setdefault(value, []).append(worker)
    return ", ".join(f"{_short(value)} on {_names(them)}" for value, them in of_value.items())


def _short(value: str) -> str:
    if len(value) <= _LONGEST_VALUE:
        return value
    return f"{value[:_LONGEST_VALUE]}... ({short_hash(value.encode())})"


def _names(workers: Sequence[int]) -> str:
    others = [str(worker) for worker in workers if worker]
    names = ["the chief"] if 0 in workers else []
    if len(others) > 8:
        others = [*others[:8], f"{len(others) - 8} more"]
    if others:
        *first, last = others
        listed = f"{', '.join(first)} and {last}" if first else last
        names.append(f"worker{'s' if first else ''} {listed}")
    return " and ".join(names)


def check_agreement(
    extended: HeterogeneousExtended,
    weights: Sequence[float],
    gradient_reduction: object = None,
    micro_batch_sizes: object = None,
    on_drift: str = "warn",
) -> None:
    described = {
        "share weights": str([float(weight) for weight in weights]),
        "type of device": extended._local_device_type,
        "versions": f"TensorFlow {tf.__version__}, Keras {keras.__version__}",
        "gradient_reduction": repr(gradient_reduction),
        "micro_batch_size": repr(micro_batch_sizes),
        "communication_dtype": repr(extended.communication_dtype),
        "powersgd_rank": repr(extended.power_sgd and extended.power_sgd.rank),
        "on_drift": repr(on_drift),
    }
    agree(
        extended,
        "HeterogeneousStrategy()",
        described,
        opening="The workers were started with different settings",
        advice="Start all workers with the same script, arguments and versions.",
        hints={"type of device": _ONE_DEVICE_TYPE},
    )


_drawn_seeds: set[int] = set()


def drawn_seed() -> int | None:
    """TensorFlow's global seed if drawn for all workers; None if the user set one, or none."""
    seed = iterator_adapter.global_seed()
    return seed if seed in _drawn_seeds else None


def share_random_seed(extended: HeterogeneousExtended) -> None:
    """Give all workers one random seed if the user has set none."""
    # An unseeded shuffle would order the samples differently on every worker. What the user has
    # seeded is kept: operations' own seeds, and Python's and NumPy's generators if equal on all.
    is_users = iterator_adapter.global_seed() is not None and drawn_seed() is None
    python = random.getstate()
    numpy: Any = np.random.get_state()
    of_numpy = repr((numpy[0], numpy[1].tolist(), *numpy[2:]))
    states = [_hash(repr(python).encode()), _hash(of_numpy.encode())]
    own = np.array([secrets.randbelow(2**31), is_users, *states], np.int64)
    everyone = extended.gather_over_workers(own).reshape(-1, len(own))
    if everyone[:, 1].any():
        return
    seed = int(everyone[0, 0])
    keras.utils.set_random_seed(seed)
    _drawn_seeds.add(seed)
    iterator_adapter.keep_operation_seeds(lambda: drawn_seed() is not None)
    is_equal = (everyone == everyone[0]).all(axis=0)
    if is_equal[2]:
        random.setstate(python)
    if is_equal[3]:
        np.random.set_state(numpy)


def check_same_pass(
    strategy: HeterogeneousStrategy, dataset: DistributedSteps, shares: str
) -> None:
    """Compare the data that the workers are about to read, and its order."""
    fingerprint = (dataset.fingerprint or 0) & (2**32 - 1)
    strategy.extended.agree(
        "a pass over data",
        {
            "batches": str(int(dataset.cardinality)),
            "shares of the first batch": shares,
            **dataset.content,
            "first batch": f"hash {fingerprint:08x}",
        },
        opening="The workers read different data",
        opening_if_only={
            "first batch": "The workers read the samples in different orders, so that some would "
            "be used twice and others never"
        },
        advice=(
            "Give every worker the same data, all of it, and the same random seed, for example "
            "keras.utils.set_random_seed(42) at the start of the script; the strategy gives each "
            "its share. Do not draw random numbers on one worker only."
        ),
    )


def check_same_end(strategy: HeterogeneousStrategy, steps: int) -> None:
    """Compare the number of steps when it could not be known in advance."""
    opening = "The workers' datasets have different numbers of batches"
    advice = "Give every worker the same data, all of it; the strategy gives each its share."
    ended = f"that of worker {strategy.worker_index} ended after {steps}, and others continue"
    strategy.extended.agree(
        "the end of the data",
        {"batches": str(steps)},
        opening=opening,
        advice=advice,
        leaves_loop=f"{opening}: {ended}. {advice}",
    )


def agree_on_values(
    extended: HeterogeneousExtended, created: list[list[tf.Variable]], name: str = ""
) -> None:
    """Give new variables, in their local copies, the chief's values if a worker's are others."""
    values = [copies[0].read_value() for copies in created]
    described = {
        f"variable {number} of {len(values)}" if len(values) > 1 else "type": (
            f"{value.dtype.name} {value.shape.as_list()}"
        )
        for number, value in enumerate(values)
    }
    # an optimizer's config has its learning rate from the variable, thus the chief's
    if name == "learning_rate" and values[0].shape.rank == 0:
        described["value"] = f"{float(values[0]):.7g}"
    hashes = b"".join(hashlib.sha256(_content(value)).digest() for value in values)
    notes = extended.agree(
        "new variables",
        described,
        opening="The workers create different variables in strategy.scope()",
        advice="Build the same model and optimizer on every worker.",
        about=name,
        notes=[_hash(hashes)],
    )
    if (notes[:, 0] == notes[0, 0]).all():
        return
    for copies, value in zip(created, values, strict=True):
        of_chief = extended.gather_over_workers(np.asarray(value)[None])[0]
        for copy in copies:
            copy.assign(of_chief)


def _content(value: tf.Tensor) -> bytes | memoryview:
    array = np.ascontiguousarray(value).reshape(-1)
    # strings expose no memory to hash
    return repr(array.tolist()).encode() if array.dtype == object else array.view(np.uint8).data


@contextlib.contextmanager
def patience(seconds: float, message: str, abort: Callable[[str], None]) -> Iterator[None]:
    """Limit the wait for workers that continue a loop which this one has left."""
    # Their step needs this worker, which waits for them elsewhere: neither would ever end.
    timer = threading.Timer(seconds, abort, [f"[[{message}]]"])
    timer.daemon = True
    timer.start()
    received = None
    try:
        yield
    except BaseException as error:
        received = message_in(error)
        if received is None:
            raise
    finally:
        timer.cancel()
    if received is not None:
        pass_on(received)


def pass_on(message: str) -> NoReturn:
    """Raise the message this worker received, once the others have had time to receive it too."""
    # They would report this worker as lost if it ended first.
    time.sleep(_SECONDS_TO_PASS_ON)
    raise ValueError(message) from None


def short_hash(content: bytes) -> str:
    """A hash of eight digits, for people to compare."""
    return hashlib.sha256(content).hexdigest()[:8]


def flat(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """The plain values in a configuration as text, without what may differ between workers."""
    if isinstance(value, Mapping):
        if "class_name" in value and isinstance(value.get("config"), Mapping):
            yield name, str(value["class_name"])
            is_policy = "DTypePolicy" in str(value["class_name"])
            value = value["config"]
            if is_policy:
                yield f"{name}.name", repr(value.get("name"))
        for key in value:
            if key not in _MAY_DIFFER:
                yield from flat(f"{name}.{key}", value[key])
    elif isinstance(value, (list, tuple)):
        if all(isinstance(each, (str, int, float, bool, type(None))) for each in value):
            yield name, str([_plain(each) for each in value])
        else:
            for position, each in enumerate(value):
                yield from flat(f"{name}[{position}]", each)
    else:
        yield name, _plain(value)


_ADDRESS = re.compile(r"0x[0-9a-fA-F]{6,}")
_MAY_DIFFER = frozenset(
    {
        "build_config",
        "code",
        "compile_config",
        "inbound_nodes",
        "input_layers",
        "layers",
        "module",
        "name",
        "output_layers",
        "registered_name",
        "seed",
        "shared_object_id",
    }
)


def _plain(value: object) -> str:
    if isinstance(value, str):
        return repr(_ADDRESS.sub("0x", value.rsplit("/", 1)[-1]))
    if isinstance(value, (np.generic, np.ndarray)) and value.ndim == 0:
        value = value.item()
    if value is None or isinstance(value, (bool, int, float)):
        return repr(value)
    if isinstance(value, np.ndarray):
        return f"array {value.shape} ({short_hash(value.tobytes())})"
    return str(getattr(value, "__qualname__", type(value).__name__))


def _hash(content: bytes | memoryview) -> int:
    digest = hashlib.sha256(content).digest()
    return int.from_bytes(digest[:8], "little", signed=True)
