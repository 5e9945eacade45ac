"""Which worker a process is, from the variables of what started it: `keras-het worker`."""

from __future__ import annotations

import json

import pytest

from keras_het.launch.cluster_environment import Place, expand_hosts, place_of, read_hosts


def slurm(node, local, nodes, tasks, **more):
    return {
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_NODELIST": nodes,
        "SLURM_STEP_TASKS_PER_NODE": tasks,
        "SLURMD_NODENAME": node,
        "SLURM_LOCALID": str(local),
        **more,
    }


def trainer(rank, number="3", first="train-node-0-0.train"):
    return {
        "PET_NNODES": number,
        "PET_NPROC_PER_NODE": "auto",
        "PET_NODE_RANK": str(rank),
        "PET_MASTER_ADDR": first,
        "PET_MASTER_PORT": "29400",
    }


def open_mpi(rank, size, local):
    return {
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": str(size),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(local),
    }


PODS = [f"train-node-0-{index}.train" for index in range(3)]
# environment, hosts, hostname -> hosts of all workers, place
PLACES: dict[str, tuple[dict[str, str], str, str, list[str], int]] = {
    # as Slurm 22.05 set them for `srun -n5 -N3`, in blocks and `-m cyclic`
    "slurm": (slurm("n2", 1, "n[1-2,10]", "2(x2),1"), "", "x", ["n1", "n1", "n2", "n2", "n10"], 3),
    "slurm in circles": (
        slurm("n10", 0, "n[1-2,10]", "2(x2),1", SLURM_PROCID="2", SLURM_DISTRIBUTION="cyclic"),
        *("", "x", ["n1", "n1", "n2", "n2", "n10"], 4),
    ),
    # as it did for `srun -n2 -N1 -w n10 : -n2 -N2 -w n1,n2`: its nodes are sorted, ours are not
    "slurm of unlike parts": (
        slurm(
            *("n10", 1, "n[1-2,10]", "1(x2),2"),
            SLURM_PROCID="1",
            SLURM_NODEID="0",
            SLURM_HET_SIZE="2",
            SLURM_JOB_NODELIST_HET_GROUP_0="n10",
            SLURM_JOB_NODELIST_HET_GROUP_1="n[1-2]",
        ),
        *("", "x", ["n10", "n10", "n1", "n2"], 1),
    ),
    "slurm with other names": (
        slurm("n2", 0, "n[1-2]", "1(x2)", SLURM_PROCID="1", SLURM_STEP_NUM_TASKS="2"),
        *("n[1-2]-ib", "n2", ["n1-ib", "n2-ib"], 1),
    ),
    "kubeflow": (trainer(2), "", "train-node-0-2", PODS, 2),
    "kubeflow with hosts": (trainer(2), ",".join(PODS), "train-node-0-2", PODS, 2),
    # the second job of a JobSet counts from 0 again
    "jobset": (
        {"JOB_COMPLETION_INDEX": "0"},
        *("t-fast-0-[0-1].t,t-slow-0-0.t", "t-slow-0-0"),
        *(["t-fast-0-0.t", "t-fast-0-1.t", "t-slow-0-0.t"], 2),
    ),
    "mpi by name": (open_mpi(1, 3, 0), "a.lab,b:2", "b.lab.org", ["a.lab", "b", "b"], 1),
    "mpi by name and local rank": (open_mpi(1, 3, 1), "a,b:2", "b", ["a", "b", "b"], 2),
    "mpi by rank": (
        open_mpi(2, 3, 1),
        "10.0.0.1,10.0.0.2:2",
        "b",
        ["10.0.0.1"] + 2 * ["10.0.0.2"],
        2,
    ),
    "pmi": ({"PMI_RANK": "1", "PMI_SIZE": "2"}, "a:2", "a", ["a", "a"], 1),
    "mpirun in slurm": (
        slurm("n1", 0, "n[1-2]", "1(x2)", SLURM_PROCID="0") | open_mpi(1, 2, 1),
        *("n1:2", "n1", ["n1", "n1"], 1),
    ),
    "torchrun": ({"RANK": "1", "WORLD_SIZE": "2"}, "x,y", "z", ["x", "y"], 1),
    "by hand": ({}, "a,b", "b", ["a", "b"], 1),
}


