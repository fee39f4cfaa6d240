"""What a GPU has room for: its free memory with what PyTorch keeps, and refusals with figures."""

from __future__ import annotations

import pytest
import torch
from pretended_gpu import GPU, pretended_gpu

from gpclml._utils.environment import available_memory
from gpclml.conditioning import LastPoints
from gpclml.errors import ArgumentError
from gpclml.evaluation import learning_curve
from gpclml.mlls import ConditionalMarginalLogLikelihood
from gpclml.models import GPRegression


def test_what_pytorch_keeps_counts_as_free(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (1000, 5000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device=None: 700)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device=None: 300)
    assert available_memory(GPU) == 1400


def refused_sizes(device, n):
    """A step by a Cholesky factor, and a score without a choice, of more than there is room for."""
    x = torch.rand(n, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x = x.to(device)
    model = GPRegression(x, x.sum(-1))
    mll = ConditionalMarginalLogLikelihood(
        model.likelihood, model, LastPoints(m=0), solver="cholesky"
    )
    needed, dense = 56 * n * n / 2**30, 16 * n * n / 2**30
    with pytest.raises(ArgumentError, match=rf"needs {needed:.1f} GiB.* GiB, what the cuda has"):
        mll(model(x), model.train_targets)
    with pytest.raises(ArgumentError, match=rf"needs {dense:.1f} GiB.* GiB, what the cuda has"):
        learning_curve(model)


def test_sizes_are_refused_with_figures():
    with pretended_gpu():  # of 16 GiB
        refused_sizes(GPU, 40_000)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_sizes_are_refused_with_figures_on_a_gpu():
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    refused_sizes(GPU, 300_000)
    assert torch.cuda.max_memory_allocated() < before + 2**30


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_memory_that_was_given_back_is_there_again():
    size = torch.cuda.get_device_properties(GPU).total_memory // 4
    before = available_memory(GPU)
    block = torch.empty(size, dtype=torch.uint8, device=GPU)
    assert available_memory(GPU) < before - size // 2  # other processes take and give as well
    del block
    assert available_memory(GPU) > before - size // 2
