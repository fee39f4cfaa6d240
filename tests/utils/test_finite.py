from __future__ import annotations

import pytest
import torch

from gpclml._utils.finite import all_finite


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_one_bad_value_is_found(bad):
    values = torch.randn(3, 4, generator=torch.Generator().manual_seed(0), requires_grad=True)
    assert all_finite(values)
    with torch.no_grad():
        values[1, 2] = bad
    assert not all_finite(values)
    with torch.no_grad():
        values[2, 0] = -bad
    assert not all_finite(values)


def test_finite_values_whose_sum_is_not():
    assert all_finite(torch.full((3,), 3e38))
    assert all_finite(torch.empty(0))
