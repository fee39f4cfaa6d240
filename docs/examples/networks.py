import torch
from gpytorch.likelihoods import SoftmaxLikelihood
from sklearn.datasets import load_digits

from gpclml.curvature import GaussianWeightPrior, Kronecker
from gpclml.fit import fit_online
from gpclml.mlls import LaplaceMarginalLogLikelihood
from gpclml.models import LinearizedNetwork

digits = load_digits()
inputs, labels = torch.tensor(digits.data).float() / 16, torch.tensor(digits.target)
x, y = inputs[:600], labels[:600]
for width in (8, 64):
    torch.manual_seed(0)
    network = torch.nn.Sequential(
        torch.nn.Linear(64, width), torch.nn.ReLU(), torch.nn.Linear(width, 10)
    )
    prior = GaussianWeightPrior(network, by="layer")
    likelihood = SoftmaxLikelihood(num_classes=10, mixing_weights=False)
    model = LinearizedNetwork(network, prior)
    mll = LaplaceMarginalLogLikelihood(likelihood, model, len(x), Kronecker())
    fit = fit_online(mll, x, y, epochs=60, every=5, lr=1e-2, progress=False)
    with torch.no_grad():
        accuracy = (network(inputs[600:]).argmax(-1) == labels[600:]).double().mean()
    evidence = 600 * mll(model(x), y).item()
    print(f"{width} units: Laplace evidence {evidence:.0f} nats, test accuracy {accuracy:.3f}")
