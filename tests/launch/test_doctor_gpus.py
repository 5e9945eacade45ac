"""What the doctor says of each card."""

from __future__ import annotations

import dataclasses
import sys

import pytest
from doctor_facts import A100, GTX_750, WITH_GPU, found, having
from fake_nvml import FakeNvml
from fake_nvml import Gpu as FakeGpu

from keras_het.launch.doctor.facts import NOTE, list_gpus
from keras_het.launch.doctor.tensorflow_facts import TensorFlowFacts


def listed(monkeypatch, module):
    monkeypatch.setitem(sys.modules, "pynvml", module)
    given = having(WITH_GPU, **list_gpus())
    assert module.opened == 0
    return given


def test_each_card_is_named(monkeypatch):
    module = FakeNvml(
        FakeGpu("H100", "GPU-a", capability=(9, 0)),
        FakeGpu("V100", "GPU-b", (FakeGpu(uuid="MIG-1"),), capability=(7, 0)),
    )
    given = listed(monkeypatch, module)
    (driver,) = found(given, "driver")
    assert "driver 550.54.14 answers" in driver.text and "for CUDA up to 12.4" in driver.text
    assert "TensorFlow is built for CUDA 12.5.1" in driver.text
    first, second = (finding.text for finding in found(given, "cards"))
    assert first == "GPU 0: H100, compute capability 9.0, 40 GiB."
    assert second.endswith("7.0, 40 GiB, divided into 1 parts (MIG).")


def test_a_driver_that_says_little():
    unknown = dataclasses.replace(GTX_750, capability=(0, 0))
    given = having(WITH_GPU, gpus=(unknown,), tensorflow=TensorFlowFacts())
    (driver,), (card,) = found(given, "driver"), found(given, "cards")
    assert driver.text == "NVIDIA's driver 550.54 answers (NVML); GPUs: 1."
    assert "compute capability unknown" in card.text


@pytest.mark.parametrize(
    ("capabilities", "is_told"),
    [([(8, 0), (7, 5)], True), ([(8, 0), (9, 0)], False), ([(8, 0), (0, 0)], False)],
)
def test_cards_of_which_some_have_tensor_float_32(capabilities, is_told):
    gpus = [
        dataclasses.replace(A100, index=index, name=f"card {index}", capability=capability)
        for index, capability in enumerate(capabilities)
    ]
    said = found(having(WITH_GPU, gpus=tuple(gpus)), "tensor_float_32")
    assert [each.level for each in said] == [NOTE] * is_told
    for each in said:
        assert "on GPU 0 (card 0), and not on GPU 1 (card 1)" in each.text and "1e-3" in each.text
        assert "enable_tensor_float_32_execution(False)" in each.fix
