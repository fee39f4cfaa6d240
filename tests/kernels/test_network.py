import pytest
import torch

from gpclml.errors import NonFiniteError, ShapeError
from gpclml.kernels import NetworkMean
from gpclml.kernels.networks import MLP


def test_the_mean_is_the_network():
    network = MLP([3, 5, 1], dtype=torch.float64)
    x = torch.randn(2, 7, 3, dtype=torch.float64)
    mean = NetworkMean(network)(x)
    assert torch.equal(mean, network(x)[..., 0])
    mean.sum().backward()
    assert network[0].weight.grad.abs().max() > 0


def test_one_column_of_inputs():
    assert NetworkMean(MLP([1, 1]))(torch.randn(5)).shape == (5,)


@pytest.mark.parametrize("network", [MLP([3, 2]), torch.nn.Flatten(0), torch.nn.Flatten(1)])
def test_wrong_shapes(network):
    with pytest.raises(ShapeError, match="network output"):
        NetworkMean(network)(torch.randn(7, 3))


def test_non_finite_output():
    with pytest.raises(NonFiniteError, match="1 non-finite of 2"):
        NetworkMean(torch.nn.Identity())(torch.tensor([[1.0], [torch.nan]]))
