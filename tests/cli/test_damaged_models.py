"""A model of the command whose files are damaged is refused, whichever bit it is."""

from __future__ import annotations

import random
import shutil
from dataclasses import asdict

from gpclml._utils.resuming import digest
from gpclml.cli.saved_models import load_model
from gpclml.errors import DataError

FLIPS = 150  # in each of the three files


def content_of(folder):
    saved = load_model(folder)
    model = saved.model
    parts = [dict(model.state_dict()), model.train_inputs[0], model.train_targets]
    return digest([*parts, saved.encoding.to_json(), asdict(saved.fitted), dict(saved.made_from)])


def test_no_flipped_bit_goes_unseen(report, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(report[0] / "models" / "rbf", folder)
    expected = content_of(folder)
    for name in ("model.pt", "table.json", "model.json"):
        path = folder / name
        raw, silent, refused = path.read_bytes(), [], 0
        for bit in random.Random(name).sample(range(8 * len(raw)), FLIPS):
            changed = bytearray(raw)
            changed[bit // 8] ^= 1 << bit % 8
            path.write_bytes(changed)
            try:
                found = content_of(folder)
            except DataError:
                refused += 1
            else:
                if found != expected:
                    silent.append(bit)
        path.write_bytes(raw)
        assert silent == [], name
        assert refused > 0.9 * FLIPS, name
    assert content_of(folder) == expected
