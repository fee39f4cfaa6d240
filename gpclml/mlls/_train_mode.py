"""Objectives are of models in train mode, whose output is their prior, and of their targets."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gpclml.errors import ModelModeError

__all__ = ["check_targets", "check_train_mode"]


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
            "gpclml.evaluation.",
        )


def check_targets(model: torch.nn.Module, target: Tensor) -> None:
    """Lets a model refuse targets that are in other units than its output.

    A model that changes the units of its targets has a method ``check_targets(target)`` that
    raises an error; of any other model all targets are taken.

    Args:
        model: Whose output the targets are of.
        target: As they came to the objective.
    """
    check: Callable[[Tensor], None] | None = getattr(model, "check_targets", None)
    if check is not None:
        check(target)
