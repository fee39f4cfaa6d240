import torch

from gpclml import MLP, Laplace

torch.manual_seed(0)
area, age = 40 + 160 * torch.rand(300), 60 * torch.rand(300)  # square metres, years
x = torch.stack([area / 200, age / 60], 1)
dollars = 3000 * area - 40 * age**2 + 25_000 * torch.randn(300)
mean, deviation = dollars[:200].mean(), dollars[:200].std()
network = MLP([2, 20, 1])
optimizer = torch.optim.Adam(network.parameters(), lr=0.01)
for _ in range(500):
    optimizer.zero_grad()
    (network(x[:200])[:, 0] - (dollars[:200] - mean) / deviation).square().mean().backward()
    optimizer.step()

units = torch.nn.Linear(1, 1).requires_grad_(False)  # from deviations to dollars
units.load_state_dict({"weight": deviation.reshape(1, 1), "bias": mean.reshape(1)})
posterior = Laplace(
    torch.nn.Sequential(network, units), "regression", weights="all", structure="full"
)
posterior.fit((x[:200], dollars[:200]), progress=False)
predicted = posterior.predict(x[200:])  # a Normal, with noise
inside = (predicted.mean - dollars[200:]).abs() < 1.645 * predicted.stddev
print(f"deviation of the noise {posterior.likelihood.noise.sqrt().item():.0f} dollars")
print(f"new prices in 90 % intervals: {inside.float().mean():.2f}")
evidence = posterior.log_marginal_likelihood(prior_precision=1e-8)  # of other hyperparameters
print(f"log evidence {posterior.log_evidence:.0f}, under another precision {evidence:.0f}")
