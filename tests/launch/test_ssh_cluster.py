"""`keras-het run --hosts` starts workers by ssh, ends them, and tells how they ended."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from keras_het.launch.command_line import main
from keras_het.launch.local.free_ports import ReservedPorts

# Runs the command on this machine, in a session of its own, as a server would.
FAKE_SSH = f"""#!{sys.executable}
import os, subprocess, sys
*options, host, command = sys.argv[1:]
assert options == ["-T", "-o", "BatchMode=yes", "-o", "ServerAliveInterval=15"], options
if host == "away":
    print("ssh: connect to host away port 22: Connection refused", file=sys.stderr)
    sys.exit(255)
environment = {{"PATH": os.environ["PATH"], "CUDA_VISIBLE_DEVICES": "3,4", "HOST": host}}
environment["NCCL_DEBUG"] = "of the host"
remote = subprocess.Popen(["sh", "-c", command], env=environment, start_new_session=True)
sys.exit(remote.wait())
"""
WAIT_FOR_EVER = """
print("ready", os.getpid(), flush=True)
while True:
    signal.pause()
"""


@pytest.fixture
def path_of_ssh(tmp_path):
    """PATH with a program `ssh` that reaches this machine only."""
    program = tmp_path / "bin" / "ssh"
    program.parent.mkdir()
    program.write_text(FAKE_SSH)
    program.chmod(0o755)
    return f"{program.parent}:{os.environ['PATH']}"


@pytest.fixture
def run(launch, path_of_ssh):
    def start(*arguments, **env):
        return launch("run", "--hosts", *arguments, PATH=path_of_ssh, **env)

    return start


def test_each_host_runs_its_workers(run, script, tmp_path):
    hosts = tmp_path / "hosts.txt"
    hosts.write_text("a slots=2\nb\n")
    path = script(
        """
        names = ["HOST", "CUDA_VISIBLE_DEVICES", "NCCL_DEBUG", "HF_TOKEN", "OTHER"]
        print(json.dumps([config, *map(os.environ.get, names), sys.argv[1:], os.getcwd()]))
        print("err", index, file=sys.stderr)
        """
    )
    env = {"NCCL_DEBUG": "INFO", "HF_TOKEN": "x", "OTHER": "y", "TF_CONFIG": "old"}
    result = run(str(hosts), "--port", "700", "--gpus", "auto", path, "a 'b'", "$c", **env).finish()
    assert result.exit_code == 0, result.stderr
    cluster = {"worker": ["a:700", "a:702", "b:700"]}
    rest = [["a 'b'", "$c"], str(Path.cwd())]
    said = {f"[keras-het] worker {index} is on {host}." for index, host in enumerate("aab")}
    lines = set(result.stdout.splitlines())
    assert lines == said | {
        f"[worker {index}] "
        + json.dumps(
            [
                {"cluster": cluster, "task": {"type": "worker", "index": index}},
                *(host, gpu, "INFO", None, None),
                *rest,
            ]
        )
        for index, (host, gpu) in enumerate([("a", "3"), ("a", "4"), ("b", "3")])
    }
    assert {f"[worker {index}] err {index}" for index in range(3)} <= set(
        result.stderr.splitlines()
    )
    assert result.stderr.count("TF_CONFIG of the environment is replaced") == 1


def test_async_workers_get_the_address_and_the_secret(run, script):
    path = script(
        """
        names = ["KERAS_HET_SERVICE_ADDRESS", "KERAS_HET_SECRET"]
        print(config["task"], *(os.environ[name] for name in names))
        """
    )
    result = run("a,b", "--async-workers", "1", path).finish()
    lines = sorted(result.stdout.splitlines()[-2:])
    tasks = [("worker", 0), ("async", 0)]
    for index, (line, (job, number)) in enumerate(zip(lines, tasks, strict=True)):
        task = {"type": job, "index": number}
        assert line.startswith(f"[worker {index}] {task} a:12346 ")
    assert len({line.split()[-1] for line in lines}) == 1 and len(lines[0].split()[-1]) == 64


def test_all_end_when_one_fails(run, script, assert_gone):
    path = script("if index == 1:\n    raise ValueError('the cause')\n" + WAIT_FOR_EVER)
    launcher = run("a,b,c", path)
    result = launcher.finish()
    assert result.exit_code == 1
    cause = result.stderr.splitlines()[-1]
    assert cause.startswith("[keras-het] worker 1 failed first: ValueError: the cause (")
    assert_gone(launcher.printed_process_ids())


def test_a_worker_that_ignores_sigterm_is_killed(run, script, assert_gone):
    path = script("signal.signal(signal.SIGTERM, signal.SIG_IGN)" + WAIT_FOR_EVER)
    launcher = run("a,b", "--grace-seconds", "0", path)
    launcher.wait_for_output("[worker 0] ready", "[worker 1] ready")
    launcher.send_signal(signal.SIGTERM)
    assert launcher.finish().exit_code == 128 + signal.SIGTERM
    assert_gone(launcher.printed_process_ids())


def test_a_signal_is_forwarded_and_what_follows_is_shown(run, script):
    path = script(
        """
        try:
            print("ready", flush=True)
            signal.pause()
        except KeyboardInterrupt:
            print("saved", index, flush=True)
            sys.exit(130)
        """
    )
    launcher = run("a,b", path)
    launcher.wait_for_output("[worker 0] ready", "[worker 1] ready")
    launcher.send_signal(signal.SIGINT)
    result = launcher.finish()
    assert result.exit_code == 130
    assert {"[worker 0] saved 0", "[worker 1] saved 1"} <= set(result.stdout.splitlines())


def test_workers_end_with_a_killed_launcher(run, script, assert_gone, tmp_path):
    path = script(
        """
        def end(*_):
            open(f"{sys.argv[1]}-{index}", "w").close()
            sys.exit()

        signal.signal(signal.SIGTERM, end)
        print("ready", os.getpid(), flush=True)
        while True:
            signal.pause()
        """
    )
    launcher = run("a,b", path, str(tmp_path / "ended"))
    launcher.wait_for_output("[worker 0] ready", "[worker 1] ready")
    psutil.Process(launcher.process_id).kill()
    launcher.finish()
    assert_gone(launcher.printed_process_ids())
    assert all((tmp_path / f"ended-{index}").exists() for index in range(2))


def test_a_host_that_cannot_be_reached_is_reported(run, script):
    result = run("a,away", script(WAIT_FOR_EVER)).finish()
    assert result.exit_code == 255
    assert "worker 1 failed first: exit code 255" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--hosts", "a", "--workers", "2"], "leave out --workers"),
        (["--hosts", "a", "--emulate-speeds", "2,1"], "leave out --emulate-speeds"),
        (["--hosts", "a", "--no-pin"], "leave out --pin"),
        (["--hosts", "a", "--gpus", "2"], "give --gpus auto, and as many slots"),
        (["--hosts", "a b"], "These are not valid hosts"),
        (["--hosts", "a,b", "--async-workers", "2"], "Leave at least one for the sync group"),
    ],
)
def test_mistakes_are_wrong_usage(script, capsys, arguments, message):
    try:
        code = main(["run", *arguments, script("")])
    except SystemExit as exit:
        code = exit.code  # type: ignore[assignment]
    assert code == 2 and message in capsys.readouterr().err


SERVER = shutil.which("sshd", path="/usr/sbin:/usr/bin")
SERVER_CONFIG = """\
ListenAddress 127.0.0.1
Port {port}
HostKey {folder}/host
AuthorizedKeysFile {folder}/user.pub
PidFile none
StrictModes no
UsePAM no
PasswordAuthentication no
PermitRootLogin yes
"""
CLIENT = """\
#!/bin/sh
exec {ssh} -F none -p {port} -i {folder}/user -o IdentitiesOnly=yes -o HostName=127.0.0.1 \
  -o StrictHostKeyChecking=no -o UserKnownHostsFile={folder}/known -o LogLevel=ERROR "$@"
