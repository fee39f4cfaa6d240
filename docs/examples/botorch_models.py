import torch
from botorch.acquisition import LogExpectedImprovement
from botorch.fit import fit_gpytorch_mll
from botorch.models import ModelListGP, SingleTaskGP
from botorch.optim import optimize_acqf
from gpytorch.mlls import ExactMarginalLogLikelihood

from gpclml.mlls import ConditionalMarginalLogLikelihood, SumMarginalLogLikelihood
from gpclml.models.botorch import DeepKernelGP

torch.manual_seed(0)
x = torch.rand(20, 2, dtype=torch.float64)
y = -(x - 0.4).square().sum(-1, keepdim=True) + 0.01 * torch.randn(20, 1, dtype=torch.float64)

model = SingleTaskGP(x, y)
fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
bounds = torch.tensor([[0.0, 0.0], [1.0, 1.0]], dtype=torch.float64)
acquisition = LogExpectedImprovement(model, best_f=y.max())
candidate, _ = optimize_acqf(acquisition, bounds, q=1, num_restarts=4, raw_samples=64)
print("next point:", [round(value, 1) for value in candidate.squeeze(0).tolist()])

deep = DeepKernelGP(x, y, feature_share=0.3)
fit_gpytorch_mll(ConditionalMarginalLogLikelihood(deep.likelihood, deep))
batches = torch.rand(5, 3, 2, dtype=torch.float64)  # 5 batches of q = 3 points
print("posterior of batches:", tuple(deep.posterior(batches).mean.shape))
seen_more = deep.condition_on_observations(x[:2] + 0.1, y[:2])
print("points after conditioning:", seen_more.train_targets.shape[-1])

several = ModelListGP(DeepKernelGP(x, y), DeepKernelGP(x, -y))
fit_gpytorch_mll(SumMarginalLogLikelihood(several.likelihood, several))
print("outputs:", several.num_outputs)
