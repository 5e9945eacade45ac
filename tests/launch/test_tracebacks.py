import textwrap
from pathlib import Path

import pytest

import keras_het
from keras_het.launch.local.tracebacks import TracebackFolder, uncaught_error

PACKAGE = Path(keras_het.__file__).parent


def lines(text: str) -> list[str]:
    return textwrap.dedent(text).strip("\n").splitlines()


OWN = lines(
    """
    Traceback (most recent call last):
      File "/home/me/train.py", line 13, in <module>
        model.fit(x, callbacks=[Failing()])
      File "/venv/lib/python3.11/site-packages/keras/src/utils/traceback_utils.py", line 122, in x
        raise e.with_traceback(filtered_tb) from None
      File "/home/me/train.py", line 6, in on_train_batch_end
        raise ValueError("my callback failed")
                         ^^^^^^^^^^^^^^^^^^^^
    ValueError: my callback failed
    """
)
LOST = lines(
    """
    Traceback (most recent call last):
      File "/home/me/train.py", line 13, in <module>
        model.fit(x)
    keras_het.strategy.cluster.peer_watch.WorkerLostError: Lost worker 1 (host:1)
    """
)
OF_A_GRAPH = lines(
    """
    Traceback (most recent call last):
      File "/home/me/train.py", line 9, in <module>
        model.fit(x)
    tensorflow.python.framework.errors_impl.InvalidArgumentError: Graph execution error:

    Detected at node embedding/GatherV2 defined at (most recent call last):
      File "/home/me/train.py", line 9, in <module>

    indices[0,1] = 12 is not in [0, 10)
    \t [[{{node embedding/GatherV2}}]] [Op:__inference_one_step_on_iterator_123]
    """
)
# of an editable installation
IN_THE_LIBRARY = [
    *OWN[:3],
    f'  File "{PACKAGE / "strategy/cluster/agreement.py"}", line 101, in agree',
    "ValueError: The workers do not agree",
]
CHAINED = [
    *OWN,
    "",
    "During handling of the above exception, another exception occurred:",
    "",
    *lines(
        """
        Traceback (most recent call last):
          File "/tmp/__autograph_generated_file1x.py", line 2, in tf__step
        KeyError: 'rows'
        """
    ),
]


@pytest.mark.parametrize(
    ("output", "error", "place"),
    [
        (OWN, "ValueError: my callback failed", "/home/me/train.py:6"),
        (LOST, "WorkerLostError: Lost worker 1 (host:1)", "/home/me/train.py:13"),
        (
            OF_A_GRAPH,
            "InvalidArgumentError: Graph execution error: indices[0,1] = 12 is not in [0, 10)",
            "/home/me/train.py:9",
        ),
        (CHAINED, "KeyError: 'rows'", None),
        (["started", *LOST, "caught; on we go", *OWN], "ValueError: my callback failed", None),
        ([OWN[0], *OWN[1:3], "KeyboardInterrupt"], "KeyboardInterrupt", None),
        (IN_THE_LIBRARY, "ValueError: The workers do not agree", "/home/me/train.py:13"),
    ],
)
def test_the_error_that_ended_a_worker(output: list[str], error: str, place: str | None) -> None:
    found = uncaught_error(output)
    assert found is not None
    assert found.text == error
    if place is not None:
        assert found.place == place
        assert str(found) == f"{error} ({place})"


@pytest.mark.parametrize("output", [[], ["nothing wrong"], OWN[:4]])
def test_no_error(output: list[str]) -> None:
    assert uncaught_error(output) is None


def shown(folder: TracebackFolder, worker: int, output: list[str]) -> list[str]:
    return [line for each in output for line in folder.feed(worker, each)]


def test_an_error_is_shown_once_and_an_effect_in_one_line() -> None:
    folder = TracebackFolder()
    assert shown(folder, 1, ["before", *OWN, "after"]) == ["before", *OWN, "after"]
    assert shown(folder, 0, LOST) == ["WorkerLostError: Lost worker 1 (host:1)"]
    assert shown(folder, 2, OWN) == ["ValueError: my callback failed (as on worker 1)"]
    assert shown(folder, 1, OWN) == OWN, "the same worker may fail again"


def test_tracebacks_of_several_workers_do_not_mix() -> None:
    folder = TracebackFolder()
    other = ["KeyError".join(line.split("ValueError")) for line in OWN]
    seen = [
        folder.feed(index, line)
        for pair in zip(OWN, other, strict=True)
        for index, line in enumerate(pair)
    ]
    assert [each for each in seen if each] == [OWN, other]


def test_a_traceback_that_is_cut_off_is_shown_at_the_end() -> None:
    folder = TracebackFolder()
    assert shown(folder, 1, OWN[:3]) == []
    assert folder.finish() == [(1, line) for line in OWN[:3]]
    assert folder.finish() == []


def test_what_tensorflow_logs_of_its_start_is_hidden_unless_wanted() -> None:
    logged = [
        "I0000 00:00:1795642906.107   15351 port.cc:153] oneDNN custom operations are on.",
        "WARNING: All log messages before absl::InitializeLog() is called are written to STDERR",
        "E0000 00:00:1795642667.204   16284 ring_alg.cc:291] Aborting RingReduce with UNAVAILABLE",
    ]
    kept = [
        "W0000 00:00:1795642667.204   16284 gpu_device.cc:2342] Cannot dlopen some GPU libraries.",
        "I1125 21:35:22.123456 140 train.py:12] a message of the user's",
    ]
    assert shown(TracebackFolder(), 0, logged + kept) == kept
    assert shown(TracebackFolder(keep_logs=True), 0, logged + kept) == logged + kept
