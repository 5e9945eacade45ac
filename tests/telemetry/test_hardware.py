"""Samples of GPUs (a fake driver's), of the process, its cgroups and the machine."""

from __future__ import annotations

import logging
import math
import shutil
import subprocess
import sys
import time
from types import SimpleNamespace

import fake_nvml
import numpy as np
import psutil
import pytest
from fake_nvml import FakeNvml, Gpu

from keras_het import device_names, usable_cpus
from keras_het.device_names import gpu_name, identities, processor_name
from keras_het.planning.diagnosis.recording import HARDWARE
from keras_het.telemetry import hardware
from keras_het.telemetry.hardware import HardwareSampler
from keras_het.usable_cpus import own_cpus

GPU_NAMES = [name for name in HARDWARE if name.startswith(("hw.", "keras_het.gpu"))]
A100, TITAN = "NVIDIA A100-SXM4-40GB", "NVIDIA TITAN V"


@pytest.fixture(autouse=True)
def nothing_of_this_machine(monkeypatch):
    """Neither its driver, nor the TensorFlow that another test has imported."""
    cuda_has(monkeypatch)
    tensorflow_has(monkeypatch, None)


def cuda_has(monkeypatch, *uuids):
    monkeypatch.setattr(device_names, "cuda_uuids", lambda: list(uuids))


def tensorflow_has(monkeypatch, gpus):
    monkeypatch.setattr(device_names, "tensorflow_gpus", lambda: gpus)


def install(monkeypatch, *gpus, **options):
    module = FakeNvml(*gpus, **options)
    monkeypatch.setitem(sys.modules, "pynvml", module)
    cuda_has(monkeypatch, *(gpu.uuid.partition("-")[2] for gpu in gpus))
    return module


def values(sampler, row=0):
    return dict(zip(sampler.names, sampler.sample()[row].tolist(), strict=True))


# GPUs


def test_a_gpu_has_all_values_in_the_units_of_the_table(monkeypatch):
    module = install(monkeypatch, Gpu())
    sampler = HardwareSampler(["/job:worker/replica:0/task:1/device:GPU:0"])
    assert sampler.names == tuple(HARDWARE)
    expected = {
        "hw.gpu.utilization": 0.73,
        "hw.gpu.memory.usage": 2.0**30,
        "hw.gpu.memory.limit": 40 * 2.0**30,
        "hw.power": 123.0,
        "keras_het.gpu.power_limit": 400.0,
        "hw.temperature": 61.0,
        "keras_het.gpu.clock": 1.095e9,
        "keras_het.gpu.clock_limit": 1.41e9,
        "keras_het.gpu.throttle_reasons": 4.0,
    }
    assert list(expected) == GPU_NAMES
    found = values(sampler)
    assert {name: found[name] for name in expected} == pytest.approx(expected)
    assert module.opened == 1
    sampler.close()
    sampler.close()
    assert module.opened == 0


def test_one_row_for_each_replica_and_the_process_in_all(monkeypatch):
    install(monkeypatch, Gpu(), Gpu(uuid="GPU-b", errors={"DeviceGetPowerUsage": 3}))
    sampler = HardwareSampler(["GPU:1", "GPU:0", "CPU:0"])
    rows = sampler.sample()
    assert rows.dtype == np.float32 and rows.shape == (3, len(HARDWARE))
    power = sampler.names.index("hw.power")
    assert np.isnan(rows[:, power]).tolist() == [True, False, True]
    memory = sampler.names.index("process.memory.usage")
    assert rows[0, memory] == rows[1, memory] == rows[2, memory] > 0


def test_older_drivers_and_bindings(monkeypatch):
    install(monkeypatch, Gpu(), old=True)
    found = values(HardwareSampler(["GPU:0"]))
    assert found["keras_het.gpu.throttle_reasons"] == 4.0
    assert found["hw.gpu.memory.usage"] == 2**30 + 600 * 2**20  # what the driver reserves, too
    assert HardwareSampler(["GPU:0"]).products == (A100,)


