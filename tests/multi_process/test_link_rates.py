"""Links of limited rate are measured for what they are, in network namespaces."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from _namespaces import limited_hosts, why_not
from hybrid_clusters import SECRET

PROGRAM = Path(__file__).parent / "program_link_rates.py"
PORT, SERVICE_PORT = 7100, 7101
MBIT = (1000.0, 16.0, 4.0)  # of the leader and two workers

pytestmark = pytest.mark.network_namespaces


@pytest.mark.full
def test_rates_of_limited_links(tmp_path: Path) -> None:
    reason = why_not()
    if reason:
        pytest.skip(reason)
    processes: list[subprocess.Popen[str]] = []
    with limited_hosts(MBIT) as hosts:
        cluster = {"worker": [f"{hosts.address(at)}:{PORT}" for at in range(len(MBIT))]}
        try:
            for index in range(len(MBIT)):
                config = {"cluster": cluster, "task": {"type": "worker", "index": index}}
                environment = {
                    **os.environ,
                    **SECRET,
                    "KERAS_HET_SERVICE_ADDRESS": f"{hosts.address(0)}:{SERVICE_PORT}",
                    "TF_CONFIG": json.dumps(config),
                }
                command = hosts.command(index, [sys.executable, str(PROGRAM), str(tmp_path)])
                pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
                processes.append(subprocess.Popen(command, env=environment, **pipes))
            for process in processes:
                output, _ = process.communicate(timeout=200)
                assert process.returncode == 0, output
        finally:
            for process in processes:
                process.kill()
                process.wait(20)
    told = [json.loads((tmp_path / f"{index}.json").read_text()) for index in range(len(MBIT))]
    assert told[0] == told[1] == told[2]
    leader, *rates = told[0]
    assert leader == max(rates)  # its own link is not measured
    for rate, mbit in zip(rates, MBIT[1:], strict=True):
        # a token bucket lets no more through, but for its burst; headers and a busy machine cost
        assert 0.5 * mbit < rate * 8 / 1e6 < 1.1 * mbit
