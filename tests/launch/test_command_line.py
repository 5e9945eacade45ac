import os
import re
import signal
import socket
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from keras_het import __version__
from keras_het.launch import run_command
from keras_het.launch.command_line import main
from keras_het.launch.doctor.facts import public_addresses
from keras_het.launch.local.worker_environment import secret_names

# Each worker has a child, prints both process ids, and waits for ever.
WAIT_WITH_CHILD = """
child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
print("ready", os.getpid(), child.pid, flush=True)
while True:
    signal.pause()
"""


def test_prefixes_and_keeps_the_streams_apart(launch, script):
    path = script('print("out", *sys.argv[1:]); print("err", index, file=sys.stderr)')
    result = launch("run", "--workers", "3", path, "--workers", "9", "-m").finish()
    assert result.exit_code == 0
    assert sorted(result.stdout.splitlines()) == [
        f"[worker {index}] out --workers 9 -m" for index in range(3)
    ]
    assert sorted(result.stderr.splitlines()) == [
        f"[worker {index}] err {index}" for index in range(3)
    ]


def test_module_form(launch, script):
    folder = str(Path(script("print(__name__, sys.argv[1:])")).parent)
    path = launch("run", "-w", "1", "-m", "worker_script", "--x", PYTHONPATH=folder)
    assert path.finish().stdout == "[worker 0] __main__ ['--x']"


@pytest.mark.parametrize("separator", [[], ["--"]])
def test_emulation_is_labelled_everywhere(launch, script, tmp_path, separator):
    path = script('print(os.environ["KERAS_HET_EMULATED_DEVICES"])')
    logs = tmp_path / "logs"
    options = ["--emulate-ms-per-sample", "8", "--emulate-ms-per-step", "5", "--log-dir", str(logs)]
    result = launch("run", "--emulate-speeds", "4,1", *options, *separator, path).finish()
    assert result.exit_code == 0
    label, *lines = result.stdout.splitlines()
    expected = (
        "EMULATION: device speeds 4:1 are emulated by waiting (2, 8 ms per sample plus 5 ms a step)"
    )
    assert label.startswith(f"[keras-het] {expected}")
    devices = [
        '[{"speed": 4.0, "fixed_seconds": 0.005, "seconds_per_sample": 0.002}]',
        '[{"speed": 1.0, "fixed_seconds": 0.005, "seconds_per_sample": 0.008}]',
    ]
    assert sorted(lines) == [f"[worker {index}] {device}" for index, device in enumerate(devices)]
    for index, device in enumerate(devices):
        first, second = (logs / f"worker-{index}.log").read_text().splitlines()
        assert first.startswith(expected)
        assert second == device


def test_names_the_failed_worker_and_why(launch, script):
    path = script(
        """
        if index == 1:
            print("the reason", file=sys.stderr)
            sys.exit(3)
        while True:
            signal.pause()
        """
    )
    result = launch("run", "--workers", "3", "--only-chief", path).finish()
    assert result.exit_code == 3
    assert result.stderr.splitlines() == [
        "[keras-het] worker 0 was ended.",
        "[keras-het] worker 2 was ended.",
        "[keras-het] last lines of worker 1's standard error:",
        "[keras-het]   the reason",
        "[keras-het] worker 1 failed first: exit code 3: the reason",
    ]


@pytest.mark.parametrize(("group", "exit_code"), [(0, 0), (5, 5)])
def test_an_async_workers_failure_is_reported_and_does_not_fail_the_training(
    launch, script, group, exit_code
):
    path = script(
        """
        if config["task"]["type"] == "async":
            signal.pause() if sys.argv[1] != "0" else sys.exit(3)
        sys.exit(int(sys.argv[1]))
        """
    )
    result = launch("run", "-w", "2", "--async-workers", "1", path, str(group)).finish()
    assert result.exit_code == exit_code, result.stderr
    assert ("worker 1 failed first: exit code 3" in result.stderr) == (group == 0)
    trained = "the other workers finished training; this is not counted as a failure."
    assert (result.stderr.splitlines()[-1] == f"[keras-het] {trained}") == (group == 0)


def test_an_async_worker_that_finds_nobody_ends_with_the_group(launch, script, tmp_path):
    path = script(
        """
        import pathlib, time
        waits = pathlib.Path(sys.argv[1])
        if config["task"]["type"] == "worker":
            end = time.monotonic() + 60
            while not waits.exists():
                assert time.monotonic() < end, "the async worker has not tried"
                time.sleep(0.05)
            sys.exit(0)
        from keras_het.asynchronous.exchange.connection import connect
        tries = []
        def find_service():
            tries.append(1)
            if len(tries) > 3:  # the group is there, and has no service yet
                waits.touch()
            raise ConnectionError("no service")
        connect(find_service, 1e6)
        """
    )
    options = ["-w", "3", "--async-workers", "1"]
    result = launch("run", *options, path, str(tmp_path / "waits")).finish()
    assert result.exit_code == 0, result.stderr
    assert "ConnectionError: The training has ended without this async worker" in result.stderr
    assert result.stderr.splitlines()[-1].endswith("this is not counted as a failure.")


