"""Kills the command before each of its changes of files, one by one, and checks what is left.

It is run by itself (``python killed_runs.py fit FOLDER there``) because it forks. Models and pages
are made once and handed to each run, so that only what the command does with files is done again.
It prints how many runs were killed, and what was wrong after which of them.

After a kill each file of the command is that of the old result or that of the new one, and the
files of others are in their place. A model is taken for one only if all its files are of one
result. The next run ends well. With ``here`` the command is run by ``--out .`` in the folder.
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

from gpclml.tables import comparing, fitting
from gpclml.tables.command import app

CHANGES = (
    "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate",
    "os.chmod", "os.chown", "os.utime", "os.setxattr",
)  # fmt: skip
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT
OLD, NEW = 3, 4  # seeds
MODEL_FILES = ("model.json", "model.pt", "table.json")
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


def run(*words, before=lambda: None, quiet=False):
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
            if code and not quiet:
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
    others = once(comparing.yardsticks, lambda train, test, seed, *rest: seed)
    comparing.yardsticks = others
    page = once(comparing.page_of, lambda report: report.options.command("compare"))
    comparing.page_of = page


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
    seeds = [record.get("made_from", {}).get("seed")] if kind == "fit" else [
        one["recipe"]["seed"] for one in record.get("fitted", {}).values()
    ]  # fmt: skip
    sums = {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
    del sums[RECORDS[kind]]
    return set(seeds) == {seed} and sums == record["files"]


class Runs:
    """Runs of a command whose output is there, killed one after another."""

    def __init__(self, kind, root, there):
        self.kind, self.root, self.there = kind, root, there
        self.wrong, self.number = [], 0
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
        out = "." if self.there == "here" and self.out.is_dir() else self.out
        options = "--target", "y", "--seed", seed, "--steps", 2, "--quiet", "--out", out
        return self.kind, self.data, *options, *models

    def predict(self, model):
        return "predict", model, self.data, "--out", self.root / "mean.csv"

    def enter(self):
        if self.there == "here":
            os.chdir(self.out)

    @functools.cached_property
    def model(self):
        return self.out if self.kind == "fit" else self.out / "models" / "linear"

    def prepare(self):
        """The output of the old run with files of others, or none, or an empty folder."""
        (self.root / "now").mkdir()
        for seed in (NEW, OLD):  # both are made here, and known to all that are forked
            with redirect_stdout(io.StringIO()):
                app([str(word) for word in self.words(seed)], standalone_mode=False)
            if seed == NEW:
                self.new = files_in(self.out)
                shutil.rmtree(self.out)
        self.old = files_in(self.out)
        if self.there in ("there", "here"):
            self.foreign = {
                "notes.txt": b"mine", "pictures/old/a.png": b"\x89PNG",
                "models/rbf/mine.txt": b"mine",
            }  # fmt: skip
            for name, content in self.foreign.items():
                (self.out / name).parent.mkdir(parents=True, exist_ok=True)
                (self.out / name).write_bytes(content)
            (self.out / "link").symlink_to("notes.txt")
            (self.out / "empty").mkdir()
        else:
            shutil.rmtree(self.out)
            self.old = {}
            if self.there == "empty":
                self.out.mkdir()
        (self.root / "now" / "out.part.mine").write_bytes(b"mine")
        shutil.copytree(self.root / "now", self.root / "before", symlinks=True)

    def kill(self, number, words):
        """Kills a command before its change of that number; its exit code."""
        shutil.rmtree(self.root / "now")
        shutil.copytree(self.root / "before", self.root / "now", symlinks=True)

        def before():
            self.enter()
            die_before_change(number, self.root / "now")

        return run(*words, before=before)

    def own(self):
        """Files of the output that are not of others, which must be there as they were."""
        files = files_in(self.out)
        for name, content in self.foreign.items():
            if files.pop(name, None) != content:
                self.say(f"{name} of others is gone or changed")
        files.pop("link", None)
        for name in ("link", "empty") if self.foreign else ():
            if not os.path.lexists(self.out / name):
                self.say(f"{name} of others is gone")
        if self.there != "absent" and not self.out.is_dir():
            self.say("the folder is gone")
        if (self.out.parent / "out.part.mine").read_bytes() != b"mine":
            self.say("a file beside the output was changed")
        return files

    def say(self, what):
        self.wrong.append(f"{self.number}: {what}")

    def all(self):
        for number in itertools.count(1):
            self.number = number
            code = self.kill(number, self.words(NEW))
            if code == 0:
                break
            if code != -signal.SIGKILL:
                self.say(f"the run ended with {code}")
            self.check()
        self.check_new("the whole run")
        return {"killed": number - 1, "wrong": self.wrong}

    def check(self):
        own = self.own()
        for name, data in own.items():
            if data not in (self.old.get(name), self.new.get(name)):
                self.say(f"{name} is neither the old nor the new one")
        for name in self.old.keys() - own.keys():
            if not name.startswith("models/rbf/"):
                self.say(f"{name} is missing")
        if self.model.is_dir():
            files = {
                name: data for name, data in files_in(self.model).items() if name in MODEL_FILES
            }
            one = any(is_whole(files, "fit", seed) for seed in (OLD, NEW))
            code = run(*self.predict(self.model), quiet=not one)
            if code != (0 if one else 2):
                self.say(f"a model, its files of {'one' if one else 'two'}, ended with {code}")
        code = run(*self.words(NEW), before=self.enter)
        if code:
            self.say(f"the next run ended with {code}")
        self.check_new("the next run")

    def check_new(self, what):
        if not is_whole(self.own(), self.kind, NEW):
            self.say(f"{what} left something else than the new output")
        left = sorted(path.name for path in self.out.parent.iterdir())
        if left != ["out", "out.part.mine"]:
            self.say(f"{what} left {left}")


if __name__ == "__main__":
    kind, root, there = sys.argv[1:]
    hand_over()
    os.fsync = lambda handle: None  # what was written outlasts a kill anyway, and this takes long
    runs = Runs(kind, Path(root).resolve(), there)
    runs.prepare()
    print(json.dumps(runs.all()))
