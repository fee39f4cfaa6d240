"""Labelled images and head poses: readers of original formats, and what they refuse."""

from __future__ import annotations

import gzip
import re

import numpy
import pytest
import torch
from image_files import (
    archive,
    characters,
    drawing,
    emnist_archive,
    head_pose_folder,
    idx,
    register,
)
from PIL import Image

from gpclml import datasets
from gpclml.datasets._image_formats import read_idx, read_idx_images
from gpclml.datasets.images import PITCHES, YAWS
from gpclml.datasets.sources import image_files
from gpclml.errors import ArgumentError, DataError, ShapeError, UnknownNameError

CHARACTERS = {
    "small/": b"",
    "small/Greek/character02/0102_01.png": drawing(50),
    "small/Greek/character01/0101_02.png": drawing(20),
    "small/Greek/character01/0101_01.png": drawing(10),
    "small/Braille/character01/0001_01.png": drawing(80),
}


@pytest.mark.parametrize("packed", [False, True])
def test_idx_files(tmp_path, packed):
    array = numpy.arange(24).reshape(2, 3, 4)
    body = idx(array)
    path = tmp_path / "a"
    path.write_bytes(gzip.compress(body) if packed else body)
    assert torch.equal(read_idx(path).long(), torch.tensor(array))
    (tmp_path / "labels").write_bytes(idx(numpy.array([7, 9])))
    images, labels = read_idx_images(path, tmp_path / "labels")
    assert (images.shape, labels.tolist()) == ((2, 1, 3, 4), [7, 9])


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (idx(numpy.zeros((2, 3)))[:-1], "5 numbers, where the header says"),
        (idx(numpy.zeros((2, 3))) + b"\0", "7 numbers"),
        (b"\0\0\x08\x03\0\0", "header is cut short"),
        (b"\0\0\x0d\x01\0\0\0\0", "no idx file of unsigned bytes"),
        (b"", "no idx file"),
        (gzip.compress(idx(numpy.zeros((2, 300))))[:-12], "cannot be read"),
    ],
    ids=["short", "long", "header", "type", "empty", "gzip"],
)
def test_damaged_idx_files(tmp_path, body, message):
    (tmp_path / "a").write_bytes(body)
    with pytest.raises(DataError, match=message):
        read_idx(tmp_path / "a")
    with pytest.raises(DataError, match="cannot be read"):
        read_idx(tmp_path / "b")


def test_idx_files_that_do_not_belong_together(tmp_path):
    (tmp_path / "images").write_bytes(idx(numpy.zeros((2, 3, 3))))
    (tmp_path / "labels").write_bytes(idx(numpy.zeros(3)))
    with pytest.raises(DataError, match="of one set"):
        read_idx_images(tmp_path / "images", tmp_path / "labels")


def test_omniglot_archives(tmp_path):
    shared = {"other/Greek/character02/0102_01.png": drawing(50)}
    more = shared | {"other/Greek/character02/0102_07.png": drawing(60)}
    paths = [archive(tmp_path / "a.zip", CHARACTERS), archive(tmp_path / "b.zip", more)]
    data = datasets.load_omniglot(paths)
    assert data.class_names == ("Braille/character01", "Greek/character01", "Greek/character02")
    assert data.class_groups == ("Braille", "Greek", "Greek")
    assert data.labels.tolist() == [0, 1, 1, 2, 2]
    assert data.images.shape == (5, 1, 28, 28)
    columns = data.images[:, 0].double().mean(1).argmax(-1).tolist()
    assert columns == [22, 3, 6, 14, 17]  # (80, 10, 20, 50, 60 and 4 more) 28 / 105
    assert data.images[0, 0, :, 0].max() == 0  # paper is 0, ink bright
    greek = data.of_groups(["Greek"])
    assert greek.labels.tolist() == [1, 1, 2, 2]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.zip", "b.zip"]


@pytest.mark.parametrize("name", ["../a.png", "/a.png", "x/../../a.png", "..\\a.png", "C:/a.png"])
def test_an_entry_that_leads_out_of_the_archive(tmp_path, name):
    path = archive(tmp_path / "a.zip", CHARACTERS | {name: drawing(5)})
    with pytest.raises(DataError, match="leads out of the archive"):
        datasets.load_omniglot([path])
    assert list(tmp_path.iterdir()) == [path]


