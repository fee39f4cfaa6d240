"""Objectives are of models in train mode, whose output is their prior."""

from __future__ import annotations

import torch

from gpclml.errors import ModelModeError

__all__ = ["check_train_mode"]


def check_train_mode(model: torch.nn.Module) -> None:
    """Refuses a model whose output is its posterior.

    Raises:
        ModelModeError: It is in eval mode.
    """
    if not model.training:
        raise ModelModeError(
            "model",
            "a model in eval mode, whose output is its posterior",
            "a model in train mode",
            "Call model.train() before the objective; for scores of a fitted model use "
            "gpclml.scores.",
        )
