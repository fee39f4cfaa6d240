from __future__ import annotations

import pytest
import torch

from gpclml.kernels import CosineSimilarityKernel


def points(n, d=3, batch=(), seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*batch, n, d, generator=generator, dtype=torch.float64)


def test_it_is_the_cosine():
    x, z = points(4, batch=(2,)), points(5, batch=(2,), seed=1)
    expected = torch.nn.functional.cosine_similarity(x.unsqueeze(-2), z.unsqueeze(-3), dim=-1)
    torch.testing.assert_close(CosineSimilarityKernel()(x, z).to_dense(), expected)


def test_its_diagonal_scale_and_gradient():
    kernel, x = CosineSimilarityKernel(), points(4).requires_grad_()
    torch.testing.assert_close(kernel(x, diag=True), torch.ones(4, dtype=torch.float64))
    torch.testing.assert_close(kernel(7 * x).to_dense(), kernel(x).to_dense())
    assert torch.autograd.gradcheck(lambda x: kernel(x).to_dense(), (x,))


def test_zero_vectors_are_unrelated_to_all():
    x = torch.cat([points(2), torch.zeros(1, 3, dtype=torch.float64)])
    K = CosineSimilarityKernel()(x).to_dense()
    assert torch.equal(K[2], torch.zeros(3, dtype=torch.float64))


def test_columns_as_batch_members():
    with pytest.warns(DeprecationWarning, match="last_dim_is_batch"):  # GPyTorch's own
        K = CosineSimilarityKernel()(points(4), last_dim_is_batch=True).to_dense()
    assert K.shape == (3, 4, 4)
    assert torch.equal(K.abs(), torch.ones(3, 4, 4, dtype=torch.float64))
