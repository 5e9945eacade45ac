"""The end of a process is short and loses nothing; signals concern the one that gets them."""

import subprocess
import sys

LEAVES = """
import atexit, gc, sys
atexit.register(lambda: print("searches:", gc.isenabled(), gc.get_freeze_count() > 1000))
from keras_het.strategy.cluster.stop_signals import leave_quickly

leave_quickly()
leave_quickly()

class Holder:
    pass

holder = Holder()
holder.itself, holder.file = holder, open(sys.argv[1], "w")
holder.file.write("written")
print("last line")
sys.exit(7)
"""


def test_files_are_written_and_the_exit_code_is_kept(tmp_path):
    path = tmp_path / "file.txt"
    ended = subprocess.run(
        [sys.executable, "-c", LEAVES, str(path)], capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 7, ended.stderr
    assert ended.stdout.splitlines() == ["last line", "searches: False True"]
    assert path.read_text() == "written"


FORKS = """
import faulthandler, os, signal, threading
from keras_het.strategy.cluster.stop_signals import stop_signals

faulthandler.dump_traceback_later(60, exit=True)
aborted = []
stop_signals.install(aborted.append)
for _ in range(100):
    child = os.fork()
    if child == 0:
        threading.Event().wait()
    os.kill(child, signal.SIGTERM)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGTERM
assert stop_signals.has_received_sigterm is False and not aborted
stop_signals.leave()
print("still here", flush=True)
# another thread gets it, as where the main thread is in TensorFlow's C++
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
os.kill(os.getpid(), signal.SIGTERM)
threading.Event().wait(30)
"""


def test_a_process_that_was_just_forked_ends_by_its_own_signal():
    done = subprocess.run(
        [sys.executable, "-c", FORKS], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 143, done.stderr
    assert done.stdout == "still here\n"
    assert "again" not in done.stderr  # it was the first
