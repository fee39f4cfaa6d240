"""The few-shot benchmark: digits end to end, how models are trained, and what is refused."""

import dataclasses
import math

import pytest
import torch
from torch.testing import assert_close
from typer.testing import CliRunner

from benchmarks.dkt import cells, studies
from benchmarks.dkt.__main__ import app
from benchmarks.dkt.cells import (
    label,
    nearest_neighbour_accuracy,
    plain_gp_scores,
    run_cell,
    run_together,
    train_baseline,
)
from benchmarks.dkt.published import (
    ClassModels,
    compare_with_published,
    published_model,
    train_class_models,
)
from benchmarks.dkt.studies import STUDIES, Sources, study_named
from benchmarks.dkt.study import make_grid
from benchmarks.runner import load_results
from gpclml.conditioning import LastPoints
from gpclml.errors import NonFiniteError, UnknownNameError
from gpclml.inference import evaluating
from gpclml.meta import DeepKernelTransfer, Episodes, ImageTasks
from gpclml.mlls import ConditionalMarginalLogLikelihood

LINE = "run --study digits --shots 1 --kernels cosine,pixels --seeds 2 --steps 3 --test-tasks 5"


def invoke(line, path):
    return CliRunner().invoke(app, [*line.split(), "--results", str(path)])


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("dkt") / "a.sqlite"
    answer = invoke(LINE, path)
    assert answer.exit_code == 0, answer.output
    return path


@pytest.mark.slow
def test_digits_end_to_end(path):
    done = load_results(path)
    assert len(done) == 2 * 3
    trained = done[done["kernel"] == "cosine"]
    assert set(trained["objective"]) == {"lml", "clml"}
    assert trained["accuracy"].between(0, 1).all()
    assert trained["best_step"].tolist() == [3] * 4
    assert done[done["kernel"] == "pixels"]["accuracy"].min() > 1 / 3  # chance
    again = invoke(LINE, path)
    assert "6 of 6 cells done" in again.output
    assert "in this run" not in again.output


@pytest.mark.slow
def test_the_report(path):
    text = invoke("report", path).stdout
    assert "digits | 1 | cosine | clml |" in text
    assert "digits | 1 | pixels | - |" in text
    assert "## CLML less LML" in text
    assert STUDIES["digits"].about in text


@pytest.mark.slow
def test_numbers_of_ways_are_told_apart(tmp_path):
    line = "run --study digits --shots 1 --kernels pixels --seeds 1 --test-tasks 5"
    for ways in (2, 4):
        assert invoke(f"{line} --ways {ways}", tmp_path / "a.sqlite").exit_code == 0
    text = invoke("report", tmp_path / "a.sqlite").stdout
    assert "digits | 2 | 1 | pixels | - |" in text
    assert "digits | 4 | 1 | pixels | - |" in text


HEAD = "study,shots,kernel,objective,seed,accuracy"


def differences(folder, files, *options):
    """What the command says of files of these lines, a letter each."""
    paths = [folder / f"{name}.csv" for name in files]
    for path, lines in zip(paths, files.values(), strict=True):
        path.write_text("\n".join(lines))
    return CliRunner().invoke(app, ["differences", *map(str, paths), *options])


def test_what_the_conditional_objective_changes(tmp_path):
    lml = [f"digits,1,rbf,lml,{seed},0.5" for seed in range(3)] + ["digits,1,pixels,,0,0.1"]
    gains = (0.51, 0.52, 0.53, 0.9)  # of a seed that the LML lacks too
    clml = [f"digits,1,rbf,clml,{seed},{gain}" for seed, gain in enumerate(gains)]
    two_ways = [f"2,{line}" for line in (*lml, *clml)]
    files = {"a": ["# made by a command", HEAD, *lml], "b": [HEAD, *clml]}
    text = differences(tmp_path, {**files, "w": [f"ways,{HEAD}", *two_ways]}).stdout
    half = 4.303 * 1 / 3**0.5  # Student's t of two degrees of freedom
    assert f"| digits | - | 1 | rbf | clml | +2.0 ± {half:.1f} |" in text
    assert f"| digits | 2 | 1 | rbf | clml | +2.0 ± {half:.1f} |" in text
    assert "pixels" not in text
    answer = differences(tmp_path, {}, str(tmp_path / "c.csv"))
    assert answer.exit_code == 2
    assert "no rows of cells" in answer.stderr