def test_secrets_are_not_passed_to_workers_unless_they_are_to_be(launch, script):
    secrets = {"HF_TOKEN": "1", "AWS_SECRET_ACCESS_KEY": "2", "MY_PASSWORD": "3"}
    path = script("print(*sorted(set(os.environ) & set(sys.argv[1:])))")
    options = ["run", "-w", "1", "--pass-env", "AWS_*", "--pass-env", "MY_PASSWORD"]
    ours = {"KERAS_HET_SECRET": "4", "KEYBOARD": "5"}
    names = [*secrets, *ours]
    result = launch(*options, path, *names, **secrets, **ours).finish()
    assert result.stdout == (
        "[worker 0] AWS_SECRET_ACCESS_KEY KERAS_HET_SECRET KEYBOARD MY_PASSWORD"
    )
    told = result.stderr.splitlines()[-1]
    assert told.startswith("[keras-het] not passed to the workers: ") and "HF_TOKEN" in told
    assert "AWS" not in told and "PASSWORD" not in told and told.endswith("(see --pass-env).")


def test_what_looks_like_a_secret():
    secrets = ["GH_TOKEN", "PGPASSWORD", "S3_SECRET_KEY", "apikey"]
    others = ["GOOGLE_APPLICATION_CREDENTIALS", "MAX_TOKENS", "TOKENIZERS_PARALLELISM"]
    assert secret_names([*others, *secrets], ()) == secrets


def test_a_public_address_is_warned_of_in_the_first_line(script, monkeypatch, capsys):
    path = script("")
    for public in ((), ("8.8.8.8",)):
        monkeypatch.setattr(run_command, "public_addresses", lambda public=public: public)
        assert main(["run", "-w", "1", path]) == 0
        output = capsys.readouterr().err
        expected = "[keras-het] warning: TensorFlow's servers listen on every interface of this"
        assert output.startswith(expected) == bool(public)
        assert ("also on 8.8.8.8" in output) == bool(public)


def test_addresses_that_the_internet_may_reach(monkeypatch):
    texts = ["127.0.0.1", "10.0.0.3", "192.168.1.2", "169.254.3.4", "8.8.4.4", "::1", "fd00::1"]
    texts += ["fe80::1%eth0", "2606:4700::1111"]
    families = [socket.AF_INET6 if ":" in text else socket.AF_INET for text in texts]
    addresses = [SimpleNamespace(family=f, address=t) for f, t in zip(families, texts, strict=True)]
    link = SimpleNamespace(family=psutil.AF_LINK, address="02:42:ac:11:00:02")
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {"eth0": [link, *addresses]})
    assert public_addresses() == ("8.8.4.4", "2606:4700::1111")


CAUSE_AND_VICTIM = """
import atexit

marker, ending = sys.argv[1:]
if index == 0:
    while not os.path.exists(marker):
        pass
    sys.exit("lost worker 1")

def exit_slowly():
    if ending == "exits":  # after the signal
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    open(marker, "w").close()
    signal.sigwait([signal.SIGTERM]) if ending == "exits" else signal.pause()

atexit.register(exit_slowly)
raise ValueError("the root cause")
"""


@pytest.mark.parametrize("ending", ["exits", "killed"])
def test_a_cause_that_exits_after_its_victim_is_reported(launch, script, tmp_path, ending):
    marker = str(tmp_path / "marker")
    path = script(CAUSE_AND_VICTIM)
    result = launch("run", "--workers", "2", path, marker, ending).finish()
    assert result.exit_code == 1
    effect, cause = result.stderr.splitlines()[-2:]
    assert effect == "[keras-het] worker 0 failed after it: exit code 1."
    assert cause.startswith("[keras-het] worker 1 failed first: ValueError: the root cause (")
    assert cause.endswith(f"{Path(path).name}:{Path(path).read_text().count(chr(10))})")