def test_other_and_damaged_archives(tmp_path):
    other = archive(tmp_path / "other.zip", {"readme.txt": b"hello"})
    with pytest.raises(DataError, match=r"the entry readme\.txt is no"):
        datasets.load_omniglot([other])
    mixed = CHARACTERS | {"s/Greek/character03/0103_01.png": drawing(5, size=64)}
    with pytest.raises(DataError, match=r"images of sizes \[\(64, 64\), \(105, 105\)\]"):
        datasets.load_omniglot([archive(tmp_path / "mixed.zip", mixed)])
    with pytest.raises(DataError, match="no images"):
        datasets.load_omniglot([archive(tmp_path / "empty.zip", {})])
    no_image = archive(tmp_path / "n.zip", {"s/Greek/character01/0101_01.png": b"no picture"})
    with pytest.raises(DataError, match="not an image that can be read"):
        datasets.load_omniglot([no_image])
    whole = archive(tmp_path / "a.zip", CHARACTERS)
    whole.write_bytes(whole.read_bytes()[:-40])
    with pytest.raises(DataError, match="cut short"):
        datasets.load_omniglot([whole])
    with pytest.raises(DataError, match="missing"):
        datasets.load_omniglot(tmp_path / "none.zip")  # one path is one archive


def test_a_tampered_file_of_the_registry_is_refused(tmp_path):
    folder = tmp_path / "mnist"
    folder.mkdir()
    (folder / "t10k-images-idx3-ubyte.gz").write_bytes(b"something else")
    with pytest.raises(DataError, match="corrupt or is another version"):
        datasets.load_images("mnist-test", folder=tmp_path, progress=False)


