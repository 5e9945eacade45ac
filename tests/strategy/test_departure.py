"""The end of a process is short, and nothing that it has written is lost."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = """
import atexit, gc, sys
atexit.register(lambda: print("searches:", gc.isenabled(), gc.get_freeze_count() > 1000))
from keras_het.strategy.cluster.departure import leave_quickly

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


def test_files_are_written_and_the_exit_code_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "file.txt"
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(path)], capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 7, ended.stderr
    assert ended.stdout.splitlines() == ["last line", "searches: False True"]
    assert path.read_text() == "written"