def test_the_traceback_of_the_cause_is_the_last_one(launch, script, tmp_path):
    path = script(
        """
        import time, traceback
        marker = sys.argv[1]
        try:
            if index == 0:
                raise KeyError("that worker 0 logs")
            while not os.path.exists(marker):
                time.sleep(0.01)
        except KeyError:
            traceback.print_exc()
            open(marker, "w").close()
            signal.pause()
        raise ValueError("the root cause")
        """
    )
    result = launch("run", "-w", "2", path, str(tmp_path / "marker")).finish()
    lines = result.stderr.splitlines()
    assert "[worker 0]   File" in result.stderr and "[worker 1]   File" not in result.stderr
    assert "[worker 1] ValueError: the root cause" in lines
    at = lines.index("[keras-het]   Traceback (most recent call last):")
    assert lines[-2] == "[keras-het]   ValueError: the root cause" and at > len(lines) // 2
    assert lines[-1].startswith("[keras-het] worker 1 failed first: ValueError: the root cause (")


def test_a_worker_that_ends_before_the_others_is_the_cause(launch, script, tmp_path):
    path = script(
        """
        import pathlib

        class WorkerLostError(RuntimeError):
            pass

        started = pathlib.Path(sys.argv[1])
        if index == 1:
            started.with_suffix(".part").write_text(str(os.getpid()))
            started.with_suffix(".part").rename(started)
        else:
            while not started.exists():
                pass
            while os.path.exists(f"/proc/{started.read_text()}"):
                pass
            raise WorkerLostError("Lost worker 1")
        """
    )
    result = launch("run", "--workers", "2", path, str(tmp_path / "started")).finish()
    assert result.exit_code == 1
    *_, shown, effect, cause = result.stderr.splitlines()
    assert shown == "[worker 0] WorkerLostError: Lost worker 1"
    assert effect == "[keras-het] worker 0 lost it, and ended."
    assert cause.startswith("[keras-het] worker 1 ended its script first, without an error")


def test_another_backend_of_keras_is_the_script_to_set(launch, script):
    """Without a word each worker would train alone where the script does not set it."""
    path = script(
        "print(os.environ['KERAS_BACKEND']); os.environ['KERAS_BACKEND'] = 'tensorflow'\n"
        "print(os.environ['KERAS_BACKEND'])"
    )
    result = launch("run", "-w", "1", path, KERAS_BACKEND="jax").finish()
    assert (result.exit_code, result.stdout) == (0, "[worker 0] jax\n[worker 0] tensorflow")
    assert "KERAS_BACKEND is 'jax' here, and keras_het needs 'tensorflow'" in result.stderr
    assert "each worker trains alone" in result.stderr
    assert "KERAS_BACKEND=tensorflow keras-het run" in result.stderr


def test_the_backend_that_is_needed_is_no_news(launch, script):
    path = script("print(os.environ['KERAS_BACKEND'])")
    for given in ("", "tensorflow"):
        result = launch("run", "-w", "1", path, KERAS_BACKEND=given).finish()
        assert (result.stdout, result.stderr) == ("[worker 0] tensorflow", "")


def test_killed_worker_is_named_and_the_others_end(launch, script, assert_gone):
    launcher = launch("run", "--workers", "3", script(WAIT_WITH_CHILD))
    launcher.wait_for_output(*(f"[worker {index}] ready" for index in range(3)))
    process_ids = launcher.printed_process_ids()
    workers = [c for c in psutil.Process(launcher.process_id).children() if c.pid in process_ids]
    victim = next(w for w in workers if '"index": 2' in w.environ()["TF_CONFIG"])
    victim.kill()
    result = launcher.finish()
    assert result.exit_code == 128 + signal.SIGKILL
    last = result.stderr.splitlines()[-1]
    assert last.startswith("[keras-het] worker 2 failed first: killed by SIGKILL, ")
    assert "memory that has run out" in last
    assert len(process_ids) == 6
    assert_gone(process_ids)


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_signals_end_everything(launch, script, assert_gone, number, code):
    # the launcher takes over what is ignored, as under nohup
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        launcher = launch("run", "--workers", "2", script(WAIT_WITH_CHILD))
    finally:
        signal.signal(signal.SIGHUP, before)
    launcher.wait_for_output("[worker 0] ready", "[worker 1] ready")
    launcher.send_signal(number)
    result = launcher.finish()
    assert result.exit_code == code
    assert f"[keras-het] forwarding {number.name} to all workers" in result.stderr
    assert f"[keras-het] stopped by {number.name}; all workers have ended." in result.stderr
    if number == signal.SIGINT:
        assert "[worker 1] KeyboardInterrupt" in result.stderr
    assert len(launcher.printed_process_ids()) == 4
    assert_gone(launcher.printed_process_ids())


def test_what_nohup_ignores_ends_nothing(launch, script):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        launcher = launch("run", "--workers", "1", script(WAIT_WITH_CHILD))
    finally:
        signal.signal(signal.SIGHUP, before)
    launcher.wait_for_output("[worker 0] ready")
    launcher.send_signal(signal.SIGHUP)
    launcher.send_signal(signal.SIGTERM)
    result = launcher.finish()
    assert result.exit_code == 143
    assert "SIGHUP" not in result.stderr