def test_what_a_gpu_does_not_have_is_asked_once(monkeypatch, caplog):
    gpu = Gpu(errors={"DeviceGetPowerUsage": fake_nvml.NOT_SUPPORTED})
    install(monkeypatch, gpu)
    sampler = HardwareSampler(["GPU:0"])
    for _ in range(3):
        found = values(sampler)
        assert math.isnan(found["hw.power"]) and found["hw.temperature"] == 61.0
    assert gpu.asked.count("DeviceGetPowerUsage") == 1
    assert not caplog.records


def test_an_error_of_a_moment_passes(monkeypatch):
    gpu = Gpu(errors={"DeviceGetTemperature": 999})
    install(monkeypatch, gpu)
    sampler = HardwareSampler(["GPU:0"])
    assert math.isnan(values(sampler)["hw.temperature"])
    gpu.errors = {}
    assert values(sampler)["hw.temperature"] == 61.0


def test_a_lost_gpu_is_unknown_and_told_once(monkeypatch, caplog):
    gpu = Gpu()
    install(monkeypatch, gpu, Gpu(uuid="GPU-b"))
    sampler = HardwareSampler(["GPU:0", "GPU:1"])
    assert values(sampler)["hw.power"] == 123.0
    gpu.errors = {"all": fake_nvml.LOST}
    for _ in range(3):
        rows = sampler.sample()
        columns = [sampler.names.index(name) for name in GPU_NAMES]
        assert np.isnan(rows[0, columns]).all() and not np.isnan(rows[1, columns]).any()
    (record,) = caplog.records
    assert "GPU:0 no longer answers" in record.getMessage()


@pytest.mark.parametrize(
    ("error", "fix"),
    [
        (fake_nvml.LIBRARY_NOT_FOUND, "--gpus all"),
        (fake_nvml.DRIVER_NOT_LOADED, "not loaded"),
        (18, "restart"),
        (999, "nvidia-smi"),
    ],
)
def test_without_a_driver_the_rest_is_known(monkeypatch, caplog, error, fix):
    install(monkeypatch, Gpu(), init_error=error)
    sampler = HardwareSampler(["GPU:0", "GPU:1"])
    found = values(sampler)
    assert all(math.isnan(found[name]) for name in GPU_NAMES)
    assert found["process.memory.usage"] > 0
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and fix in record.getMessage()
    sampler.close()


def test_without_the_binding_the_rest_is_known(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert values(HardwareSampler(["GPU:0"]))["process.memory.usage"] > 0
    assert "Install nvidia-ml-py" in caplog.text


def test_without_gpus_the_driver_is_not_asked(monkeypatch, caplog):
    module = install(monkeypatch, init_error=fake_nvml.LIBRARY_NOT_FOUND)
    HardwareSampler(["/job:localhost/replica:0/task:0/device:CPU:0"]).sample()
    assert module.opened == 0 and not caplog.records


def test_a_part_of_a_gpu_has_its_memory_and_the_clocks_of_the_whole(monkeypatch):
    parts = (
        Gpu("A100 MIG 1g.5gb", "MIG-1"),
        Gpu("A100 MIG 1g.5gb", "MIG-2", errors={"DeviceGetPowerUsage": 2}),
    )
    install(monkeypatch, Gpu(parts=parts))
    cuda_has(monkeypatch, "2")
    found = values(HardwareSampler(["GPU:0"]))
    assert math.isnan(found["hw.gpu.utilization"])
    assert found["hw.gpu.memory.limit"] == 5 * 2**30
    assert found["hw.power"] == 123.0 and found["keras_het.gpu.clock"] == pytest.approx(1.095e9)
    assert HardwareSampler(["GPU:0"]).products == ("A100 MIG 1g.5gb",)


# Which GPU


def test_cuda_tells_which_gpu_each_is(monkeypatch, caplog):
    parts = (Gpu("part", "MIG-77"),)
    install(monkeypatch, Gpu("old", "GPU-1"), Gpu("new", "GPU-2"), Gpu(uuid="GPU-3", parts=parts))
    cuda_has(monkeypatch, "2", "77", "gone")
    devices = ["GPU:0", "GPU:1", "GPU:2"]
    assert HardwareSampler(devices).products == ("new", "part", "")
    assert "which of this machine's GPUs GPU:2 is" in caplog.text
    # a script hides and divides them
    tensorflow_has(monkeypatch, [(1, "part"), (1, "part"), (0, "new")])
    assert HardwareSampler(devices).products == ("part", "part", "new")


def test_the_driver_of_cuda_tells_uuids(monkeypatch):
    monkeypatch.undo()

    class Driver:
        def cuInit(self, flags):  # noqa: N802
            return 0

        def cuDeviceGetCount(self, count):  # noqa: N802
            count._obj.value = 2
            return 0

        def cuDeviceGet(self, device, index):  # noqa: N802
            device._obj.value = index
            return 0

        def cuDeviceGetUuid(self, name, device):  # noqa: N802
            name[:] = bytes([device.value] * 16)
            return 0

    monkeypatch.setattr(device_names.ctypes, "CDLL", lambda name: Driver())
    assert device_names.cuda_uuids() == [
        "00000000-0000-0000-0000-000000000000",
        "01010101-0101-0101-0101-010101010101",
    ]
    monkeypatch.setattr(Driver, "cuInit", lambda self, flags: 100)  # no device
    assert device_names.cuda_uuids() == []


def test_tensorflow_tells_which_gpus_it_uses(monkeypatch):
    monkeypatch.undo()
    config = SimpleNamespace(
        get_visible_devices=lambda kind: [SimpleNamespace(name="/physical_device:GPU:3")],
        get_logical_device_configuration=lambda device: [1, 2],
        experimental=SimpleNamespace(get_device_details=lambda device: {"device_name": TITAN}),
    )
    monkeypatch.setitem(sys.modules, "tensorflow", SimpleNamespace(config=config))
    assert device_names.tensorflow_gpus() == [(3, TITAN), (3, TITAN)]


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        ("GPU:1", "GPU:1"),
        ("/gpu:0", "GPU:0"),
        ("/job:worker/replica:0/task:1/device:GPU:12", "GPU:12"),
        ("/job:worker/replica:0/task:1/device:CPU:0", ""),
        ("XGPU:0", ""),
    ],
)
def test_names_of_devices(device, expected):
    assert gpu_name(device) == expected


