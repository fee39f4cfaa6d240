"""Training in several processes: held-out blocks are shared out, gradients averaged.

Each process holds the data and the model, scores a block of its own and steps with the mean of all
gradients. One process that averages the objective over the same blocks does the same. ``torchrun``
starts the processes of ``torch.distributed``; without it there is one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gpclml._utils.arguments import check_counts, checked
from gpclml._utils.resuming import ResumableDraws, digest
from gpclml.conditioning import Conditioning, Split
from gpclml.errors import ArgumentError
from gpclml.fit._exchange import AGREED, Exchange, Processes, processes

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = [
    "DistributedConditioning",
    "SharedTraining",
    "average_gradients",
    "broadcast_parameters",
]

_TIMEOUT = 300.0  # seconds
_COMPARED = ("seed",)  # by the state of the generator that it started


@checked
def average_gradients(
    parameters: Iterable[Tensor],
    value: Tensor | None = None,
    *,
    group: ProcessGroup | None = None,
    timeout: float = _TIMEOUT,
) -> Tensor | None:
    """Replaces each gradient by its mean over the processes, between backward and step.

    A gradient that is None counts as zero, and stays None if it is None in every process. There is
    one flattened all-reduce for each dtype. In one process, or without ``torch.distributed``,
    nothing changes. Every process of the group has to call this; otherwise the others fail after
    ``timeout``.

    Args:
        parameters: Parameters in the same order in every process, of any dtypes and devices;
            those that require no gradient are left out.
        value: The objective of this process, of any shape.
        group: Process group; all processes if None.
        timeout: Seconds to wait for the other processes, their slower backward passes
            included.

    Returns:
        The mean of ``value`` over the processes, detached; None if none is given.

    Raises:
        LostWorkerError: If a process ended or did not come within ``timeout``. Parameters and
            gradients are then as before the call. Process groups cannot be used afterwards.
        ShapeError: In every process, if they disagree in number, shapes, dtypes or call.
        ArgumentError: If no parameter requires a gradient, ``timeout`` is not positive, or
            there is no group of which this process is a member.

    Note:
        Beside the all-reduces, one message to the process of rank 0 and back, which finds
        disagreements and lost processes. A process that ends is noticed at once and named; one
        that hangs is named in the process of rank 0. NCCL alone names none: initialize with
        ``"cpu:gloo,cuda:nccl"`` on GPUs.

    Examples:
        >>> conditioning = DistributedConditioning(RandomHoldout(0.1))
        >>> mll = ConditionalMarginalLogLikelihood(likelihood, model, conditioning, seed=0)
        >>> broadcast_parameters(mll)
        >>> optimizer = torch.optim.Adam(mll.parameters(), lr=0.01)
        >>> for step in range(3):
        ...     optimizer.zero_grad()
        ...     objective = mll(model(train_x), train_y)
        ...     (-objective).backward()
        ...     objective = average_gradients(mll.parameters(), objective)
        ...     optimizer.step()
    """
    return _averaged(parameters, value, processes(group), timeout)


def _averaged(
    parameters: Iterable[Tensor],
    value: Tensor | None,
    own: Processes,
    timeout: float,
    agreed: Mapping[str, int] | None = None,
) -> Tensor | None:
    """What :func:`average_gradients` does; ``agreed`` is as for :class:`Exchange`."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if not trained:
        raise ArgumentError("parameters", "none that requires a gradient", "at least one")
    values = [] if value is None else [value.detach()]
    exchange = Exchange(own, timeout, "average_gradients", trained, agreed or {})
    if own.size > 1:
        # Whether a gradient is there at all, as numbers that travel with the gradients.
        given = torch.tensor([p.grad is not None for p in trained]).to(trained[0])
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in trained]
        given, *sums = exchange.sum([given, *gradients, *values])
        means = [total / own.size for total in sums]
        values = means[len(trained) :]
        with torch.no_grad():
            for parameter, mean, count in zip(trained, means, given.tolist(), strict=False):
                if parameter.grad is not None:
                    parameter.grad.copy_(mean)
                elif count:
                    parameter.grad = mean
    return values[0] if values else None


@checked
def broadcast_parameters(
    module: torch.nn.Module,
    source: int = 0,
    *,
    group: ProcessGroup | None = None,
    timeout: float = _TIMEOUT,
) -> None:
    """Gives all processes the parameters of one, so that all start from the same.

    Buffers are not changed. There is one flattened broadcast for each dtype; without
    ``torch.distributed`` nothing changes.

    Args:
        module: A model or objective, built in the same way in every process.
        source: Rank in the group of the process whose parameters all get.
        group: Process group; all processes if None.
        timeout: Seconds to wait for the other processes.

    Raises:
        LostWorkerError: As :func:`average_gradients`; no parameter is changed then.
        ShapeError: The same.
        ArgumentError: If ``source`` is no rank of the group; or as :func:`average_gradients`.
    """
    own = processes(group)
    parameters = list(module.parameters())
    exchange = Exchange(own, timeout, f"broadcast_parameters from rank {source}", parameters)
    if source not in range(own.size):
        raise ArgumentError("source", source, f"a rank from 0 to {own.size - 1}")
    if own.size > 1 and parameters:
        received = exchange.broadcast(parameters, source)
        with torch.no_grad():
            for parameter, values in zip(parameters, received, strict=True):
                parameter.copy_(values)


