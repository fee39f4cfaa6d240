"""Kills the command before each of its changes of files, one after another, and says what is left.

To be run by itself (``python killed_runs.py fit FOLDER``): it forks. Models and pages are made once
and handed to each run, so that only what the command does with files is done again. It prints how
many runs were killed, and what was wrong after which.
"""

from __future__ import annotations

import functools
import hashlib
import io
import itertools
import json
import os
import shutil
import signal
import sys
import traceback
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import numpy as np
import pandas

from gpclml.cli import app, comparing, fitting, report_folder

CHANGES = "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate"
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT
OLD, NEW = 3, 4  # seeds
RECORDS = {"fit": "model.json", "compare": "report.json"}


def changes(event, arguments):
    """Whether an audited event changes files."""
    if event == "open":
        return isinstance(arguments[2], int) and bool(arguments[2] & WRITING)
    return event in CHANGES


def die_before_change(number, root):
    """This process is killed before its change of that number in a folder."""
    counter = itertools.count(1)

    def hook(event, arguments):
        if not changes(event, arguments):
            return
        paths = [os.fsdecode(one) for one in arguments if isinstance(one, str | bytes | Path)]
        if any(path.startswith(str(root)) for path in paths) and next(counter) == number:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def run(*words, before=lambda: None):
    """Runs a command in a process of its own; its exit code, negative where it was killed."""
    child = os.fork()
    if child == 0:
        said, code = io.StringIO(), 70
        try:
            before()
            with redirect_stdout(said), redirect_stderr(said):
                try:
                    app([str(word) for word in words], standalone_mode=True)
                except SystemExit as ended:
                    code = ended.code or 0
        except BaseException:
            said.write(traceback.format_exc())
        finally:
            if code:
                sys.stderr.write(said.getvalue())
                sys.stderr.flush()
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def once(function, key):
    """The function, computed once for each key of its arguments, in this process."""
    known = {}

    def cached(*args, **options):
        name = key(*args)
        if name not in known:
            known[name] = function(*args, **options)
        return known[name]

    return cached


def hand_over():
    """Models, reports and pages are made once."""
    fit = once(fitting.fit_recipe, lambda recipe, *rest: (recipe.model, recipe.seed))
    fitting.fit_recipe = comparing.fit_recipe = fit
    make = once(comparing.make_report, lambda options, *rest: options.table.seed)
    comparing.make_report = make
    page = once(report_folder.page_of, lambda report: report.command)
    report_folder.page_of = page


def files_in(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def is_whole(files, kind, seed):
    """Whether the files of a folder are those of one run, all of them and no others."""
    record = json.loads(files.get(RECORDS[kind], b"{}"))
    if "files" not in record:
        return False
    seeds = [record["made_from"]["seed"]] if kind == "fit" else [
        one["recipe"]["seed"] for one in record["fitted"].values()
    ]  # fmt: skip
    sums = {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
    del sums[RECORDS[kind]]
    return set(seeds) == {seed} and sums == record["files"]


class Runs:
    """Runs of a command whose output is there, killed one after another."""

    def __init__(self, kind, root):
        self.kind, self.root, self.wrong = kind, root, []
        self.out = root / "now" / "out"
        self.data = root / "data.csv"
        rng = np.random.default_rng(0)
        table = pandas.DataFrame(rng.standard_normal((60, 2)), columns=["x", "y"])
        table.to_csv(self.data, index=False)
        self.foreign = {}

    def words(self, seed):
        models = {
            "fit": ["--model", "linear"],
            "compare": ["--models", "linear,rbf" if seed == OLD else "linear,matern"],
        }[self.kind]
        options = "--target", "y", "--seed", seed, "--steps", 2, "--quiet", "--out", self.out
        return self.kind, self.data, *options, *models

    @functools.cached_property
    def model(self):
        return self.out if self.kind == "fit" else self.out / "models" / "linear"

    def prepare(self, there):
        """The output of the old run with files of others, or none, or an empty folder."""
        (self.root / "now").mkdir()
        for seed in (NEW, OLD):  # both are made here, and known to all that are forked
            with redirect_stdout(io.StringIO()):
                app([str(word) for word in self.words(seed)], standalone_mode=False)
            if seed == NEW:
                shutil.rmtree(self.out)
        self.old = files_in(self.out)
        if there == "there":
            self.foreign = {
                "notes.txt": b"mine", "pictures/a.png": b"\x89PNG", "models/rbf/mine.txt": b"mine",
            }  # fmt: skip
            for name, content in self.foreign.items():
                (self.out / name).parent.mkdir(parents=True, exist_ok=True)
                (self.out / name).write_bytes(content)
        else:
            shutil.rmtree(self.out)
            self.old = {}
            if there == "empty":
                self.out.mkdir()
        (self.root / "now" / "out.part.mine").write_bytes(b"mine")
        shutil.copytree(self.root / "now", self.root / "before")

    def own(self):
        """Files of the output that are not of others, which must be there as they were."""
        files = files_in(self.out)
        for name, content in self.foreign.items():
            if files.pop(name, None) != content:
                self.say(f"{name} of others is gone or changed")
        if (self.out.parent / "out.part.mine").read_bytes() != b"mine":
            self.say("a file beside the output was changed")
        return files

    def say(self, what):
        self.wrong.append(f"{self.number}: {what}")

    def all(self):
        for number in itertools.count(1):
            self.number = number
            shutil.rmtree(self.root / "now")
            shutil.copytree(self.root / "before", self.root / "now")
            die = functools.partial(die_before_change, number, self.root / "now")
            code = run(*self.words(NEW), before=die)
            if code == 0:
                break
            if code != -signal.SIGKILL:
                self.say(f"the run ended with {code}")
            self.check()
        self.check_new("the whole run")
        return {"killed": number - 1, "wrong": self.wrong}

    def check(self):
        own = self.own()
        for name in self.old.keys() - own.keys():
            if not name.startswith("models/rbf/"):
                self.say(f"{name} is missing")
        if own:
            if code := run("predict", self.model, self.data, "--out", self.root / "mean.csv"):
                self.say(f"the model cannot be used ({code})")
            own = self.own()
        if own != self.old and not is_whole(own, self.kind, NEW):
            self.say("the output is neither the old nor the new one")
        if code := run(*self.words(NEW)):
            self.say(f"the next run ended with {code}")
        self.check_new("the next run")

    def check_new(self, what):
        if not is_whole(self.own(), self.kind, NEW):
            self.say(f"{what} left something else than the new output")
        left = sorted(path.name for path in self.out.parent.iterdir())
        if left != ["out", "out.part.mine"]:
            self.say(f"{what} left {left}")


if __name__ == "__main__":
    kind, root, there = sys.argv[1], Path(sys.argv[2]).resolve(), sys.argv[3]
    hand_over()
    runs = Runs(kind, root)
    runs.prepare(there)
    print(json.dumps(runs.all()))
