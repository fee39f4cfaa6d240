"""Images that only the benchmarks use."""

from __future__ import annotations

import numpy
import pytest
import torch
from image_files import register_arrays

from benchmarks._images import FILES, load_images
from gpclml.errors import DataError, UnknownNameError

LABELS = numpy.arange(20) % 10
IMAGES = numpy.arange(20 * 28 * 28).reshape(20, 28, 28).astype(numpy.uint8)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("GPCLML_DATA", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("name", FILES)
def test_arrays_of_images(folder, monkeypatch, name):
    channels = 3 if name.startswith("cifar10") else 1
    colours = numpy.stack([IMAGES + channel for channel in range(3)], axis=-1)
    images = IMAGES if channels == 1 else colours.astype(numpy.uint8)
    register_arrays(monkeypatch, folder, name, images=images, labels=LABELS)
    data = load_images(name)
    assert data.images.shape == (20, channels, 28, 28)
    assert torch.equal(data.images[:, 0], torch.tensor(IMAGES))
    assert torch.equal(
        data.images[:, -1], torch.tensor(images[..., -1] if channels > 1 else images)
    )
    assert data.labels.tolist() == LABELS.tolist()
    assert data.class_names == tuple("0123456789")


def test_a_file_without_an_address(folder, monkeypatch):
    with pytest.raises(DataError, match="no public address: put a copy there"):
        load_images("cyrillic")
    path = register_arrays(monkeypatch, folder, "cyrillic", images=IMAGES, labels=LABELS)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataError, match=r"cyrillic42\.npz: corrupt or another version.*sha256:"):
        load_images("cyrillic")
    path.write_bytes(b"something else")
    with pytest.raises(DataError, match="Put a whole copy there"):
        load_images("cyrillic")


def test_objects_are_not_unpickled(folder, monkeypatch):
    objects = numpy.array([{}, {}, {}], dtype=object)
    register_arrays(monkeypatch, folder, "cyrillic", images=IMAGES[:3], labels=objects)
    with pytest.raises(ValueError, match="allow_pickle"):
        load_images("cyrillic")


def test_names_of_the_library_are_known():
    assert load_images("digits").images.shape == (1797, 1, 8, 8)
    with pytest.raises(UnknownNameError, match="Did you mean 'digits'"):
        load_images("digit")


@pytest.mark.data
def test_the_real_files(data_folder, monkeypatch):
    monkeypatch.setenv("GPCLML_DATA", str(data_folder))
    for name, count in (("cifar10-part", 800), ("cifar10-part-test", 200)):
        part = load_images(name)
        assert part.images.shape == (10 * count, 3, 32, 32)
        assert torch.equal(part.labels.bincount(), torch.full((10,), count))
    letters = load_images("cyrillic")
    assert letters.images.shape == (4200, 1, 28, 28)
    assert torch.equal(letters.labels.bincount(), torch.full((42,), 100))