def test_names_of_products(monkeypatch, tmp_path):
    install(monkeypatch, Gpu())
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor : 0\nmodel name\t: Some CPU @ 2 GHz\n\nprocessor : 1\n")
    assert processor_name(cpuinfo) == "Some CPU @ 2 GHz"
    assert HardwareSampler(["GPU:0", "CPU:0"]).products == (A100, processor_name())
    # without a driver's library TensorFlow knows
    install(monkeypatch, init_error=fake_nvml.LIBRARY_NOT_FOUND)
    tensorflow_has(monkeypatch, [(0, TITAN)])
    assert HardwareSampler(["GPU:0", "GPU:1"]).products == (TITAN, "")


def test_what_stays_when_a_process_starts_again(monkeypatch):
    monkeypatch.setattr(device_names, "cuda_uuids", lambda: ["a", "b", "c"])
    monkeypatch.setattr(device_names.platform, "node", lambda: "node7")
    names = ["/job:worker/replica:0/task:1/device:GPU:1", "GPU:0", "/device:CPU:2"]
    assert identities(names) == ("GPU-b", "GPU-a", "node7 CPU:2")
    # two parts of one GPU; the third is not one of CUDA
    tensorflow_has(monkeypatch, [(2, TITAN), (2, TITAN), (7, "other")])
    assert identities([*names, "GPU:2"]) == ("GPU-c", "GPU-c", "node7 CPU:2", "node7 GPU:2")


# Process, cgroups and machine

RATES = [
    "keras_het.cpu.throttled",
    "keras_het.cpu.waiting",
    "process.cpu.usage",
    "process.disk.io",
    "system.cpu.utilization",
    "system.disk.io",
    "system.network.io",
]