"""


@pytest.fixture
def path_to_server(tmp_path):
    """PATH with a program `ssh` that reaches a real server, whatever the host is called."""
    ssh = shutil.which("ssh")
    if SERVER is None or ssh is None:
        pytest.skip("needs OpenSSH's client and server (Debian: openssh-server)")
    if os.getuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)  # where sshd, started by root, wants to be
    folder = tmp_path / "ssh"
    folder.mkdir()
    for name in ("host", "user"):
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
        subprocess.run(command, check=True)
    with ReservedPorts(1) as reserved:
        reserved.release()
        values = {"folder": folder, "port": reserved.ports[0], "ssh": ssh}
        (folder / "sshd_config").write_text(SERVER_CONFIG.format(**values))
        (folder / "ssh").write_text(CLIENT.format(**values))
        (folder / "ssh").chmod(0o755)
        command = [SERVER, "-D", "-e", "-f", str(folder / "sshd_config")]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
            try:
                assert server.stderr is not None
                line = server.stderr.readline()
                assert "Server listening" in line, line + server.stderr.read()
                yield f"{folder}:{os.environ['PATH']}"
            finally:
                server.terminate()


@pytest.mark.full
def test_workers_train_by_ssh(launch, train_script, path_to_server):
    with ReservedPorts(1) as reserved:
        reserved.release()
        options = ["--hosts", "127.0.0.1:2", "--port", str(reserved.ports[0])]
        result = launch("run", *options, train_script, PATH=path_to_server).finish(240.0)
    assert result.exit_code == 0, result.stderr
    trained = [line for line in result.stdout.splitlines() if "trained 2 " in line]
    assert len(trained) == 2 and len({line.partition("trained")[2] for line in trained}) == 1


@pytest.mark.full
@pytest.mark.parametrize("end", ["killed launcher", "killed connections", "signal"])
def test_nothing_stays_beyond_a_connection(launch, script, path_to_server, assert_gone, end):
    launcher = launch("run", "--hosts", "a,b", script(WAIT_FOR_EVER), PATH=path_to_server)
    launcher.wait_for_output("[worker 0] ready", "[worker 1] ready")
    own = psutil.Process(launcher.process_id)
    clients = [each for each in own.children() if each.name() == "ssh"]
    assert len(clients) == 2
    if end == "killed connections":
        for each in clients:
            each.kill()
    elif end == "signal":
        launcher.send_signal(signal.SIGTERM)
    else:
        own.kill()
    launcher.finish()
    assert_gone(launcher.printed_process_ids())
