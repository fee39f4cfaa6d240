from __future__ import annotations

import pytest
import torch

import reference
from gpclml.linalg import DenseCovariance


@pytest.mark.parametrize("held_out", [[0], [4, 1], [6, 0, 3], [3, 1, 0, 2, 6, 5, 4]])
def test_moments_are_those_of_explicit_conditionals(held_out):
    K, r = reference.random_covariance(7), reference.random_residual(7)
    mean, variance = DenseCovariance(K).leave_one_out(r, torch.tensor(held_out))
    for place, i in enumerate(held_out):
        expected_mean, expected = reference.conditional_moments(K, r, torch.tensor([i]))
        torch.testing.assert_close(mean[place], expected_mean[0], rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(variance[place], expected[0, 0], rtol=1e-10, atol=1e-10)


def test_densities_are_those_of_blocks_of_one():
    K, r = reference.random_covariance(9, (2,)), reference.random_residual(9, (2,))
    held_out = torch.tensor([8, 2, 5])
    mean, variance = DenseCovariance(K).leave_one_out(r, held_out)
    densities = torch.distributions.Normal(mean, variance.sqrt()).log_prob(r[..., held_out])
    expected = DenseCovariance(K).block_log_densities(r, [held_out.unsqueeze(-1)])
    torch.testing.assert_close(densities, expected, rtol=1e-10, atol=1e-10)


def test_a_batch_is_a_stack_of_singles_and_float32_near_float64():
    K, r = reference.random_covariance(600, (2,)), reference.random_residual(600, (2,))
    held_out = torch.arange(100, 200)
    together = DenseCovariance(K).leave_one_out(r, held_out)
    alone = [DenseCovariance(K[i]).leave_one_out(r[i], held_out) for i in range(2)]
    single = DenseCovariance(K.float()).leave_one_out(r.float(), held_out)
    for kind in range(2):
        stacked = torch.stack([one[kind] for one in alone])
        torch.testing.assert_close(together[kind], stacked)
        assert single[kind].dtype == torch.float32
        torch.testing.assert_close(single[kind].double(), stacked, rtol=2e-3, atol=2e-3)
