import math

import torch

from gpclml.conditioning import RandomOrderings
from gpclml.evaluation import (
    conditional_log_marginal_likelihood,
    learning_curve,
    log_marginal_likelihood,
)
from gpclml.evidence.bounds import evidence_bound
from gpclml.evidence.training_speed import training_speed
from gpclml.kernels import FourierFeatures
from gpclml.linalg.gaussians import DiagonalFamily, FullFamily, LowRankFamily
from gpclml.mlls import LinearEvidenceLowerBound
from gpclml.models import BayesianLinearModel

generator = torch.Generator().manual_seed(0)
x = 10 * torch.rand(100, generator=generator, dtype=torch.float64)
y = x.sin() + (9 * x).cos() / 9 + 0.1 * torch.randn(100, generator=generator, dtype=torch.float64)
for degree in (3, 9):
    model = BayesianLinearModel(x, y, FourierFeatures(degree), noise=0.01)
    lml = log_marginal_likelihood(model).item()
    clml = conditional_log_marginal_likelihood(model, RandomOrderings(500, m=85, seed=1)).mean()
    first = learning_curve(model, 100)[:, :15].sum(-1).mean()
    print(
        f"{degree} frequencies: LML {lml:.1f}, of the first 15 points {first:.1f}; CLML {clml:.1f}"
    )

for family in (FullFamily(), DiagonalFamily(), LowRankFamily(1)):
    mll = LinearEvidenceLowerBound(model.likelihood, model, family)
    print(f"ELBO, {type(family).__name__}: {100 * mll(model(x[:, None]), y).item():.1f}")

speed = training_speed(model, 10, seed=2)
print(f"training speed: {speed.expected.value:.1f} <= {speed.multi_sample.value:.1f} <= {lml:.1f}")

# Of 100 coin tosses, 90 of them heads, under a uniform prior clipped to [.05, .95]:
p = torch.linspace(0.05, 0.95, 1001, dtype=torch.float64)
log_evidence = (90 * p.log() + 10 * (1 - p).log()).logsumexp(0) - math.log(1001)
limits = (-math.log(0.95), -math.log(0.05))
bound = evidence_bound(log_evidence, 100, loss_range=limits)
print(f"risk at most {bound.value:.2f} {bound.units}, vacuous: {bool(bound.vacuous)}")