MUCH = 'sys.stdout.buffer.write("\u2501 much\\n".encode() * 40_000)'


def test_a_log_on_a_full_disk_ends_no_training(launch, script, tmp_path):
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "worker-0.log").symlink_to("/dev/full")
    result = launch("run", "-w", "1", "--log-dir", str(logs), script(MUCH)).finish()
    assert result.exit_code == 0
    assert result.stderr.count("is no longer written") == 1
    assert "No space left" in result.stderr


def test_what_the_terminal_cannot_show_ends_no_training(launch, script):
    result = launch("run", "-w", "1", script(MUCH), PYTHONIOENCODING="ascii").finish()
    assert result.exit_code == 0
    assert "[worker 0] ? much" in result.stdout


def test_workers_die_with_a_killed_launcher(launch, script, assert_gone):
    launcher = launch("run", "--workers", "2", script(WAIT_WITH_CHILD))
    launcher.wait_for_output("[worker 0] ready", "[worker 1] ready")
    process_ids = launcher.printed_process_ids()
    children = [child.pid for child in psutil.Process(launcher.process_id).children(recursive=True)]
    assert set(process_ids) < set(children)
    os.kill(launcher.process_id, signal.SIGKILL)
    assert launcher.finish().exit_code == -signal.SIGKILL
    assert_gone(children)


@pytest.mark.parametrize(
    ("arguments", "beginning"),
    [
        (["--version"], f"keras-het {__version__}\n"),
        (["--help"], "usage: keras-het "),
        *(
            ([each, "--help"], f"usage: keras-het {each} ")
            for each in (
                "run",
                "doctor",
                "benchmark",
                "validate",
                "parameter-server",
                "summation-server",
                "report",
            )
        ),
    ],
)
def test_help_fits_on_a_screen(capsys, arguments, beginning):
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 0
    output = capsys.readouterr().out
    assert output.startswith(beginning)
    assert max(map(len, output.splitlines())) <= 100


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["walk"], "invalid choice: 'walk'"),
        (["run", "--workers", "2"], "give the script"),
        (["run", "--workers", "2", "--"], "give the script"),
        (["run", __file__], "give --gpus auto .*--workers N, or --emulate-speeds"),
        (["run", __file__, "--workers", "2"], f"keras-het run --workers ... {re.escape(__file__)}"),
        (["run", __file__, "--emulate-speeds=2,1"], "received --emulate-speeds=2,1 after"),
        (["run", "-w", "2", "--port", "700", __file__], "--port needs --hosts"),
        (["run", "--workers", "0", __file__], "at least 1, .*, received '0'"),
        (["run", "--workers", "two", __file__], "at least 1, .*, received 'two'"),
        (["run", "--workers", "2", "missing.py"], "there is no file 'missing.py'"),
        (["run", "--workers", "2", "a" * 5000], "there is no file 'aaa"),
        (
            ["run", "--emulate-speeds", "4,2", "--workers", "3", __file__],
            "2 speeds, but --workers is 3",
        ),
        (["run", "--emulate-speeds", "4,,1", __file__], "such as 4,2,1, received '4,,1'"),
        (["run", "--emulate-speeds", "4,0", __file__], "positive numbers"),
        (["run", "--emulate-speeds", "inf", __file__], "positive numbers"),
        (["run", "-w", "2", "--emulate-ms-per-sample", "5", __file__], "needs --emulate-speeds"),
        (["run", "--emulate-speeds", "1", "--emulate-ms-per-sample", "-4", __file__], "at least 0"),
        (["run", "-w", "1", "--grace-seconds", "nan", __file__], "at least 0, received 'nan'"),
        (["run", "--worker", "2", __file__], "unrecognized arguments|give --workers"),
        (["run", "-w", "1", "-m"], "-m needs a MODULE"),
    ],
)
def test_wrong_arguments(capsys, arguments, message):
    with pytest.raises(SystemExit) as exit_info:
        main(arguments)
    assert exit_info.value.code == 2
    assert re.search(message, capsys.readouterr().err)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cpus-per-worker", "100000"], "error: Each worker needs at least one CPU"),
        (["--python", "/no/such/python"], "error: The worker's command cannot be started"),
        (["--log-dir", __file__], "error: .*File exists.*--log-dir"),
        (["--log-dir", f"{__file__}/logs"], "error: .*Not a directory.*--log-dir"),
        (["--workers", "99999999999"], "error: .*at most .*ulimit -n"),
    ],
)
def test_what_only_shows_at_the_start(capsys, arguments, message):
    assert main(["run", "-w", "1", *arguments, __file__]) == 2
    assert re.search(message, capsys.readouterr().err)