class DistributedConditioning(Conditioning):
    """Held-out points that differ by process: of as many draws as processes, the rank's own.

    Every process makes the draws of all processes, from objectives of the same seed on the same
    data, and uses that of its rank, so nothing is sent. The mean of the processes' objectives, with
    gradients by :func:`~gpclml.fit.distributed.average_gradients`, is the mean over these draws;
    one process computes it with an objective for each ``rank``.

    Args:
        conditioning: A strategy that draws at random. With a seed of its own the draws of the
            processes differ and are the same at each call.
        num_replicas: Number of draws. The number of processes in the group if None; one where
            ``torch.distributed`` is not initialized.
        rank: Which of the draws is held out, from 0. That of this process in the group if None.
        group: Process group; all processes if None.

    Raises:
        ArgumentError: If ``rank`` and ``num_replicas`` are not given together or do not fit; if
            a launcher started several processes and ``torch.distributed`` is not initialized;
            when drawing for several processes, if the strategy does not draw at random or no
            generator is given.

    Note:
        Costs the drawing of ``num_replicas`` splits.

    Examples:
        >>> draws = RandomHoldout(0.2, seed=0)
        >>> first = DistributedConditioning(draws, num_replicas=2, rank=0)
        >>> second = DistributedConditioning(draws, num_replicas=2, rank=1)
        >>> first.held_out(10), second.held_out(10)
        ([tensor([[4, 1]])], [tensor([[3, 9]])])
    """

    @checked
    def __init__(
        self,
        conditioning: Conditioning,
        *,
        num_replicas: int | None = None,
        rank: int | None = None,
        group: ProcessGroup | None = None,
    ) -> None:
        # The seed starts the sequence of draws; a draw of its own would start it anew.
        super().__init__(conditioning.seed)
        if (num_replicas is None) != (rank is None):
            given = "num_replicas" if rank is None else "rank"
            raise ArgumentError(
                given, "this one alone", "num_replicas and rank together, or neither"
            )
        if num_replicas is None or rank is None:
            own = processes(group)
            num_replicas, rank = own.size, own.rank
        self.conditioning = conditioning
        check_counts(num_replicas=num_replicas)
        check_counts(0, rank=rank)
        self.num_replicas: int = int(num_replicas)
        self.rank: int = int(rank)
        if self.rank >= self.num_replicas:
            raise ArgumentError("rank", rank, f"below the number of replicas, {num_replicas}")

    @property
    def redraws(self) -> bool:
        """Whether the strategy that draws for all processes holds out other points each call."""
        return self.conditioning.redraws

    def _blocks(self, rows: Tensor, num_data: int, generator: torch.Generator | None):
        return self._split(rows, num_data, generator).held_out

    def _split(self, rows: Tensor, num_data: int, generator: torch.Generator | None) -> Split:
        if self.num_replicas == 1:
            return self.conditioning._split(rows, num_data, generator)
        if generator is None:
            raise ArgumentError(
                "generator",
                None,
                "a generator, or a strategy with a seed",
                "The global generators of several processes need not agree.",
            )
        before = generator.get_state()
        # All of them, so that the generators of all processes advance by the same.
        splits = [
            self.conditioning._split(rows, num_data, generator) for _ in range(self.num_replicas)
        ]
        if torch.equal(before, generator.get_state()):
            raise ArgumentError(
                "conditioning",
                f"{self.conditioning}, the same in all {self.num_replicas} processes",
                "a strategy that draws at random",
                "A fixed strategy is evaluated in one process.",
            )
        return splits[self.rank]


class SharedTraining:
    """Gives all processes one start, averages their gradients, and refuses where they disagree.

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
        Digests add 48 bytes per process to the message by which :func:`average_gradients` finds
        lost processes. At a comparison the parameters are copied to the host, at other steps
        nothing is read. Data are digested again only after they have changed. In one process
        nothing is compared.

        Parameters stay equal bit by bit if processors of one kind compute the optimizer's step;
        processors of different kinds may round differently. Use one group for each kind, or
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
        timeout: float = _TIMEOUT,
    ) -> None:
        check_counts(every=every)
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
        mean = _averaged(self._mll.parameters(), value, self._processes, self._timeout, agreed)
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