@pytest.mark.parametrize(
    ("environ", "hosts", "hostname", "expected", "index"), PLACES.values(), ids=PLACES
)
def test_the_place_of_a_process(environ, hosts, hostname, expected, index):
    place = place_of(environ, read_hosts(hosts) if hosts else (), hostname)
    assert (list(place.hosts), place.index) == (expected, index)


@pytest.mark.parametrize(
    ("environ", "hosts", "hostname", "expected", "index"),
    [
        (slurm("n2", 0, "n[1-2]", "1(x2)"), "", "n2", ["n1", "n2"], 1),
        ({}, "a:4,b:2", "b", ["a"] * 4 + ["b"] * 2, 4),
        (open_mpi(1, 2, 0), "10.0.0.1:4,10.0.0.2:2", "b", ["10.0.0.1"] * 4 + ["10.0.0.2"] * 2, 4),
    ],
)
def test_one_process_stands_for_the_workers_of_its_host(environ, hosts, hostname, expected, index):
    place = place_of(environ, read_hosts(hosts) if hosts else (), hostname, True)
    assert (list(place.hosts), place.index) == (expected, index)


JOB = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_PROCID": "0"}
BROKEN: dict[str, tuple[dict[str, str], str, str]] = {
    "nothing": ({}, "", "Received: none of them. To fix it, list the hosts of all workers with"),
    "batch script": (JOB, "", "a Slurm job, but no step of it.*srun keras-het worker train.py"),
    "mpi": (open_mpi(0, 2, 0), "", "OMPI_COMM_WORLD_RANK, which does not say where the others"),
    "torchrun": ({"RANK": "0", "MASTER_ADDR": "a"}, "", "RANK, which does not say where"),
    "indexed job": ({"JOB_COMPLETION_INDEX": "0"}, "", "JOB_COMPLETION_INDEX, which does not"),
    "other node": (slurm("n3", 0, "n[1-2]", "1(x2)"), "", "SLURMD_NODENAME=n3, SLURM_LOCALID=0"),
    "too many tasks": (slurm("n1", 1, "n[1-2]", "1(x2)"), "", "contradict each other"),
    "other step": (slurm("n1", 0, "n[1-2]", "1"), "", "contradict each other"),
    "no tasks": (slurm("n1", 0, "n1", ""), "", "SLURM_STEP_TASKS_PER_NODE is not valid"),
    "odd tasks": (slurm("n1", 0, "n1", "1x2"), "", r"expected: such as 2\(x3\),1"),
    "odd nodes": (slurm("n1", 0, "n[1-", "1"), "", r"These are not valid hosts. Received: 'n\[1-'"),
    "mpirun": (slurm("n1", 0, "n1", "1") | open_mpi(0, 2, 0), "", "OMPI_COMM_WORLD_SIZE=2"),
    "elastic": (trainer(0, "1:3"), "", "PET_NNODES is not valid. Received: '1:3'"),
    "other pods": (trainer(0, first="10.1.2.3"), "", "such as train-node-0-0.train"),
    "rank": (trainer(3), "", "Received: 'train-node-0-0.train', 3, 3"),
    "absurd": (trainer(0, str(10**9)), "", "PET_NNODES is not valid"),
    "too many steps": (slurm("n1", 0, "n1", "1(x900000000)"), "", "contradict each other"),
    "far too many tasks": (slurm("n1", 0, "n1", "200000"), "", "These are not valid hosts"),
    "no rank": (trainer(0) | {"PET_NODE_RANK": ""}, "", "PET_NODE_RANK is not valid"),
    "sizes": (open_mpi(0, 2, 0), "a,b,c", r"3 from --hosts \(a, b, c\), and .*_SIZE=2"),
    "stranger": ({}, "a,b", "this host's name 'h'. Name hosts as `hostname` prints"),
    "twice": ({}, "h:2", "does not say which of its workers this process is"),
    "rank elsewhere": ({"RANK": "0"}, "a,h:2", "this host's name 'h', RANK=0"),
    "second on a host": (open_mpi(1, 2, 1), "h,b", "OMPI_COMM_WORLD_RANK=1. Name hosts"),
    "option": ({}, "-oProxyCommand=x", "These are not valid hosts. Received: '-oProxy"),
    "user": ({}, "me@a", "These are not valid hosts. Received: 'me@a'.*~/.ssh/config"),
    "no slots": ({}, "a:0", "These are not valid hosts. Received: 'a:0'"),
    "no host": ({}, ",", "These are not valid hosts. Received: ','"),
}