def test_what_another_kernel_changes(tmp_path):
    lines = [HEAD, "digits,1,linear,clml,0,0.9", "digits,1,pixels,,0,0.3", "digits,1,maml,,0,0.4"]
    for kernel, first in (("rbf", 0.5), ("linear", 0.52)):
        lines += [f"digits,1,{kernel},lml,{seed},{first + 0.01 * seed}" for seed in range(3)]
    for less, shown in (("rbf", "linear | lml | +2.0 ± 0.0"), ("pixels", "maml | - | +10.0")):
        text = differences(tmp_path, {"a": lines}, "--less", less).stdout
        assert text.splitlines()[2:] == [f"| digits | 1 | {shown} |"]
    answer = differences(tmp_path, {"a": lines}, "--less", "rfb")
    assert answer.exit_code == 2
    assert "rbf" in answer.stderr


def test_nearest_neighbours_are_of_the_task():
    support = torch.tensor([[[0.0], [10.0]], [[10.0], [0.0]]])
    query = torch.tensor([[[1.0], [9.0]], [[1.0], [2.0]]])
    labels = torch.tensor([[0, 1], [0, 1]])
    episodes = Episodes(support, labels, query, torch.tensor([[0, 1], [1, 0]]), ways=2)
    assert nearest_neighbour_accuracy(episodes).tolist() == [1.0, 0.5]


def test_a_plain_gp_learns_a_task_from_its_own_points():
    x = torch.linspace(-2, 2, 20).reshape(1, 20, 1)
    y = x[..., 0].sin()
    error, nll = plain_gp_scores(Episodes(x[:, ::2], y[:, ::2], x[:, 1::2], y[:, 1::2]))
    assert float(error) < 1e-3
    assert float(nll) < -1


@pytest.mark.parametrize("name", ["digits", "periodic", "periodic-out-of-range"])
def test_studies_without_files(name):
    study = study_named(name)
    sources = study.sources(study.shots[0], 0)
    episodes = sources.test.draw([0, 1])
    assert (episodes.ways > 0) == study.classes
    x = episodes.support_x.flatten(0, 1)
    features = study.network(generator=torch.Generator().manual_seed(0))(x)
    assert features.shape == (len(x), study.num_features)
    other = study.sources(study.shots[0], 1).train.draw([0])
    assert not torch.equal(other.support_x, sources.train.draw([0]).support_x)


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("run --study digit", "study: got 'digit'"),
        ("run --study digits --kernels rbg", "kernels: got 'rbg'"),
        ("run --study digits --objectives loo", "objectives: got 'loo'"),
        ("run --study digits --shots 400", "shots + queries: got 415"),
        ("run --study digits --shots one", "shots: got 'one'"),
        ("run --study digits --lr 0", "lr: got 0.0"),
        ("run --study digits --ways 5", "ways: got 5, expected at most the 4 classes"),
        ("run --study periodic --ways 4", "ways: got 4, expected none for periodic"),
        ("run --study periodic --kernels maml", "kernels: got maml, expected kernels or pixels"),
        ("run --study digits --device gpu", "device: got 'gpu'"),
    ],
)
def test_bad_input_is_told_before_anything_runs(line, text, tmp_path):
    answer = invoke(line, tmp_path / "a.sqlite")
    assert answer.exit_code == 2
    assert text in answer.stderr
    assert not (tmp_path / "a.sqlite").exists()


@pytest.fixture
def validated(monkeypatch):
    """The study of digits with its test tasks to choose a look by, and a look every third step."""

    def sources(shots, seed):
        digits = STUDIES["digits"].sources(shots, seed)
        return Sources(digits.train, studies.digits(shots, seed + 50).test, digits.test)

    study = dataclasses.replace(STUDIES["digits"], sources=sources)
    monkeypatch.setattr(studies, "STUDIES", {**STUDIES, "validated": study, "again": study})
    monkeypatch.setattr(cells, "LOOK_EVERY", 3)
    monkeypatch.setattr(cells, "VALIDATION_TASKS", 10)


