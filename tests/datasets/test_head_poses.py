"""Faces at known angles: the folder layout, and what is refused."""

from __future__ import annotations

import pytest
import torch
from image_files import head_pose_folder
from PIL import Image

from gpclml import datasets
from gpclml.datasets.head_poses import PITCHES, YAWS
from gpclml.errors import DataError


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return head_pose_folder(tmp_path_factory.mktemp("faces"))


def test_pictures_by_person_pitch_and_yaw(folder):
    data = datasets.load_head_poses(folder=folder)
    assert data.people == ("AnnA", "BobB")
    assert data.images.shape == (2, 7, 19, 3, 6, 6)
    colours = data.images[..., 0, 0].int()
    assert (colours[..., 1] - 2 * torch.tensor(PITCHES)[:, None]).abs().max() <= 3
    assert (colours[..., 2] - torch.tensor(YAWS)).abs().max() <= 3
    assert (colours[..., 0] - torch.tensor([0, 100])[:, None, None]).abs().max() <= 3
    one = datasets.load_head_poses(["BobB"], folder=folder)
    assert torch.equal(one.images, data.images[1:])


def test_what_is_missing_or_damaged(tmp_path):
    with pytest.raises(DataError, match=r"no people.*no public address"):
        datasets.load_head_poses(folder=tmp_path)
    head_pose_folder(tmp_path, ["AnnA"])
    with pytest.raises(DataError, match="no folders of BobB"):
        datasets.load_head_poses(["AnnA", "BobB"], folder=tmp_path)
    home = tmp_path / "qmul" / "images" / "AnnAGrey"
    body = (home / "AnnA_060_010.jpg").read_bytes()
    (home / "AnnA_060_010.jpg").write_bytes(body[:100])
    with pytest.raises(DataError, match=r"AnnA_060_010\.jpg: no picture that can be read"):
        datasets.load_head_poses(folder=tmp_path)
    (home / "AnnA_060_010.jpg").unlink()
    with pytest.raises(DataError, match=r"AnnA_060_010\.jpg: no picture"):
        datasets.load_head_poses(folder=tmp_path)
    Image.new("RGB", (5, 6)).save(home / "AnnA_060_010.jpg")
    with pytest.raises(DataError, match="expected one size"):
        datasets.load_head_poses(folder=tmp_path)
