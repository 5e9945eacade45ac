"""The peer of overlap.py: its models in PyTorch, under DistributedDataParallel over gloo.

Runs in an environment that has torch and nothing of TensorFlow's.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import time
from typing import Any

import torch
from torch import nn
from torch.distributed import destroy_process_group, init_process_group

BATCHES = {"mlp": (800, 64), "convnet": (24, 3, 32, 32), "transformer": (8, 32, 256)}


class Block(nn.Module):
    """One block of the transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(256, 4, batch_first=True)
        self.wide = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256))
        self.norms = nn.ModuleList(nn.LayerNorm(256) for _ in range(2))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        mixed, _ = self.attention(values, values, values, need_weights=False)
        values = self.norms[0](values + mixed)
        return self.norms[1](values + self.wide(values))


def build(case: str) -> nn.Module:
    """Return the model that overlap.py builds with Keras."""
    if case == "mlp":
        sizes = (64, 1024, 1024, 1024)
        inner = [nn.Sequential(nn.Linear(*pair), nn.ReLU()) for pair in itertools.pairwise(sizes)]
        return nn.Sequential(*inner, nn.Linear(1024, 1))
    if case == "convnet":
        filters = (3, 32, 64, 128, 256)
        inner = [
            nn.Sequential(nn.Conv2d(*pair, 3, padding="same"), nn.ReLU(), nn.MaxPool2d(2))
            for pair in itertools.pairwise(filters)
        ]
        head = [nn.Flatten(), nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 1400), nn.ReLU()]
        return nn.Sequential(*inner, *head, nn.Linear(1400, 1))
    return nn.Sequential(*[Block() for _ in range(4)], nn.Flatten(), nn.Linear(32 * 256, 1))


def train(case: str, megabytes: float, num_steps: int, warm_up: int) -> dict[str, float]:
    """Train as the worker that TF_CONFIG names, or alone without one.

    Returns:
        The median `seconds` of a step after the first ones, the `bytes` of the gradients, and the
        samples of a `batch`.
    """
    torch.set_num_threads(1)
    model = build(case)
    size = sum(4 * each.numel() for each in model.parameters())
    trained: Any = model
    has_others = bool(os.environ.get("TF_CONFIG"))
    if has_others:
        about = json.loads(os.environ["TF_CONFIG"])
        addresses = about["cluster"]["worker"]
        os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
        rank = about["task"]["index"]
        init_process_group("gloo", f"tcp://{addresses[0]}", world_size=len(addresses), rank=rank)
        trained = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=megabytes)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    x, y = torch.randn(BATCHES[case]), torch.randn(BATCHES[case][0], 1)
    seconds = []
    for _ in range(num_steps):
        began = time.perf_counter()
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(trained(x), y)
        loss.backward()
        optimizer.step()
        loss.item()
        seconds.append(time.perf_counter() - began)
    if has_others:
        destroy_process_group()
    return {"seconds": statistics.median(seconds[warm_up:]), "bytes": size, "batch": len(x)}