@pytest.mark.slow
@pytest.mark.usefixtures("validated")
@pytest.mark.parametrize("kernel", ["batch-norm-cosine", "prototypes"])
def test_studies_are_tested_on_one_training_and_tempered(kernel):
    grid = make_grid(
        ["validated", "again"], shots=(1,), kernels=[kernel], objectives=["clml"], seeds=1,
        steps=10, test_tasks=30,
    )  # fmt: skip
    assert len({label(cell) for cell in grid}) == 1
    first, again = run_together(grid)
    assert first == again
    alone = run_cell(grid[0])
    assert {**alone, "train_seconds": 0} == {**first, "train_seconds": 0}
    assert first["best_step"] in (3, 6, 9, 10)
    assert first["tempered_nll"] < first["nll"]


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["linear-transfer", "maml", "matching", "prototypes", "pixels"])
def test_baselines_are_cells(kernel):
    [cell] = make_grid(["digits"], shots=(1,), kernels=[kernel], seeds=1, steps=4, test_tasks=20)
    assert cell["objective"] is None
    assert run_cell(cell)["accuracy"] > 0.45  # chance is a third


def test_a_baseline_keeps_the_first_of_equal_looks_and_the_last_where_nothing_validates(validated):
    [cell] = make_grid(["digits"], shots=(1,), kernels=["matching"], seeds=1, steps=5)
    sources = study_named("digits").sources(1, 0)

    class Fixed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(()))

        def loss(self, episodes):
            return self.weight.expand(len(episodes.query_x))

        def log_probabilities(self, episodes):
            shape = (*episodes.query_y.shape, episodes.ways)
            return torch.full(shape, -math.log(episodes.ways))

    for validation, step, moved in ((sources.test, 3, 3), (None, 5, 5)):
        model = Fixed()
        assert train_baseline(model, sources.train, validation, cell) == step
        assert float(model.weight.detach()) == pytest.approx(-moved * cell["lr"], rel=1e-3)
    with pytest.raises(NonFiniteError, match="at step 2"):
        train_baseline(Fixed(), sources.train, None, cell | {"lr": math.inf})


def pictures():
    images = torch.rand(60, 1, 16, 16, generator=torch.Generator().manual_seed(0))
    return ImageTasks(images, torch.arange(6).repeat_interleave(10), shots=1, queries=3)


same_data = pytest.mark.filterwarnings("ignore:The input matches the stored training data")


@same_data
@pytest.mark.parametrize("kernel", ["linear", "rbf"])
def test_from_one_start_the_published_loss_and_predictions_are_ours(kernel):
    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(256, 64)).double()
    theirs = ClassModels(
        network, 5, lambda: DeepKernelTransfer(network, kernel).covar_module
    ).double()
    ours = DeepKernelTransfer(network, kernel).double()
    task = pictures().draw([0]).to(torch.float64)
    for m in (0, task.num_support):
        mll = ConditionalMarginalLogLikelihood(ours.likelihood, ours, LastPoints(m=m))
        assert_close(theirs.loss(task, clml=m > 0), -mll(*ours.prior(task)).mean())
    with torch.no_grad(), evaluating(theirs):
        theirs.condition(task)
        expected = ours.predict(task).mean[0].argmax(0)
        assert theirs.classes(task.query_x[0]).tolist() == expected.tolist()


@same_data
def test_the_published_model_of_cosines():
    """Features have length one; the noise stays and everything else is trained."""
    model = published_model("batch-norm-cosine", 5, seed=0)
    images = pictures().draw([0]).query_x[0]
    assert_close(model.features(images).norm(dim=1), torch.ones(15))
    before = {name: p.clone() for name, p in model.named_parameters()}
    train_class_models(model, pictures(), steps=2)
    still = {name for name, p in model.named_parameters() if torch.equal(p, before[name])}
    ends = ("likelihood.noise_covar.raw_noise", "covar_module.base_kernel.raw_variance")
    fixed = {f"gps.models.{way}.{end}" for way in range(5) for end in ends}
    assert {name for name in still if name.startswith("gps")} == fixed
    assert not any(name.startswith("network") for name in still)


@pytest.mark.slow
@same_data
def test_rows_of_a_comparison_with_the_published_method(monkeypatch):
    sources = Sources(pictures(), None, pictures())
    made = dataclasses.replace(STUDIES["digits"], sources=lambda *_: sources)
    monkeypatch.setattr(studies, "STUDIES", {**STUDIES, "made": made})
    table = compare_with_published("cosine", 0, 1, 2, 2, ("made", "made"))
    assert list(table["study"]) == ["made", "made"]
    scores = table[["published", "published, CLML", "ours, LML", "ours, CLML"]].to_numpy()
    assert (scores[0] == scores[1]).all()
    assert ((scores >= 0) & (scores <= 100)).all()
    with pytest.raises(UnknownNameError, match="kernel"):
        compare_with_published("cosin", 0, 1, 2, 2, ("made",))
