"""What `keras-het doctor` says of each card, and of what joins them."""

from __future__ import annotations

import dataclasses
import sys

import pytest
from doctor_facts import A100, GTX_750, WITH_GPU, having
from fake_nvml import FakeNvml
from fake_nvml import Gpu as FakeGpu

from keras_het.launch.doctor.examination import report_on, run_checks
from keras_het.launch.doctor.facts import NOTE, OK, Facts, Finding, list_gpus
from keras_het.launch.doctor.gpu_links import GpuLink
from keras_het.launch.doctor.links import Measurement

READ, NVLINK = 0, 2
ALLOWED, NOT_SUPPORTED = 0, 5


def found(given: Facts, check: str) -> list[Finding]:
    return [finding for finding in run_checks(given) if finding.check == check]


def listed(monkeypatch: pytest.MonkeyPatch, module: FakeNvml) -> Facts:
    monkeypatch.setitem(sys.modules, "pynvml", module)
    given = having(WITH_GPU, **list_gpus())
    assert module.opened == 0
    return given


def two(
    monkeypatch: pytest.MonkeyPatch, ancestor: int | None, peers: dict[int, int]
) -> tuple[GpuLink, Finding]:
    """The link between two cards without NVLinks of their own, and what is said of it."""
    module = FakeNvml(
        FakeGpu(uuid="GPU-a", bus=1),
        FakeGpu(uuid="GPU-b", bus=2),
        ancestors={} if ancestor is None else {(1, 2): ancestor},
        peers={(1, 2, about): status for about, status in peers.items()},
    )
    given = listed(monkeypatch, module)
    (link,), (said,) = given.gpu_links, found(given, "gpu_links")
    return link, said


def test_each_card_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    module = FakeNvml(
        FakeGpu("H100", "GPU-a", capability=(9, 0), bus=1),
        FakeGpu("V100", "GPU-b", (FakeGpu(uuid="MIG-1"),), capability=(7, 0), bus=2),
    )
    given = listed(monkeypatch, module)
    (driver,) = found(given, "driver")
    assert "driver 550.54.14 answers" in driver.text and "for CUDA up to 12.4" in driver.text
    assert "TensorFlow is built for CUDA 12.5.1" in driver.text
    first, second = (finding.text for finding in found(given, "cards"))
    assert first == "GPU 0: H100, compute capability 9.0, 40 GiB."
    assert second.endswith("7.0, 40 GiB, divided into 1 parts (MIG).")
    # parts of a GPU are joined with nothing
    assert given.gpu_links == ()


def test_a_driver_that_says_little() -> None:
    unknown = dataclasses.replace(GTX_750, capability=(0, 0))
    given = having(WITH_GPU, gpus=(unknown,), tensorflow=None)
    (driver,), (card,) = found(given, "driver"), found(given, "cards")
    assert driver.text == "NVIDIA's driver 550.54 answers (NVML); GPUs: 1."
    assert "compute capability unknown" in card.text


@pytest.mark.parametrize(
    ("capabilities", "is_told"),
    [([(8, 0), (7, 5)], True), ([(8, 0), (9, 0)], False), ([(8, 0), (0, 0)], False)],
)
def test_cards_of_which_some_have_tensor_float_32(
    capabilities: list[tuple[int, int]], is_told: bool
) -> None:
    gpus = [
        dataclasses.replace(A100, index=index, name=f"card {index}", capability=capability)
        for index, capability in enumerate(capabilities)
    ]
    said = found(having(WITH_GPU, gpus=tuple(gpus)), "tensor_float_32")
    assert [each.level for each in said] == [NOTE] * is_told
    for each in said:
        assert "on GPU 0 (card 0), and not on GPU 1 (card 1)" in each.text and "1e-3" in each.text
        assert "enable_tensor_float_32_execution(False)" in each.fix


def test_direct_nvlinks_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    module = FakeNvml(
        FakeGpu(uuid="GPU-a", bus=1, nvlinks=(2, None, 2, 3)),
        FakeGpu(uuid="GPU-b", bus=2, nvlinks=(1, 1, 3, 3)),
        FakeGpu(uuid="GPU-c", bus=3, nvlinks=(1, 2, 2)),
    )
    given = listed(monkeypatch, module)
    assert given.gpu_links == (
        GpuLink(0, 1, "NVLink (2 direct)", True),
        GpuLink(0, 2, "NVLink (1 direct)", True),
        GpuLink(1, 2, "NVLink (2 direct)", True),
    )
    first, second = found(given, "gpu_links")
    assert first.text == ("Between GPUs 0 and 1, 1 and 2: NVLink (2 direct). NCCL copies directly.")
    assert "0 and 2: NVLink (1 direct)" in second.text and second.level == OK


def test_nvlinks_that_end_in_a_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    switch = 9
    module = FakeNvml(
        *(FakeGpu(uuid=f"GPU-{bus}", bus=bus, nvlinks=(switch,) * 18) for bus in (1, 2)),
        peers={(1, 2, NVLINK): ALLOWED},
    )
    given = listed(monkeypatch, module)
    assert given.gpu_links == (GpuLink(0, 1, "NVLink, by switches", True),)


@pytest.mark.parametrize(
    ("ancestor", "way"),
    [(0, "on one board"), (10, "by one switch"), (20, "by several switches")],
)
def test_pcie_without_a_cpu_between(
    monkeypatch: pytest.MonkeyPatch, ancestor: int, way: str
) -> None:
    link, said = two(monkeypatch, ancestor, {NVLINK: NOT_SUPPORTED, READ: ALLOWED})
    assert link == GpuLink(0, 1, f"PCIe, {way}", True)
    assert said.level == OK and said.text.endswith(f"PCIe, {way}. NCCL copies directly.")


@pytest.mark.parametrize(
    ("ancestor", "way"), [(30, "the host bridge"), (40, "two host bridges"), (50, "CPU sockets")]
)
def test_pcie_through_a_cpu(monkeypatch: pytest.MonkeyPatch, ancestor: int, way: str) -> None:
    link, said = two(monkeypatch, ancestor, {READ: ALLOWED})
    assert link.by_cpu and link.copies and way in link.way
    assert said.level == NOTE and "host's memory on most CPUs" in said.text
    assert "NCCL_P2P_LEVEL" in said.fix


def test_cards_between_which_the_driver_allows_no_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    link, said = two(monkeypatch, 10, {READ: NOT_SUPPORTED})
    assert link.copies is False and said.level == NOTE
    assert "allows no direct copies, so NCCL goes through the host's memory" in said.text


def test_an_old_driver_that_cannot_be_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    link, said = two(monkeypatch, None, {})
    assert link == GpuLink(0, 1, "unknown")
    assert said.text == (
        "Between GPUs 0 and 1: unknown. The driver does not say whether they can copy directly."
    )


def test_links_are_in_the_report_for_programs() -> None:
    given = having(WITH_GPU, gpus=(A100, GTX_750), gpu_links=(GpuLink(0, 1, "unknown"),))
    report = report_on(given, run_checks(given), Measurement()).to_dict()
    assert report["gpu_links"] == [
        {"first": 0, "second": 1, "way": "unknown", "copies": None, "by_cpu": False}
    ]
