import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from gpclml import Laplace

digits = load_digits()
x, y = torch.tensor(digits.images).float().unsqueeze(1) / 8 - 1, torch.tensor(digits.target)
torch.manual_seed(0)
order = torch.randperm(len(x))
x, y = x[order], y[order]
network = nn.Sequential(
    nn.Conv2d(1, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
    nn.Flatten(), nn.Linear(128, 10),
)  # fmt: skip
loader = DataLoader(TensorDataset(x[:1000], y[:1000]), batch_size=100, shuffle=True)
optimizer = torch.optim.Adam(network.parameters(), lr=1e-2)
for _ in range(15):
    for batch_x, batch_y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(batch_x), batch_y).backward()
        optimizer.step()

posterior = Laplace(network.eval(), "classification")
posterior.fit(loader, validation=(x[1000:1200], y[1000:1200]), progress=False)
probabilities = posterior.predict(x[1200:]).probs
alone = posterior.predict(x[1200:], "mode").probs

for name, p in (("network alone", alone), ("posterior", probabilities)):
    loss = -p[torch.arange(len(p)), y[1200:]].log().mean()
    print(f"{name}: log loss {loss:.2f}, accuracy {(p.argmax(-1) == y[1200:]).float().mean():.2f}")
