"""Small networks, points and dense curvature that tests share."""

import numpy as np
import torch
from torch.func import functional_call, jacrev

import reference
from gpclml.kernels.networks import MLP

N = 7


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def mlp():
    return MLP([3, 4, 2], torch.nn.Tanh, generator=generator()).double(), (3,)


def cnn(**options):
    torch.manual_seed(0)
    network = torch.nn.Sequential(
        torch.nn.Conv2d(1, 2, 3, **options),
        torch.nn.ReLU(inplace=True),
        torch.nn.Conv2d(2, 3, 2, stride=2, bias=False),
        torch.nn.Flatten(),
        torch.nn.LazyLinear(2),
    )
    network(torch.zeros(1, 1, 6, 6))
    return network.double(), (1, 6, 6)


def padded():
    return cnn(padding=1)


def same():
    return cnn(padding="same", dilation=2)


NETWORKS = [mlp, cnn, padded, same]


def train(network, loss, steps=150, lr=0.01):
    """The network after so many steps of Adam."""
    optimizer = torch.optim.Adam(network.parameters(), lr)
    for _ in range(steps):
        optimizer.zero_grad()
        loss(network).backward()
        optimizer.step()
    optimizer.zero_grad()
    return network.eval()


def jacobian(network, x, names=None):
    """Gradients of all outputs, ``(N, C, P)``, with respect to some parameters, all if None."""
    named = {k: p.detach() for k, p in network.named_parameters() if names is None or k in names}
    gradients = jacrev(lambda p: functional_call(network, p, (x,)))(named)
    return torch.cat([rows.flatten(2) for rows in gradients.values()], dim=-1)


def cholesky_in_long_double(matrix):
    """A reference of 80-bit arithmetic: errors of its own are far below those of float64."""
    a = matrix.detach().numpy().astype(np.longdouble)
    for k in range(len(a)):
        a[k, k] = np.sqrt(a[k, k] - a[k, :k] @ a[k, :k])
        a[k + 1 :, k] = (a[k + 1 :, k] - a[k + 1 :, :k] @ a[k, :k]) / a[k, k]
        a[k, k + 1 :] = 0
    return a


def log_det_in_long_double(matrix):
    return 2 * float(np.log(np.diag(cholesky_in_long_double(matrix))).sum())


def covariance_in_long_double(precision, rows):
    """``rows precision⁻¹ rowsᵀ``."""
    factor = cholesky_in_long_double(precision)
    solved = rows.detach().numpy().astype(np.longdouble).T
    for k in range(len(factor)):
        solved[k] = (solved[k] - factor[k, :k] @ solved[:k]) / factor[k, k]
    return torch.tensor((solved.T @ solved).astype(np.float64))


def check_twelve_digits(covariance, expected):
    """Relative to the largest entry."""
    assert float((covariance - expected).abs().max() / expected.abs().max()) < 1e-12


def check_sample_covariance(draws, covariance, most=0.12):
    """Draws ``(count, n)`` against their covariance, relative to the standard deviations."""
    size = covariance.diagonal().sqrt()
    error = (torch.cov(draws.mT) - covariance) / torch.outer(size, size)
    assert float(error.abs().max()) < most


def points(event, n=N, seed=1):
    return torch.randn(n, *event, generator=generator(seed), dtype=torch.float64)


def softmax_columns(outputs):
    """S with S Sᵀ the Hessian of the negative log-likelihood; column k as a row."""
    p = outputs.softmax(-1)
    eye = torch.eye(p.shape[-1], dtype=p.dtype)
    return p.sqrt().unsqueeze(-1) * (eye - p.unsqueeze(-2))


def precisions(network):
    names = [name for name, _ in network.named_parameters()]
    return {name: torch.tensor(0.3 + 0.4 * i).double() for i, name in enumerate(names)}


def dense(network, x, columns=softmax_columns):
    return reference.weight_curvature(network, x, columns(network(x)).detach())


def ratio(H, delta, sizes, keep=None):
    diagonal = torch.cat([delta[name].expand(size) for name, size in sizes.items()])
    H = H if keep is None else H * keep
    return torch.logdet(H + torch.diag(diagonal)) - diagonal.log().sum()


def sizes_of(network):
    return {name: p.numel() for name, p in network.named_parameters()}


def mask(sizes, group):
    groups = [group(name) for name, size in sizes.items() for _ in range(size)]
    return torch.tensor([[float(a == b) for b in groups] for a in groups]).double()


def layer(name):
    return name.rpartition(".")[0]
