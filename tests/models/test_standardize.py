import pytest
import torch

from gpclml.errors import ArgumentError
from gpclml.models import Standardizer


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("shape", "dim"), [((50, 3), -2), ((4, 50, 3), -2), ((300_000, 4), -2), ((50,), -1)]
)
def test_mean_zero_and_deviation_one(shape, dim, dtype):
    values = 5 + 3 * torch.randn(shape, dtype=dtype)
    standardizer = Standardizer.fit(values, dim)
    z = standardizer(values)
    assert z.dtype == dtype
    torch.testing.assert_close(z.mean(dim), torch.zeros_like(z.mean(dim)), atol=1e-5, rtol=0)
    torch.testing.assert_close(z.std(dim), torch.ones_like(z.std(dim)))
    torch.testing.assert_close(standardizer.inverse(z), values)


def test_missing_values_are_left_out():
    values = torch.randn(50, dtype=torch.float64)
    values[::7] = torch.nan
    standardizer = Standardizer.fit(values, -1)
    observed = values[~values.isnan()]
    torch.testing.assert_close(standardizer.offset.item(), observed.mean().item())
    torch.testing.assert_close(standardizer.scale.item(), observed.std().item())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("level", [0.0, 0.1, 1e8, -1e-30])
def test_constant_columns_get_scale_one(level, dtype):
    values = torch.randn(1001, 2, dtype=dtype)
    values[:, 1] = level
    values[::2, 1] *= 1 + torch.finfo(dtype).eps  # rounding is no spread
    standardizer = Standardizer.fit(values, -2)
    assert standardizer.scale[0, 1] == 1
    assert standardizer.scale[0, 0] != 1
    assert standardizer(values)[:, 1].abs().max() <= 200


def test_a_single_value_and_all_missing():
    assert Standardizer.fit(torch.tensor([3.0]), -1).scale == 1
    missing = Standardizer.fit(torch.tensor([torch.nan, torch.nan]), -1)
    assert (missing.offset, missing.scale) == (0, 1)


@pytest.mark.parametrize("scale", [0.0, -1.0, torch.nan])
def test_a_scale_that_is_not_positive_is_refused(scale):
    with pytest.raises(ArgumentError, match="scale: got a scale that is not positive"):
        Standardizer(torch.zeros(1, 2), torch.tensor([[1.0, scale]]))
