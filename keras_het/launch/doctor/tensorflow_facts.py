"""What TensorFlow says of itself and its devices, in a process that may fail."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from keras_het.ignored_errors import ignore_errors
from keras_het.seen_versions import KERAS_BACKEND, NEEDED_BACKEND
from keras_het.strategy.cluster.cluster_config import TF_CONFIG

_LONGEST_SECONDS = 300.0
# The last line of a broken import says what broke; these say what to do about it.
_FIXES = {
    r"No module named '?(tensorflow|keras)'?$": "Install TensorFlow and Keras in this environment: "
    "pip install . in the checkout of keras_het. If they are installed elsewhere, start keras-het "
    "from there.",
    r"numpy|_ARRAY_API|dtype size changed": "NumPy and TensorFlow were built for other versions of "
    "each other: pip install --upgrade --force-reinstall tensorflow numpy.",
    r"protobuf|Descriptor": "protobuf does not fit TensorFlow: "
    "pip install --upgrade --force-reinstall tensorflow protobuf.",
    r"GLIBC|libstdc\+\+": "This system's C library is older than TensorFlow's wheels need: use a "
    "newer system or a container.",
    r"cannot open shared object|DLL": "A library is missing: reinstall TensorFlow, with "
    "pip install --force-reinstall tensorflow.",
    r"SIGILL": "This processor lacks instructions (AVX) that TensorFlow's wheels use: build "
    "TensorFlow from source, or use another machine.",
    r"SIGKILL|MemoryError": "Memory ran out while TensorFlow was imported: give this process 2 GB "
    "or more.",
}
_GENERAL_FIX = (
    "Run python -c 'import tensorflow, keras' to see the whole error; "
    "pip install --force-reinstall tensorflow keras often fixes it."
)
_MARK = "keras_het doctor: "


@dataclasses.dataclass(frozen=True)
class TensorFlowFacts:
    """What TensorFlow says of itself."""

    problem: str = ""
    fix: str = ""
    tensorflow: str = ""
    keras: str = ""
    cuda: str = ""
    cudnn: str = ""
    kernels: tuple[str, ...] = ()
    gpus: tuple[str, ...] = ()
    replicas: int = 0
    log: str = ""


def ask_tensorflow(
    environ: Mapping[str, str], timeout_seconds: float = _LONGEST_SECONDS
) -> TensorFlowFacts:
    """Import TensorFlow in a separate process and ask it."""
    fixed = {
        "TF_CPP_MIN_LOG_LEVEL": "0",  # why a GPU is left out is information only
        "TF_FORCE_GPU_ALLOW_GROWTH": "true",
        "PYTHONUNBUFFERED": "1",
    }
    try:
        ended = run_program(__name__, {**environ, **fixed}, timeout_seconds)
    except subprocess.TimeoutExpired:
        text = f"TensorFlow was not imported within {timeout_seconds:g} s."
        fix = "Check whether the disk with Python's packages, often a network disk, is slow."
        return TensorFlowFacts(text, fix)
    answer = answer_in(ended.stdout)
    if answer is None:
        return _broken(ended.stderr, ended.returncode)
    for name in ("kernels", "gpus"):
        answer[name] = tuple(answer[name])
    return TensorFlowFacts(**answer, log=_about_gpus(ended.stderr))


def run_program(
    module: str, environ: Mapping[str, str], timeout_seconds: float, request: str | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a module of the doctor in a process that may fail, and that joins no cluster."""
    given = {name: value for name, value in environ.items() if name != TF_CONFIG}
    return subprocess.run(
        [sys.executable, "-m", module],
        input=request,
        env={**given, KERAS_BACKEND: NEEDED_BACKEND},  # another one may not even be installed
        capture_output=True,
        text=True,
        errors="replace",
        timeout=timeout_seconds,
    )


def say(answer: Mapping[str, Any]) -> None:
    sys.stdout.write(f"\n{_MARK}{json.dumps(answer)}\n")
    sys.stdout.flush()


def answer_in(output: str) -> dict[str, Any] | None:
    """Return what `say` printed, None if the program did not come to it."""
    for line in reversed(output.splitlines()):
        if line.startswith(_MARK):
            return dict(json.loads(line.removeprefix(_MARK)))
    return None


def last_line(ended: subprocess.CompletedProcess[str]) -> str:
    """Return what a program that failed said last, for its error."""
    lines = [line for line in ended.stderr.splitlines() if line.strip()]
    return lines[-1] if lines else f"exit code {ended.returncode}"


def _broken(stderr: str, exit_code: int) -> TensorFlowFacts:
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Interrupt)\b", line)]
    last = (errors or lines or ["nothing was printed"])[-1]
    if exit_code < 0:
        name = signal.Signals(-exit_code).name
        last = f"{name}; the last line was: {last}"
    text = f"TensorFlow does not start. Received: {last}"
    fixes = [fix for pattern, fix in _FIXES.items() if re.search(pattern, last)]
    return TensorFlowFacts(text, next(iter(fixes), _GENERAL_FIX))


def _about_gpus(stderr: str) -> str:
    lines = [re.sub(r"^.*?\b[\w./]+\.cc:\d+\] ", "", line) for line in stderr.splitlines()]
    words = re.compile(r"gpu|cuda|cudnn|dlopen", re.IGNORECASE)
    return "\n".join(dict.fromkeys(line for line in lines if words.search(line)))


def main() -> None:
    import keras
    import tensorflow as tf

    build = dict(tf.sysconfig.get_build_info())
    listed = tf.config.list_physical_devices("GPU")
    say(
        {
            "tensorflow": tf.__version__,
            "keras": keras.__version__,
            "cuda": str(build.get("cuda_version", "")) if build.get("is_cuda_build") else "",
            "cudnn": str(build.get("cudnn_version", "")),
            "kernels": list(build.get("cuda_compute_capabilities", [])),
            "gpus": [_product(tf, device) for device in listed],
            "replicas": _used(tf) if listed else 0,
        }
    )


def _product(tf: Any, device: Any) -> str:
    with ignore_errors("reading the name of a device"):
        return str(tf.config.experimental.get_device_details(device).get("device_name", ""))
    return ""


def _used(tf: Any) -> int:
    """Number of GPUs of which TensorFlow makes devices; it says in its log why not of others."""
    with contextlib.suppress(RuntimeError, tf.errors.OpError):
        return len(tf.config.list_logical_devices("GPU"))
    return 0


if __name__ == "__main__":
    main()
