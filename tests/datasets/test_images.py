"""Labelled images: readers of original formats, and what they refuse."""

from __future__ import annotations

import gzip
import io
import struct
import zipfile

import numpy
import pytest
import torch
from PIL import Image

from gpclml import datasets
from gpclml.datasets._idx import read_idx, read_idx_images
from gpclml.datasets.image_sources import image_files
from gpclml.errors import DataError, ShapeError, UnknownNameError


def idx(array):
    header = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    return header + array.astype(numpy.uint8).tobytes()


def drawing(column, size=105):
    """Black ink on white: one column of an image of one bit."""
    pixels = numpy.full((size, size), 255, dtype=numpy.uint8)
    pixels[:, column : column + 9] = 0
    body = io.BytesIO()
    Image.fromarray(pixels).convert("1").save(body, "PNG")
    return body.getvalue()


def archive(path, entries):
    with zipfile.ZipFile(path, "w") as file:
        for name, body in entries.items():
            file.writestr(name, body)
    return path


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
    turned, _ = read_idx_images(path, tmp_path / "labels", transposed=True)
    assert torch.equal(turned, images.mT)


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
    data = datasets.omniglot(paths)
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
        datasets.omniglot([path])
    assert list(tmp_path.iterdir()) == [path]


def test_other_and_damaged_archives(tmp_path):
    other = archive(tmp_path / "other.zip", {"readme.txt": b"hello"})
    with pytest.raises(DataError, match=r"the entry readme\.txt is no"):
        datasets.omniglot([other])
    mixed = CHARACTERS | {"s/Greek/character03/0103_01.png": drawing(5, size=64)}
    with pytest.raises(DataError, match=r"images of sizes \[\(64, 64\), \(105, 105\)\]"):
        datasets.omniglot([archive(tmp_path / "mixed.zip", mixed)])
    with pytest.raises(DataError, match="no images"):
        datasets.omniglot([archive(tmp_path / "empty.zip", {})])
    no_image = archive(tmp_path / "n.zip", {"s/Greek/character01/0101_01.png": b"no picture"})
    with pytest.raises(DataError, match="no image that can be read"):
        datasets.omniglot([no_image])
    whole = archive(tmp_path / "a.zip", CHARACTERS)
    whole.write_bytes(whole.read_bytes()[:-40])
    with pytest.raises(DataError, match="cut short"):
        datasets.omniglot([whole])
    with pytest.raises(DataError, match="missing"):
        datasets.omniglot([tmp_path / "none.zip"])


def test_a_tampered_file_of_the_registry_is_refused(tmp_path):
    folder = tmp_path / "mnist"
    folder.mkdir()
    (folder / "t10k-images-idx3-ubyte.gz").write_bytes(b"something else")
    with pytest.raises(DataError, match="corrupt or is another version"):
        datasets.load_images("mnist-test", folder=tmp_path, progress=False)


def test_digits_need_no_file():
    data = datasets.load_images("digits")
    assert data.images.shape == (1797, 1, 8, 8)
    assert int(data.images.max()) == 255
    assert data.labels.unique().tolist() == list(range(10))


def test_names_and_the_registry():
    assert datasets.image_names() == ("digits", "mnist-test", "omniglot-small")
    with pytest.raises(UnknownNameError, match="Did you mean 'digits'"):
        datasets.load_images("digit")
    for files in image_files().values():
        for one in files:
            assert len(one.sha256) == 64
            assert one.address.startswith("https://raw.githubusercontent.com/")


def test_parts_that_do_not_fit():
    images, labels = torch.zeros(2, 1, 3, 3, dtype=torch.uint8), torch.zeros(2, dtype=torch.long)
    with pytest.raises(ShapeError, match="images"):
        datasets.LabelledImages("a", images.float(), labels, ("x",))
    with pytest.raises(ShapeError, match="labels"):
        datasets.LabelledImages("a", images, labels[:1], ("x",))
    with pytest.raises(ShapeError, match="class_groups"):
        datasets.LabelledImages("a", images, labels, ("x",), ("g", "h"))
    with pytest.raises(UnknownNameError, match="groups"):
        datasets.LabelledImages("a", images, labels, ("x",), ("g",)).of_groups(["h"])


@pytest.mark.data
def test_the_real_characters(data_folder):
    data = datasets.load_images("omniglot-small", folder=data_folder, progress=False)
    assert data.images.shape == (4840, 1, 28, 28)
    assert torch.equal(data.labels.bincount(), torch.full((242,), 20))
    assert len(data.groups) == 8
    digits = datasets.load_images("mnist-test", folder=data_folder, progress=False)
    assert digits.images.shape == (10_000, 1, 28, 28)
    assert digits.labels[:5].tolist() == [7, 2, 1, 0, 4]
