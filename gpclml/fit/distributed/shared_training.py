"""A training in several processes, which is checked to be one and the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gpclml._utils.arguments import checked
from gpclml._utils.resuming import ResumableDraws, digest
from gpclml.errors import ArgumentError
from gpclml.fit.distributed._exchange import AGREED
from gpclml.fit.distributed._processes import processes
from gpclml.fit.distributed.averaging import TIMEOUT, averaged, broadcast_parameters
from gpclml.fit.distributed.conditioning import DistributedConditioning

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["SharedTraining"]

_COMPARED = ("seed",)  # by the state of the generator that it started


class SharedTraining:
    """Starts all processes alike, averages their gradients, and refuses where they disagree.

    When it is made all processes get the parameters of rank 0. At the first step and at every
    ``every``-th after it, they compare digests of

    - the targets, and the inputs with the order of the rows;
    - the conditioning: strategies, their seeds, and the state of the generators that they draw
      from, so that all processes make the same draws;
    - the parameters, bit by bit;
    - the settings: classes, modes and plain attributes of all modules, the buffers with which they
      started, the optimizer's settings, and what is given as ``settings``.

    Where one differs, every process raises the same error before any gradient has changed.

    Args:
        mll: The objective, built in every process.
        optimizer: The optimizer, whose settings are compared; None compares none.
        data: Inputs and, as the last, targets. The training data of an exact GP,
            ``mll.model.train_inputs`` and ``train_targets``, if None.
        settings: Whatever else must be the same: numbers, texts and tensors by name.
        every: Steps between comparisons.
        group: Process group; all processes if None.
        timeout: Seconds to wait for the other processes in each exchange.

    Raises:
        ArgumentError: ``every`` is below 1, no data are given or known, or as
            :func:`average_gradients`.
        LostWorkerError, ShapeError: As :func:`broadcast_parameters`.

    Note:
        Digests travel in the message by which :func:`average_gradients` finds lost processes, 48
        bytes more a process. At a comparison the parameters are copied to the host, at the others
        nothing is read. Data are digested again only after they have changed. In one process
        nothing is compared.

        Parameters stay equal bit by bit where processors of one kind compute the optimizer's
        step; machines of several kinds may round unlike. Leave the others to another group, or
        broadcast the parameters again.

    Examples:
        >>> conditioning = DistributedConditioning(RandomHoldout(0.1))
        >>> mll = ConditionalMarginalLogLikelihood(likelihood, model, conditioning, seed=0)
        >>> optimizer = torch.optim.Adam(mll.parameters(), lr=0.01)
        >>> training = SharedTraining(mll, optimizer)
        >>> for step in range(3):
        ...     optimizer.zero_grad()
        ...     objective = mll(model(train_x), train_y)
        ...     (-objective).backward()
        ...     objective = training.average_gradients(objective)
        ...     optimizer.step()
    """

    @checked
    def __init__(
        self,
        mll: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        data: Sequence[Tensor] | None = None,
        settings: Mapping[str, Any] | None = None,
        every: int = 100,
        group: ProcessGroup | None = None,
        timeout: float = TIMEOUT,
    ) -> None:
        if every < 1:
            raise ArgumentError("every", every, "at least 1")
        self._mll, self._optimizer, self._data = mll, optimizer, data
        self._given = dict(settings or {}, every=every)
        self._every, self._timeout = every, timeout
        self._processes = processes(group)
        self._steps = 0
        self._known: tuple[list[tuple[Tensor, int]], dict[str, str]] = ([], {})
        self._buffers = ""
        self._training_data()
        broadcast_parameters(mll, group=group, timeout=timeout)
        if self._processes.size > 1:
            # Those of normalizations go on by themselves, and may round unlike.
            self._buffers = digest(dict(mll.named_buffers()))

    def average_gradients(self, value: Tensor | None = None) -> Tensor | None:
        """Replaces each gradient by its mean over the processes, between backward and step.

        Args:
            value: The objective of this process, of any shape.

        Returns:
            Its mean over the processes, detached; None if none is given.

        Raises:
            ArgumentError: In every process, if they disagree in ``targets``, ``order``,
                ``conditioning``, ``parameters`` or ``settings``, which ``argument`` names, or are
                at other steps. No gradient is changed.
            LostWorkerError, ShapeError: As :func:`average_gradients`.
        """
        agreed = {"step": self._steps + 1}
        if self._processes.size > 1 and self._steps % self._every == 0:
            agreed |= {name: int(text[:14], 16) for name, text in self._digests().items()}
        mean = averaged(self._mll.parameters(), value, self._processes, self._timeout, agreed)
        self._steps += 1
        return mean

    def _digests(self) -> dict[str, str]:
        found = {
            **self._digests_of_data(),
            "conditioning": digest([_draws(part) for part in self._mll.modules()]),
            "parameters": digest(_flat(list(self._mll.parameters()))),
            "settings": digest(
                [
                    {name: _plain(part) for name, part in self._mll.named_modules()},
                    self._buffers,
                    _optimizer_settings(self._optimizer),
                    self._given,
                ]
            ),
        }
        assert found.keys() == AGREED.keys() - {"step"}
        return found

    def _training_data(self) -> list[Tensor]:
        if self._data is not None:
            return list(self._data)
        model: Any = getattr(self._mll, "model", None)
        inputs = getattr(model, "train_inputs", None)
        targets = getattr(model, "train_targets", None)
        if inputs is None or not isinstance(targets, Tensor):
            raise ArgumentError(
                "data", None, "training data in mll.model, or inputs and targets",
                "Pass data=(train_x, train_y).",
            )  # fmt: skip
        return [*inputs, targets]

    def _digests_of_data(self) -> dict[str, str]:
        """Those of before where the tensors are the same and were not changed since."""
        tensors = self._training_data()
        before, found = self._known
        same = len(before) == len(tensors) and all(
            old is new and version == new._version
            for (old, version), new in zip(before, tensors, strict=True)
        )
        if not same:
            found = {
                "targets": digest(tensors[-1].detach().flatten().sort().values),
                "order": digest(tensors),
            }
            self._known = [(tensor, tensor._version) for tensor in tensors], found
        return found


def _draws(module: torch.nn.Module) -> list[Any]:
    """What decides the draws of an objective, the same for every rank."""
    if not isinstance(module, ResumableDraws):
        return []
    strategy = getattr(module, "conditioning", None)
    if isinstance(strategy, DistributedConditioning):
        strategy = [strategy.conditioning, strategy.num_replicas]
    return [strategy, module.get_extra_state()]


def _flat(tensors: list[Tensor]) -> list[Tensor]:
    """Entries of all tensors of a dtype in one, which is copied to the host at once."""
    kinds = dict.fromkeys((tensor.dtype, tensor.device) for tensor in tensors)
    return [
        torch.cat([t.detach().reshape(-1) for t in tensors if (t.dtype, t.device) == kind])
        for kind in kinds
    ]


def _plain(module: torch.nn.Module) -> list[Any]:
    plain = {
        name: value
        for name, value in vars(module).items()
        if name[0] != "_"
        and name not in _COMPARED
        and isinstance(value, (bool, int, float, str, type(None)))
    }
    trained = [name for name, p in module.named_parameters(recurse=False) if p.requires_grad]
    return [type(module).__qualname__, plain, trained]


def _optimizer_settings(optimizer: torch.optim.Optimizer | None) -> list[Any]:
    if optimizer is None:
        return []
    groups = [
        {name: value for name, value in group.items() if name != "params"}
        | {"shapes": [tuple(parameter.shape) for parameter in group["params"]]}
        for group in optimizer.param_groups
    ]
    return [type(optimizer).__qualname__, groups]