@pytest.mark.parametrize(("environ", "hosts", "message"), BROKEN.values(), ids=BROKEN)
def test_environments_that_do_not_tell_the_place(environ, hosts, message):
    with pytest.raises(ValueError, match=message):
        place_of(environ, read_hosts(hosts) if hosts else (), "h")


def test_every_worker_of_a_host_has_a_port_and_one_above_it():
    place = Place(("a", "b", "a"), 1, "test")
    assert place.addresses(700) == ["a:700", "b:700", "a:702"]
    place = place.with_workers(2)
    assert place.addresses(7) == ["a:7", "a:9", "b:7", "b:9", "a:11", "a:13"] and place.index == 2


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("n[08-10,12]", ["n08", "n09", "n10", "n12"]),
        ("a,b[1-2].x,c", ["a", "b1.x", "b2.x", "c"]),
        ("r[0-1]n[0-1]", ["r0n0", "r0n1", "r1n0", "r1n1"]),
        ("127.0.0.[1-2]", ["127.0.0.1", "127.0.0.2"]),
    ],
)
def test_lists_of_hosts_as_slurm_writes_them(text, hosts):
    assert expand_hosts(text) == hosts == read_hosts(text)


def test_a_file_of_hosts_has_mpiruns_form(tmp_path):
    path = tmp_path / "hosts.txt"
    path.write_text("# two machines\na slots=2  # fast\n\nb[1-2]\n")
    assert read_hosts(str(path)) == ["a", "a", "b1", "b2"]
    path.write_text("a max_slots=2\n")
    with pytest.raises(ValueError, match=r"These are not valid hosts\. Received: 'a max_slots=2'"):
        read_hosts(str(path))
    path.write_bytes("m\u00fcnchen\n".encode("latin-1"))
    with pytest.raises(ValueError, match=rf"not UTF-8 text\. Received: '{path}'"):
        read_hosts(str(path))
    with pytest.raises(ValueError, match=f"There is no hosts file '{tmp_path}/none'"):
        read_hosts(f"{tmp_path}/none")


TOO_MANY = [
    "node[0-999999999]",
    "a:99999999999",
    "n[0-999][0-999]",
    "n[0-999]:999",
    "n[0-60000]," * 2,
]
TOO_MANY += ["a:" + "9" * 5000, f"n[{'9' * 5000}]", "n[2-1]"]


@pytest.mark.parametrize("hosts", TOO_MANY, ids=range(len(TOO_MANY)))
def test_a_number_of_hosts_that_cannot_be_meant_is_refused_at_once(hosts):
    with pytest.raises(ValueError, match=r"These are not valid hosts\. Received: "):
        read_hosts(hosts.rstrip(","))


# The command: TF_CONFIG, and the script in its place.

ONE_WORKER = '{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 0}}'
PRINT = 'print(json.dumps(config), sys.argv[1:], os.environ["KERAS_BACKEND"], os.getpid())'


def test_the_script_takes_the_place_of_the_command(launch, script):
    place = slurm("n2", 1, "n[1-2]", "2(x2)")
    launched = launch("worker", "--port", "700", script(PRINT), "--gpus", "x", **place)
    result = launched.finish()
    assert (result.exit_code, result.stderr) == (
        0,
        "[keras-het] worker 3 of 4 at n2:702, by Slurm.",
    )
    cluster = {"worker": ["n1:700", "n1:702", "n2:700", "n2:702"]}
    config = json.dumps({"cluster": cluster, "task": {"type": "worker", "index": 3}})
    assert result.stdout == f"{config} ['--gpus', 'x'] tensorflow {launched.process_id}"


