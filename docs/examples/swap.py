import gpytorch
import numpy as np
import torch
from gpytorch.mlls import ExactMarginalLogLikelihood
from scipy.ndimage import rotate
from sklearn.datasets import load_digits
from torch.nn import Linear, ReLU, Sequential

from gpclml.mlls import ConditionalMarginalLogLikelihood


class DeepKernelGP(gpytorch.models.ExactGP):
    def __init__(self, x, y, likelihood):
        super().__init__(x, y, likelihood)
        self.network = Sequential(Linear(64, 50), ReLU(), Linear(50, 50), ReLU(), Linear(50, 2))
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())
    def forward(self, x):
        covar = self.covar_module(self.network(x))
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), covar)


angles = np.random.default_rng(0).uniform(-45, 45, 800)
images = [
    rotate(image, angle, reshape=False, order=1)
    for image, angle in zip(load_digits().images, angles, strict=False)
]
x, y = torch.tensor(np.reshape(images, (800, 64)) / 16), torch.tensor(angles / 45)
x, new_x, y, new_y = x[:400], x[400:], y[:400], y[400:]

for objective in (ExactMarginalLogLikelihood, ConditionalMarginalLogLikelihood):
    torch.manual_seed(0)
    likelihood = gpytorch.likelihoods.GaussianLikelihood().double()
    model = DeepKernelGP(x, y, likelihood).double()
    mll = objective(likelihood, model)  # the line that changes
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(300):
        optimizer.zero_grad()
        loss = -mll(model(x), y)
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        error = 45 * (model(new_x).mean - new_y).square().mean().sqrt()
    print(f"{objective.__name__}: off by {error:.1f} degrees on new images")
