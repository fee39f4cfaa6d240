"""# A network that knows what it does not know

A trained network is certain everywhere, even where it has seen no data. `Laplace` adds the
uncertainty of the weights to the predictions of a trained network, in two lines; the precisions of
its prior maximize the evidence.
"""

# %%
# ## A network, trained as one trains networks
#
# The data leave a gap in the middle.
import matplotlib.pyplot as plt
import torch

generator = torch.Generator().manual_seed(0)
x = torch.rand(160, 1, generator=generator) * 2
x = torch.where(x < 1, x - 3, x)
y = (2 * x).sin() + 0.15 * torch.randn(160, 1, generator=generator)
x, y, held_out = x[:120], y[:120], (x[120:], y[120:])
torch.manual_seed(0)
network = torch.nn.Sequential(
    torch.nn.Linear(1, 50), torch.nn.Tanh(), torch.nn.Linear(50, 50), torch.nn.Tanh(),
    torch.nn.Linear(50, 1),
)  # fmt: skip
optimizer = torch.optim.Adam(network.parameters(), lr=5e-3)
for _ in range(600):
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(network(x), y).backward()
    optimizer.step()

# %%
# ## Its posterior
from gpclml import Laplace

posterior = Laplace(network.eval(), "regression", weights="all", structure="full")
posterior.fit((x, y), validation=held_out, progress=False)

# %%
# ## Wide where there are no data
at = torch.linspace(-4, 3, 300)[:, None]
predicted = posterior.predict(at)
mean, deviation = predicted.mean.squeeze(), predicted.stddev.squeeze()
fig, axes = plt.subplots(figsize=(8, 3.5), layout="constrained")
axes.fill_between(at[:, 0], mean - 2 * deviation, mean + 2 * deviation, alpha=0.3, label="95 %")
axes.plot(at[:, 0], mean, label="network")
axes.plot(x[:, 0], y[:, 0], "k.", ms=4, label="data")
axes.set(xlabel="x", ylim=(-6, 6))
axes.legend(ncols=3, frameon=False)
near = ((at > -3) & (at < -2) | (at > 1) & (at < 2))[:, 0]
print(f"deviation near the data {float(deviation[near].mean()):.2f}, the noise is 0.15")
print(f"deviation away from them {float(deviation[~near].mean()):.2f}")
print(f"factor of the covariance that validation chose: {posterior.covariance_scale:.2g}")
