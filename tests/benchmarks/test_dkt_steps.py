"""Steps of a few-shot training: ours takes that of the published code, in other time."""

from __future__ import annotations

import pytest
import torch

from benchmarks.dkt import steps
from gpclml.errors import ArgumentError
from gpclml.meta import ImageTasks


def tasks():
    images = torch.rand(60, 1, 16, 16, generator=torch.Generator().manual_seed(0))
    return ImageTasks(images, torch.arange(6).repeat_interleave(10), shots=1, queries=3)


@pytest.mark.filterwarnings("ignore:The input matches the stored training data")
@pytest.mark.parametrize("kernel", ["linear", "rbf"])
def test_both_ways_start_at_the_same_loss(kernel, monkeypatch):
    """Way by way has no noise of .1 at the start, which is given to it here."""
    plain = steps._Way.__init__

    def with_our_noise(self, kernel):
        plain(self, kernel)
        self.likelihood.noise = 0.1

    monkeypatch.setattr(steps._Way, "__init__", with_our_noise)
    source = tasks()
    ours, theirs = steps._our_step(source, kernel, 0), steps._plain_step(source, kernel, True)
    assert ours() == pytest.approx(theirs(), rel=1e-3)
    assert ours() != ours()  # parameters have moved


@pytest.mark.filterwarnings("ignore:The input matches the stored training data")
def test_a_row_a_method():
    table = steps.measure_steps("cosine", shots=1, images=16, rounds=2)
    assert list(table["step"]) == [
        "way by way, with scores", "way by way", "ours, LML", "ours, CLML"
    ]  # fmt: skip
    assert (table["milliseconds"] > 0).all()
    assert table["speedup"][0] == 1
    with pytest.raises(ArgumentError, match="rounds"):
        steps.measure_steps(rounds=0)
