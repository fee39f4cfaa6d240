"""Which models are compared where none are named: as many as their cost allows."""

from __future__ import annotations

from gpclml.errors import ArgumentError

__all__ = ["check_size", "default_models"]

# Row pairs times inputs. A step of "sm" holds and differentiates four numbers for each: a second on
# a core for the first, a few GB for the second.
_SM_BY_DEFAULT, _SM_AT_MOST = 1_300_000, 8_000_000
_ALL_SMOOTH = 2000  # rows up to which rq and matern are fitted by default beside rbf


def default_models(num_train: int, num_inputs: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of models, and a sentence for each that is left out for its cost.

    Args:
        num_train: Rows to train on, n.
        num_inputs: Inputs, d.
    """
    names, said = ["linear", "rbf"], []
    if num_train <= _ALL_SMOOTH:
        names += ["rq", "matern"]
    else:
        said.append(
            f"rq and matern are left out above {_ALL_SMOOTH} rows to train on, for their time: "
            "name them in --models to have them."
        )
    pairs = num_train**2 * num_inputs
    if pairs <= _SM_BY_DEFAULT:
        names.append("sm")
    elif pairs <= _SM_AT_MOST:
        said.append(
            f"sm is left out with {num_train} rows and {num_inputs} inputs, for its time: name it "
            "in --models to have it."
        )
    else:
        said.append(
            f"sm is left out: {num_train} rows with {num_inputs} inputs take too much memory."
        )
    return (*names, "deep"), tuple(said)


def check_size(names: tuple[str, ...], num_train: int, num_inputs: int) -> None:
    """Raises where a model does not fit in memory.

    Args:
        names: Of the models.
        num_train: Rows to train on.
        num_inputs: Inputs.

    Raises:
        ArgumentError: ``"sm"`` is among them and there is too much data.
    """
    if "sm" in names and num_train**2 * num_inputs > _SM_AT_MOST:
        most = int((_SM_AT_MOST / num_inputs) ** 0.5)
        got = f"sm with {num_train} rows and {num_inputs} inputs"
        raise ArgumentError(
            "models", got, f"at most {most} rows for it", f"Leave it out, or pass --rows {most}."
        )
