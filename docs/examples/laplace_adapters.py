import torch
from torch import nn

from gpclml import Laplace


# fmt: off
class Adapted(nn.Module):
    """A frozen linear layer and a trained product of two thin matrices (LoRA)."""
    def __init__(self, layer):
        super().__init__()
        self.base_layer = layer.requires_grad_(False)
        self.lora_A = nn.Linear(layer.in_features, 2, bias=False)
        self.lora_B = nn.Linear(2, layer.out_features, bias=False)
    def forward(self, x):
        return self.base_layer(x) + self.lora_B(self.lora_A(x))


class Classifier(nn.Module):
    """A transformer that is called and answers as those of Hugging Face."""
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, 16).requires_grad_(False)
        self.encoder = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True)
        self.encoder.requires_grad_(False)
        self.score = Adapted(nn.Linear(16, 2))
    def forward(self, input_ids, attention_mask):
        padding = attention_mask == 0
        hidden = self.encoder(self.embedding(input_ids), src_key_padding_mask=padding)
        mask = attention_mask.unsqueeze(-1)
        return {"logits": self.score((mask * hidden).sum(1) / mask.sum(1))}
# fmt: on


torch.manual_seed(0)
network, batches = Classifier(), []
for length in (5, 9, 7, 12):  # each batch as long as its longest sequence
    ids = torch.randint(0, 50, (50, length))
    mask = (torch.arange(length) < torch.randint(2, length + 1, (50, 1))).long()
    labels = ((ids * mask).sum(1) / mask.sum(1) > 25).long()
    batches.append({"input_ids": ids, "attention_mask": mask, "labels": labels})

optimizer = torch.optim.Adam([p for p in network.parameters() if p.requires_grad], lr=0.02)
for _ in range(100):
    for batch in batches[:3]:
        inputs = {k: v for k, v in batch.items() if k != "labels"}
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(**inputs)["logits"], batch["labels"]).backward()
        optimizer.step()

posterior = Laplace(network.eval(), "classification").fit(batches[:3], progress=False)
probabilities = posterior.predict(batches[3]).probs
right = probabilities.argmax(-1) == batches[3]["labels"]
print(f"weights in the posterior: {', '.join(posterior.names)}")
print(f"accuracy {right.float().mean():.2f}")
