import gpytorch
import torch
from gpytorch.mlls import ExactMarginalLogLikelihood

from gpclml.mlls import ConditionalMarginalLogLikelihood


class MyGP(gpytorch.models.ExactGP):
    def __init__(self, x, y, likelihood):
        super().__init__(x, y, likelihood)
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


torch.manual_seed(0)
x = torch.linspace(0, 6, 80, dtype=torch.float64)
y = x.sin() + 0.2 * torch.randn(80, dtype=torch.float64)

for objective in (ExactMarginalLogLikelihood, ConditionalMarginalLogLikelihood):
    likelihood = gpytorch.likelihoods.GaussianLikelihood().double()
    model = MyGP(x, y, likelihood).double()
    mll = objective(likelihood, model)  # the line that changes
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for _ in range(100):
        optimizer.zero_grad()
        loss = -mll(model(x), y)
        loss.backward()
        optimizer.step()
    noise = likelihood.noise.sqrt().item()
    lengthscale = model.covar_module.base_kernel.lengthscale.item()
    print(f"{objective.__name__}: noise {noise:.2f}, lengthscale {lengthscale:.2f}")