def write(folder, **files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(f"{text}\n")


def sampler_in(tmp_path, membership):
    path = tmp_path / "membership"
    path.write_text(membership)
    return HardwareSampler(["CPU:0"], tmp_path, path)


@pytest.fixture
def clock(monkeypatch):
    now = SimpleNamespace(seconds=100.0, cpu=5.0)
    monkeypatch.setattr(hardware.time, "monotonic", lambda: now.seconds)
    monkeypatch.setattr(hardware.time, "process_time", lambda: now.cpu)
    return now


class Tasks:
    """Stands for /proc/self/task: what each thread has waited for a CPU."""

    def __init__(self, folder):
        self.folder = folder

    def write(self, waited):
        shutil.rmtree(self.folder, ignore_errors=True)
        for thread, seconds in waited.items():
            write(self.folder / str(thread), schedstat=f"7 {seconds * 1e9:.0f} 9")


@pytest.fixture
def tasks(monkeypatch, tmp_path):
    tasks = Tasks(tmp_path / "task")
    monkeypatch.setattr(hardware, "TASKS", tasks.folder)
    monkeypatch.setattr(usable_cpus, "TASKS", tasks.folder)
    return tasks


def test_rates_are_those_since_the_last_sample(tmp_path, clock, tasks):
    tasks.write({1: 2.0, 2: 1.0, 3: 8.0})
    sampler = HardwareSampler(["CPU:0"], tmp_path / "none", tmp_path / "nothing")
    first = values(sampler)
    assert all(math.isnan(first[name]) for name in RATES)
    clock.seconds, clock.cpu = 102.0, 8.0
    tasks.write({1: 3.0, 2: 1.0, 4: 0.5})  # 3 has ended, 4 is new
    second = values(sampler)
    assert second["keras_het.cpu.waiting"] == pytest.approx(1.0 / 2)
    assert second["process.cpu.usage"] == 1.5
    assert second["keras_het.cpu.throttled"] == 0.0
    clock.seconds = 102.0  # no time has passed
    assert all(math.isnan(values(sampler)[name]) for name in RATES)


def test_this_process(tmp_path):
    sampler = HardwareSampler(["CPU:0"], tmp_path / "none", tmp_path / "nothing")
    sampler.sample()
    end = time.process_time() + 0.05
    while time.process_time() < end:
        pass
    found = values(sampler)
    assert 0 < found["process.cpu.usage"] < 4
    assert 0 <= found["system.cpu.utilization"] <= 1
    assert found["process.memory.usage"] < found["system.memory.limit"]
    assert found["system.memory.limit"] == pytest.approx(psutil.virtual_memory().total)
    assert found["keras_het.cpu.budget"] >= 1


@pytest.mark.parametrize(
    ("cpus", "used", "stopped", "throttled", "busy"),
    [
        (0.5, 4, 3, 0.3, 0.8),
        # four threads run for half a period and are stopped together for the other half
        (2, 20, 20, 0.5, 1.0),
    ],
)
def test_a_quota_of_version_2(tmp_path, clock, cpus, used, stopped, throttled, busy):
    stat = "usage_usec {}000000\nuser_usec 1\nnr_periods 10\nthrottled_usec {}000000"
    own = tmp_path / "own"
    write(own, cpu__max=f"{int(100_000 * cpus)} 100000", cpu__stat=stat.format("", ""))
    sampler = sampler_in(tmp_path, "0::/own\n")
    sampler.sample()
    write(own, cpu__stat=stat.format(used, stopped))
    clock.seconds += 10.0
    found = values(sampler)
    assert found["keras_het.cpu.budget"] == min(cpus, len(own_cpus()))
    assert found["keras_het.cpu.throttled"] == pytest.approx(throttled)
    assert found["system.cpu.utilization"] == pytest.approx(busy)


def test_a_quota_of_version_1(tmp_path, clock):
    def use(nanoseconds):
        write(tmp_path / "cpu" / "own", cpu__stat=f"nr_periods 1\nthrottled_time {nanoseconds}")
        write(tmp_path / "cpuacct" / "own", cpuacct__usage=nanoseconds)

    write(tmp_path / "cpu" / "own", cpu__cfs_quota_us=25000, cpu__cfs_period_us=100000)
    use(0)
    sampler = sampler_in(tmp_path, "3:cpuacct:/own\n2:cpu:/own\n0::/\n")
    sampler.sample()
    use(2 * 10**9)
    clock.seconds += 10.0
    found = values(sampler)
    assert found["keras_het.cpu.budget"] == 0.25
    assert found["keras_het.cpu.throttled"] == pytest.approx(0.2)
    assert found["system.cpu.utilization"] == pytest.approx(0.8)


def test_a_quota_whose_statistics_are_hidden(tmp_path, clock):
    write(tmp_path / "own", cpu__max="50000 100000")
    sampler = sampler_in(tmp_path, "0::/own\n")
    sampler.sample()
    clock.seconds += 1.0
    assert math.isnan(values(sampler)["keras_het.cpu.throttled"])


@pytest.mark.parametrize(
    ("membership", "folder", "files"),
    [
        (
            "0::/own\n",
            "own",
            {
                "memory__max": 5000,
                "memory__current": 3000,
                "memory__stat": "anon 9\ninactive_file 500",
            },
        ),
        (
            "4:memory:/own\n0::/\n",
            "memory/own",
            {
                "memory__limit_in_bytes": 5000,
                "memory__usage_in_bytes": 3000,
                "memory__stat": "inactive_file 1\ntotal_inactive_file 500",
            },
        ),
    ],
)
def test_memory_of_the_group_that_has_a_limit(tmp_path, membership, folder, files):
    write(tmp_path / folder, **files)
    found = values(sampler_in(tmp_path, membership))
    assert (found["system.memory.limit"], found["system.memory.usage"]) == (5000, 2500)


def test_a_limit_above_what_there_is_is_none(tmp_path):
    write(tmp_path / "own", memory__max=10**18, memory__current=1)
    found = values(sampler_in(tmp_path, "0::/own\n"))
    assert found["system.memory.limit"] == pytest.approx(psutil.virtual_memory().total)


def test_disks_and_cards_count_once(monkeypatch, tmp_path, clock):
    """Not their partitions, mirrors and bridges, and nothing that stays on the machine."""
    for name in ("block/sda", "block/nvme0n1", "class/net/eth0"):
        (tmp_path / "sys" / name / "device").mkdir(parents=True)
    monkeypatch.setattr(hardware, "_DEVICES", tmp_path / "sys")
    total = SimpleNamespace(disk=0, net=0)

    def disks(perdisk):
        names = ("sda", "sda1", "nvme0n1", "md0", "loop0")
        return {
            name: SimpleNamespace(read_bytes=total.disk, write_bytes=2 * total.disk)
            for name in names
        }

    def cards(pernic):
        names = ("lo", "eth0", "docker0")
        return {name: SimpleNamespace(bytes_sent=total.net, bytes_recv=total.net) for name in names}

    monkeypatch.setattr(psutil, "disk_io_counters", disks)
    monkeypatch.setattr(psutil, "net_io_counters", cards)
    sampler = HardwareSampler(["CPU:0"], tmp_path, tmp_path / "nothing")
    sampler.sample()
    total.disk, total.net, clock.seconds = 1000, 500, clock.seconds + 2.0
    found = values(sampler)
    assert found["system.disk.io"] == 3000 and found["system.network.io"] == 500
    total.disk, clock.seconds = 10, clock.seconds + 2.0  # counters that begin again
    assert math.isnan(values(sampler)["system.disk.io"])
    # a container has virtual devices only
    monkeypatch.setattr(hardware, "_DEVICES", tmp_path / "none")
    sampler = HardwareSampler(["CPU:0"], tmp_path, tmp_path / "nothing")
    sampler.sample()
    total.net, clock.seconds = 1500, clock.seconds + 2.0
    assert values(sampler)["system.network.io"] == 2000


def test_what_the_system_hides_is_unknown(monkeypatch, tmp_path, tasks):
    def hides(*arguments, **named):
        raise PermissionError("/proc")

    for name in ("cpu_times", "virtual_memory", "disk_io_counters", "net_io_counters"):
        monkeypatch.setattr(psutil, name, hides)
    for name in ("io_counters", "memory_info"):
        monkeypatch.setattr(psutil.Process, name, hides)
    sampler = HardwareSampler(["CPU:0"], tmp_path, tmp_path / "nothing")
    sampler.sample()
    found = values(sampler)
    known = {name for name, value in found.items() if not math.isnan(value)}
    assert known == {"keras_het.cpu.budget", "keras_het.cpu.throttled", "process.cpu.usage"}


def test_it_does_not_need_tensorflow():
    program = "import sys, keras_het.telemetry.hardware as h; h.HardwareSampler(['CPU:0']).sample()"
    check = "; assert not {'tensorflow', 'keras', 'pynvml'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", program + check], check=True, timeout=120)