def test_the_last_workers_may_be_asynchronous(launch, script):
    arguments = ["--hosts", "a,b,c", "--async-workers", "2", script(PRINT)]
    config, _ = json.JSONDecoder().raw_decode(
        launch("worker", *arguments, RANK="2").finish().stdout
    )
    assert config["cluster"] == {"worker": ["a:12345"], "async": ["b:12345", "c:12345"]}
    assert config["task"] == {"type": "async", "index": 1}


def test_a_tf_config_is_used_as_it_is(launch, script):
    text = '{"cluster":{"chief":["a:1"],"worker":["b:1"]},"task":{"type":"chief","index":0}}'
    path = script('print(os.environ["TF_CONFIG"])')
    result = launch("worker", path, TF_CONFIG=text, **slurm("n1", 0, "n1", "1")).finish()
    assert (result.stdout, result.stderr) == (text, "")


@pytest.mark.parametrize(
    ("arguments", "environ", "message"),
    [
        ([], {"OMPI_COMM_WORLD_RANK": "0"}, "error: Variables must say where all workers are"),
        ([], {"TF_CONFIG": "{"}, "error: TF_CONFIG is not valid JSON"),
        (
            ["--hosts", "a"],
            {"TF_CONFIG": ONE_WORKER},
            "--hosts and TF_CONFIG both list the workers",
        ),
        (["--async-workers", "1", "--hosts", "a"], {"RANK": "0"}, "leaves no worker of 1"),
        (["--gpus", "3", "--hosts", "a"], {"RANK": "0"}, "--gpus: there are no such GPUs"),
        (
            ["--gpus", "auto"],
            slurm("n1", 0, "n1", "2"),
            "2 task(s) on this host, and 1 GPU",
        ),
        (["--python", "no-such-python"], slurm("n1", 0, "n1", "1"), "No such file"),
    ],
)
def test_mistakes_are_wrong_usage(launch, script, arguments, environ, message):
    result = launch(
        "worker", *arguments, script(PRINT), CUDA_VISIBLE_DEVICES="0", **environ
    ).finish()
    assert result.exit_code == 2 and message in result.stderr


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [("a,b", ["a:9", "a:11", "b:9", "b:11"]), ("a:3,b:2", ["a:9", "a:11", "a:13", "b:9", "b:11"])],
)
def test_one_task_on_a_host_starts_a_worker_for_each_gpu(launch, script, hosts, expected):
    path = script('print(config["cluster"]["worker"], os.environ["CUDA_VISIBLE_DEVICES"])')
    options = ["--port", "9", "--hosts", hosts, "--gpus", "auto"]
    environ = {"CUDA_VISIBLE_DEVICES": "4,5", "RANK": "1", "MY_TOKEN": "x"}
    result = launch("worker", *options, path, **environ).finish()
    assert result.exit_code == 0, result.stderr
    first = len(expected) - 2
    assert sorted(line for line in result.stdout.splitlines() if "sees" not in line) == [
        f"[worker {first + number}] {expected} {4 + number}" for number in range(2)
    ]
    assert "not passed" not in result.stderr


def test_each_task_of_slurm_takes_its_gpu(launch, script):
    path = script('print(index, os.environ["CUDA_VISIBLE_DEVICES"], os.getpid())')
    place = slurm("n2", 1, "n[1-2]", "1,2")
    launched = launch("worker", "--gpus", "auto", path, CUDA_VISIBLE_DEVICES="4,5", **place)
    assert launched.finish().stdout == f"2 5 {launched.process_id}"


def test_workers_of_one_host_meet_on_it(launch, script):
    path = script('print(config["cluster"]["worker"][0][:9])')
    options = ["--hosts", "a", "--gpus", "auto", path]
    result = launch("worker", *options, CUDA_VISIBLE_DEVICES="4,5", RANK="0").finish()
    assert result.stdout.count("127.0.0.1") == 2 and "replaced" not in result.stderr
