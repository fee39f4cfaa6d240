"""The networks inside a model."""

from __future__ import annotations

import torch

from gpclml._utils.arguments import checked
from gpclml.kernels import DeepKernel, NetworkMean

__all__ = ["find_networks"]


@checked
def find_networks(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The networks of a model's deep kernels and network means, each once.

    ``gpclml.kernels.networks.reset_network`` draws one anew, e.g. for a restart.

    Args:
        model: Any module, e.g. an ``ExactGP``.

    Returns:
        The networks, in the order of ``model.modules()``.
    """
    networks: dict[int, torch.nn.Module] = {}
    for module in model.modules():
        if isinstance(module, DeepKernel):
            networks.setdefault(id(module.feature_extractor), module.feature_extractor)
        elif isinstance(module, NetworkMean):
            networks.setdefault(id(module.network), module.network)
    return list(networks.values())
