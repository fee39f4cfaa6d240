"""Outputs at draws of weights, of layers that PyTorch's transforms have no rules for."""

import pytest
import torch
from torch import nn

from gpclml.curvature.structure import call_with
from gpclml.errors import ModelModeError
from gpclml.evidence.sampling import linearized_outputs, sampled_outputs
from gpclml.kernels import LinearizedMean

N = 4


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.LSTM(3, 3, batch_first=True), nn.Linear(3, 2)

    def forward(self, x):
        return self.head(self.layer(x.unflatten(1, (2, 3)))[0][:, -1])


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(2, 1, 4, batch_first=True)
        self.head = nn.Linear(2, 2)

    def forward(self, x):
        return self.head(self.layer(x.unflatten(1, (3, 2))).mean(1))


class Stopped(nn.Module):
    """No gradient passes the first layer, which forward-mode derivatives do not see."""

    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(6, 3), nn.Linear(3, 2)

    def forward(self, x):
        with torch.no_grad():
            hidden = self.first(x).tanh()
        return self.head(hidden)


def activated():
    return nn.Sequential(nn.Linear(6, 3), nn.PReLU(3), nn.BatchNorm1d(3), nn.Linear(3, 2))


NETWORKS = [activated, Recurrent, Encoder, Stopped]


def setting(make, count):
    torch.manual_seed(0)
    network, x = make().double(), torch.randn(N, 6, dtype=torch.float64)
    network(x)
    named = {name: p.detach() for name, p in network.named_parameters()}
    draws = {name: p + torch.randn(count, *p.shape, dtype=p.dtype) for name, p in named.items()}
    return network.eval(), x, named, draws


@pytest.mark.parametrize("make", NETWORKS)
@pytest.mark.parametrize("count", [3, N])
def test_outputs_at_draws(make, count):
    network, x, _, draws = setting(make, count)
    each = [call_with(network, {k: v[s] for k, v in draws.items()}, x) for s in range(count)]
    torch.testing.assert_close(sampled_outputs(network, draws, x), torch.stack(each).detach())


@pytest.mark.parametrize("make", NETWORKS)
@pytest.mark.parametrize("count", [3, N])
def test_linear_outputs_at_draws(make, count):
    network, x, named, draws = setting(make, count)
    trained = [network.get_parameter(name) for name in named]
    expected = torch.zeros(count, N, 2, dtype=torch.float64)
    for n, point in enumerate(x):
        for c, output in enumerate(network(point.unsqueeze(0))[0]):
            rows = torch.autograd.grad(output, trained, retain_graph=True, materialize_grads=True)
            for (name, p), gradient in zip(named.items(), rows, strict=True):
                expected[:, n, c] += ((draws[name] - p) * gradient).flatten(1).sum(1)
            expected[:, n, c] += output.detach()
    torch.testing.assert_close(linearized_outputs(network, draws, x), expected)


class FirstOutput(nn.Module):
    def __init__(self, network):
        super().__init__()
        self.network = network

    def forward(self, x):
        return self.network(x)[:, :1]


@pytest.mark.parametrize("make", NETWORKS)
def test_the_mean_of_the_linear_model_is_its_output_at_weights_of_zero(make):
    network, x, named, _ = setting(make, 1)
    zeros = {name: torch.zeros_like(p).unsqueeze(0) for name, p in named.items()}
    expected = linearized_outputs(network, zeros, x)[0, :, 0]
    torch.testing.assert_close(LinearizedMean(FirstOutput(network))(x), expected)


@pytest.mark.parametrize("function", [sampled_outputs, linearized_outputs])
def test_networks_in_train_mode(function):
    network, x, _, draws = setting(activated, 2)
    with pytest.raises(ModelModeError, match="BatchNorm1d"):
        function(network.train(), draws, x)


def convolutional():
    return nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.Tanh(), nn.Conv2d(2, 2, 3), nn.Flatten(), nn.Linear(8, 2)
    )


def test_linear_outputs_of_images_at_few_and_at_many_draws():
    """Gradients are shared by many draws; few draws are taken by a derivative for each."""
    torch.manual_seed(0)
    network, x = convolutional().double().eval(), torch.randn(80, 1, 6, 6, dtype=torch.float64)
    named = {name: p.detach() for name, p in network.named_parameters()}
    draws = {name: p + torch.randn(12, *p.shape).to(p) for name, p in named.items()}
    few = [{name: values[s : s + 2] for name, values in draws.items()} for s in range(0, 12, 2)]
    each = torch.cat([linearized_outputs(network, pair, x) for pair in few])
    torch.testing.assert_close(linearized_outputs(network, draws, x), each)
    network.requires_grad_(False)  # gradients of frozen parameters are not available
    torch.testing.assert_close(linearized_outputs(network, draws, x), each)