def test_emnist(tmp_path):
    data = datasets.load_emnist(emnist_archive(tmp_path / "gzip.zip"))
    assert [data.class_names[label] for label in data.labels] == ["0", "z"]
    assert torch.equal(data.images[1, 0], torch.arange(12, 24).reshape(3, 4).mT.byte())
    path = emnist_archive(tmp_path / "l.zip", "train", "letters", labels=(1, 26))
    letters = datasets.load_emnist(path, "letters", "train")
    assert [letters.class_names[label] for label in letters.labels] == ["A", "Z"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gzip.zip", "l.zip"]
    with pytest.raises(DataError, match=r"no file emnist-letters-test-images-idx3-ubyte\.gz"):
        datasets.load_emnist(path, "letters")
    with pytest.raises(UnknownNameError, match="Did you mean 'letters'"):
        datasets.load_emnist(path, "leters")
    with pytest.raises(UnknownNameError, match="part"):
        datasets.load_emnist(path, "letters", "valid")
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(DataError, match="cut short"):
        datasets.load_emnist(path)
    for wrong in ((0, 5), (5, 27)):  # letters are numbered from 1
        path = emnist_archive(tmp_path / "w.zip", "train", "letters", labels=wrong)
        with pytest.raises(DataError, match="where 0 to 25 belong"):
            datasets.load_emnist(path, "letters", "train")
    unlike = emnist_archive(tmp_path / "u.zip", labels=(1, 2, 3))
    with pytest.raises(DataError, match="of one set"):
        datasets.load_emnist(unlike)


@pytest.mark.parametrize(
    ("name", "file"), [("emnist", "emnist/gzip.zip"), ("mnist", "mnist/train-images-idx3-ubyte.gz")]
)
def test_checksums_of_other_algorithms(tmp_path, name, file):
    (tmp_path / file).parent.mkdir()
    (tmp_path / file).write_bytes(b"tampered")
    with pytest.raises(DataError, match=r"Expected md5:[0-9a-f]{32} .*found: md5:"):
        datasets.load_images(name, folder=tmp_path, progress=False)


def test_digits_need_no_file():
    data = datasets.load_images("digits")
    assert data.images.shape == (1797, 1, 8, 8)
    assert int(data.images.max()) == 255
    assert data.labels.unique().tolist() == list(range(10))


def test_names_and_the_registry():
    names = "cub digits emnist mini-imagenet mnist mnist-test omniglot omniglot-background"
    others = ("omniglot-evaluation", "omniglot-small")
    assert datasets.image_names() == (*names.split(), *others)
    with pytest.raises(UnknownNameError, match="Did you mean 'digits'"):
        datasets.load_images("digit")
    for files in image_files().values():
        for one in files:
            assert re.fullmatch("sha256:[0-9a-f]{64}|md5:[0-9a-f]{32}", one.checksum)
            assert one.address.startswith("https://")


def test_parts_that_do_not_fit():
    images, labels = torch.zeros(2, 1, 3, 3, dtype=torch.uint8), torch.zeros(2, dtype=torch.long)
    with pytest.raises(ShapeError, match="images"):
        datasets.LabelledImages("a", images.float(), labels, ("x",))
    with pytest.raises(ShapeError, match="labels"):
        datasets.LabelledImages("a", images, labels[:1], ("x",))
    with pytest.raises(ShapeError, match="class_groups"):
        datasets.LabelledImages("a", images, labels, ("x",), ("g", "h"))
    for wrong in (labels + 1, labels - 1, labels.double()):
        with pytest.raises(ArgumentError, match="labels: got"):
            datasets.LabelledImages("a", images, wrong, ("x",))
    with pytest.raises(UnknownNameError, match="groups"):
        datasets.LabelledImages("a", images, labels, ("x",), ("g",)).of_groups(["h"])


def test_small_files_in_the_registered_places(tmp_path, monkeypatch):
    for folder in ("omniglot", "mnist"):
        (tmp_path / folder).mkdir()
    small = tmp_path / "omniglot" / "images_background_small"
    characters(small.with_name(f"{small.name}1.zip"), ("Greek", "Latin"))
    characters(small.with_name(f"{small.name}2.zip"), ("Latin", "Tagalog"))
    labels = numpy.arange(20) % 10
    images = numpy.arange(20 * 28 * 28).reshape(20, 28, 28).astype(numpy.uint8)
    for file, body in (("images-idx3", images), ("labels-idx1", labels)):
        (tmp_path / "mnist" / f"t10k-{file}-ubyte.gz").write_bytes(gzip.compress(idx(body)))
    register(monkeypatch, tmp_path, ["omniglot-small", "mnist-test"])

    data = datasets.load_images("omniglot-small", folder=tmp_path, progress=False)
    assert data.images.shape == (120, 1, 28, 28)
    assert torch.equal(data.labels.bincount(), torch.full((6,), 20))
    assert data.groups == ("Greek", "Latin", "Tagalog")
    data = datasets.load_images("mnist-test", folder=tmp_path, progress=False)
    assert data.images.shape == (20, 1, 28, 28)
    assert torch.equal(data.images[:, 0], torch.tensor(images))
    assert data.labels.tolist() == labels.tolist()


@pytest.mark.data
def test_the_real_characters(data_folder):
    data = datasets.load_images("omniglot-small", folder=data_folder, progress=False)
    assert data.images.shape == (4840, 1, 28, 28)
    assert torch.equal(data.labels.bincount(), torch.full((242,), 20))
    assert len(data.groups) == 8
    digits = datasets.load_images("mnist-test", folder=data_folder, progress=False)
    assert digits.images.shape == (10_000, 1, 28, 28)
    assert digits.labels[:5].tolist() == [7, 2, 1, 0, 4]


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
    one = datasets.load_head_poses("BobB", folder=folder)
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
    with pytest.raises(DataError, match=r"AnnA_060_010\.jpg is not an image that can be read"):
        datasets.load_head_poses(folder=tmp_path)
    (home / "AnnA_060_010.jpg").unlink()
    with pytest.raises(DataError, match=r"AnnA_060_010\.jpg is not an image"):
        datasets.load_head_poses(folder=tmp_path)
    Image.new("RGB", (5, 6)).save(home / "AnnA_060_010.jpg")
    with pytest.raises(DataError, match="expected one size"):
        datasets.load_head_poses(folder=tmp_path)
