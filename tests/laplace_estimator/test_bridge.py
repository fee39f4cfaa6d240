"""Class probabilities by the Laplace bridge."""

import torch

from gpclml.laplace.calibration import bridged


def test_the_bridge_by_hand():
    torch.manual_seed(0)
    mu, root = 2 * torch.randn(5, 3).double(), torch.randn(5, 3, 3).double()
    sigma, ones = root @ root.mT, torch.ones(3).double()
    for n, probabilities in enumerate(bridged(mu, sigma).probs):
        s = sigma[n] @ ones
        m, v = (
            mu[n] - s * mu[n].sum() / s.sum(),
            (sigma[n] - torch.outer(s, s) / s.sum()).diagonal(),
        )
        alpha = (1 - 2 / 3 + m.exp() / 9 * (-m).exp().sum()) / v
        torch.testing.assert_close(probabilities, alpha / alpha.sum())
    # A Dirichlet distribution whose outputs have been approximated is found again.
    alpha = torch.tensor([2.0, 3.0, 7.0]).double()
    m, C = alpha.log() - alpha.log().mean(), 3
    v = (1 / alpha) * (1 - 2 / C) + (1 / alpha).sum() / C**2
    H = torch.diag(1 / alpha) - (1 / alpha[:, None] + 1 / alpha) / C + (1 / alpha).sum() / C**2
    torch.testing.assert_close(H.diagonal(), v)
    probabilities = bridged(m[None], H[None]).probs[0]
    torch.testing.assert_close(probabilities, alpha / alpha.sum())
