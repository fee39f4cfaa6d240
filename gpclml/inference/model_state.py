"""Whether a model is still the one that something was computed from."""

from __future__ import annotations

from gpytorch.models import ExactGP
from torch import Tensor

from gpclml.errors import ArgumentError

__all__ = ["ModelState"]


class ModelState:
    """A copy of all that a GP's posterior depends on: parameters, buffers, training data.

    Values are compared, not versions of tensors: GPyTorch's setters write through ``.data``, which
    leaves no trace in a version.

    Args:
        model: The model, which is kept, and copies of its tensors.
    """

    def __init__(self, model: ExactGP) -> None:
        self.model = model
        self._copies = {name: value.detach().clone() for name, value in _tensors(model)}

    def check(self) -> None:
        """Refuses a model that has changed.

        Raises:
            ArgumentError: It has; with the name of what did.

        Note:
            One comparison for each number of the model and its data.
        """
        now = dict(_tensors(self.model))
        changed = [name for name in {**self._copies, **now} if not self._is_same(name, now)]
        if changed:
            raise ArgumentError(
                "model", f"another {changed[0]} than when it was solved for",
                "the parameters and data it had then", "Make a new posterior of the model.",
            )  # fmt: skip

    def _is_same(self, name: str, now: dict[str, Tensor]) -> bool:
        if name not in now or name not in self._copies:
            return False
        old, new = self._copies[name], now[name].detach()
        if (old.shape, old.dtype, old.device) != (new.shape, new.dtype, new.device):
            return False
        same = old == new
        if old.is_floating_point():  # missing targets are NaN
            same |= old.isnan() & new.isnan()
        return bool(same.all())


def _tensors(model: ExactGP) -> list[tuple[str, Tensor]]:
    named = [*model.named_parameters(), *model.named_buffers()]
    for i, inputs in enumerate(model.train_inputs or ()):
        named.append((f"train_inputs[{i}]", inputs))
    if isinstance(model.train_targets, Tensor):
        named.append(("train_targets", model.train_targets))
    return named
