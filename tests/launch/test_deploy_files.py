"""Files that a user copies: their names are those that `keras-het worker` finds."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from keras_het.launch.cluster_environment import place_of, read_hosts
from keras_het.launch.command_line import main

yaml = pytest.importorskip("yaml")

FILES = Path(__file__).parents[2] / "recipes" / "deploy"


def read(name):
    return yaml.safe_load((FILES / name).read_text())


def test_a_jobset_lists_the_names_of_its_pods():
    jobset = read("jobset.yaml")
    name, jobs = jobset["metadata"]["name"], jobset["spec"]["replicatedJobs"]
    pods = [
        f"{name}-{job['name']}-0-{pod}.{name}"
        for job in jobs
        for pod in range(job["template"]["spec"]["completions"])
    ]
    for job in jobs:
        spec = job["template"]["spec"]
        assert spec["parallelism"] == spec["completions"] and spec["completionMode"] == "Indexed"
        assert spec["backoffLimit"] == 0  # the set starts again as a whole
        pod = spec["template"]["spec"]
        assert pod["restartPolicy"] == "Never" and pod["terminationGracePeriodSeconds"] > 30
        option, hosts, script = pod["containers"][0]["args"]
        assert option == "--hosts" and script == "train.py"
        assert read_hosts(hosts) == pods
    network = jobset["spec"]["network"]
    assert network["enableDNSHostnames"] and network["publishNotReadyAddresses"]
    found = [place_of({}, pods, pod.partition(".")[0]).index for pod in pods]
    assert found == list(range(len(pods)))


def test_a_trainjob_names_its_pods_by_number():
    runtime, job = yaml.safe_load_all((FILES / "trainjob.yaml").read_text())
    assert job["spec"]["runtimeRef"] == {
        "kind": runtime["kind"],
        "name": runtime["metadata"]["name"],
    }
    spec = runtime["spec"]["template"]["spec"]
    (node,) = spec["replicatedJobs"]
    assert node["name"] == "node" and "torch" in runtime["spec"]["mlPolicy"]
    assert node["template"]["spec"]["backoffLimit"] == 0  # the set starts again as a whole
    assert spec["failurePolicy"]["maxRestarts"] and spec["network"]["publishNotReadyAddresses"]
    assert node["template"]["spec"]["template"]["spec"]["restartPolicy"] == "Never"
    name, number = job["metadata"]["name"], job["spec"]["trainer"]["numNodes"]
    variables = {"PET_MASTER_ADDR": f"{name}-node-0-0.{name}", "PET_NNODES": str(number)}
    places = [place_of({**variables, "PET_NODE_RANK": str(rank)}) for rank in range(number)]
    assert [place.index for place in places] == list(range(number))
    assert places[0].hosts[-1] == f"{name}-node-0-{number - 1}.{name}"


def test_a_rayjob_has_a_resource_for_each_worker():
    spec = read("rayjob.yaml")["spec"]
    groups = spec["rayClusterSpec"]["workerGroupSpecs"]
    least, most = spec["entrypoint"].partition("--workers ")[2].split()[0].split(":")
    assert int(least) == sum(group["minReplicas"] for group in groups)
    assert int(most) == sum(group["maxReplicas"] for group in groups)
    name = spec["entrypoint"].partition("--resources ")[2].partition("=")[0]
    assert all(
        f'"{name}' in group["rayStartParams"]["resources"].replace("\\", "") for group in groups
    )
    with pytest.raises(SystemExit, match="2"):  # no such file here: the options are understood
        main([*spec["entrypoint"].split()[1:-1], "missing.py"])


@pytest.mark.parametrize("name", ["train.sbatch", "generations.sbatch", "unequal.sbatch"])
def test_batch_scripts_are_bash_and_start_workers(name):
    subprocess.run(["bash", "-n", str(FILES / name)], check=True, timeout=60)
    (line,) = re.findall(r"keras-het (worker .*)", (FILES / name).read_text())
    with pytest.raises(SystemExit, match="2"):  # no such file here: the options are understood
        main(line.replace("$port", "7000").replace("train.py", "missing.py").split())
