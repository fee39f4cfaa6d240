"""Schedules of inverse temperatures."""

from __future__ import annotations

import pytest
import torch

from gpclml.errors import ArgumentError
from gpclml.evidence.sampling import power_schedule


def test_the_schedule():
    schedule = power_schedule(10, power=2.0)
    torch.testing.assert_close(schedule, (torch.arange(11) / 10).double() ** 2, atol=1e-7, rtol=0)
    assert float(schedule[0]) == 0.0
    assert float(schedule[-1]) == 1.0
    with pytest.raises(ArgumentError, match="count: got 0"):
        power_schedule(0)
    with pytest.raises(ArgumentError, match="power: got 0"):
        power_schedule(3, 0)
