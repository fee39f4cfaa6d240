"""Labelled images and head poses: what is read from the original formats."""

import gzip
from io import BytesIO

import image_files
import numpy
import pytest
import torch
from PIL import Image

from benchmarks.data import image_names, load_head_poses, load_images
from benchmarks.data.files import data_files
from benchmarks.data.images import PITCHES, YAWS
from gpclml.errors import DataError, UnknownNameError

LABELS = numpy.arange(20) % 10
IMAGES = numpy.arange(20 * 28 * 28).reshape(20, 28, 28).astype(numpy.uint8)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    for name in ("omniglot", "mnist", "emnist", "cub", "mini-imagenet", "fashion_mnist"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("GPCLML_DATA", str(tmp_path))
    return tmp_path


def test_digits_need_no_file():
    data = load_images("digits")
    assert data.images.shape == (1797, 1, 8, 8)
    assert int(data.images.max()) == 255
    assert data.labels.unique().tolist() == list(range(10))


def test_an_unknown_name():
    with pytest.raises(UnknownNameError, match="Did you mean 'digits'"):
        load_images("digit")
    assert "boston" not in image_names()


@pytest.mark.parametrize(
    ("name", "home", "start"),
    [("mnist", "mnist", "train"), ("mnist-test", "mnist", "t10k"),
     ("fashion", "fashion_mnist", "train"), ("fashion-test", "fashion_mnist", "t10k")],
)  # fmt: skip
def test_mnist_and_fashion_mnist(folder, monkeypatch, name, home, start):
    for file, body in (("images-idx3", IMAGES), ("labels-idx1", LABELS)):
        (folder / home / f"{start}-{file}-ubyte.gz").write_bytes(
            gzip.compress(image_files.idx(body))
        )
    image_files.register(monkeypatch, folder, [name])
    data = load_images(name)
    assert data.images.shape == (20, 1, 28, 28)
    assert torch.equal(data.images[:, 0], torch.tensor(IMAGES))
    assert data.labels.tolist() == LABELS.tolist()


@pytest.mark.parametrize(("name", "files"), [("cifar10", 2), ("cifar100", 1)])
def test_cifar_is_read_from_its_archive(folder, monkeypatch, name, files):
    labels = [3, 9, 0] if name == "cifar10" else [3, 99, 17]
    images = torch.tensor(image_files.cifar(monkeypatch, folder, name, labels))
    train, test = load_images(name), load_images(f"{name}-test")
    assert torch.equal(test.images, images)
    assert test.labels.tolist() == labels
    assert torch.equal(train.images, images.repeat(files, 1, 1, 1))
    assert train.labels.tolist() == files * labels
    archive = folder / name / data_files()[name][0].file
    archive.write_bytes(archive.read_bytes()[:-1])
    with pytest.raises(DataError, match="corrupt or another version"):
        load_images(name)


def test_emnist_is_upright(folder, monkeypatch):
    image_files.emnist_archive(folder / "emnist" / "gzip.zip")
    image_files.register(monkeypatch, folder, ["emnist"])
    data = load_images("emnist")
    assert data.labels.tolist() == [0, 61]
    assert torch.equal(data.images[1, 0], torch.arange(12, 24).reshape(3, 4).mT.byte())


def test_characters_of_several_archives(folder, monkeypatch):
    first = {
        "small/": b"",
        "small/Greek/character02/0102_01.png": image_files.drawing(50),
        "small/Greek/character01/0101_02.png": image_files.drawing(20),
        "small/Greek/character01/0101_01.png": image_files.drawing(10),
        "small/Braille/character01/0001_01.png": image_files.drawing(80),
    }
    second = {
        "other/Greek/character02/0102_01.png": image_files.drawing(50),  # in both
        "other/Greek/character02/0102_07.png": image_files.drawing(60),
    }
    for k, entries in enumerate((first, second), start=1):
        image_files.archive(folder / "omniglot" / f"images_background_small{k}.zip", entries)
    image_files.register(monkeypatch, folder, ["omniglot-small"])
    data = load_images("omniglot-small")
    assert data.class_groups == ("Braille", "Greek", "Greek")
    assert data.labels.tolist() == [0, 1, 1, 2, 2]
    assert data.images.shape == (5, 1, 28, 28)
    columns = data.images[:, 0].double().mean(1).argmax(-1).tolist()
    assert columns == [22, 3, 6, 14, 17]  # (80, 10, 20, 50, 60 and 4 more) 28 / 105
    assert data.images[0, 0, :, 0].max() == 0  # paper is 0, ink bright
    assert data.select_groups(["Greek"]).labels.tolist() == [1, 1, 2, 2]


def test_birds_by_species_in_three_groups(folder):
    image_files.birds(folder / "cub" / "CUB_200_2011.tgz")
    data = load_images("cub")
    assert data.images.shape == (16, 3, 84, 84)
    groups = ["train", "validation", "train", "test", "train", "validation", "train", "test"]
    assert data.class_groups == tuple(groups)
    assert data.labels.tolist() == [k for k in range(8) for _ in range(2)]
    reds = data.images[:, 0].double().mean((-2, -1))
    assert (reds - 20 * data.labels).abs().max() < 3
    assert [path.name for path in (folder / "cub").iterdir()] == ["CUB_200_2011.tgz"]


def test_the_middle_of_a_photograph_is_taken(folder):
    body, picture = BytesIO(), Image.new("RGB", (160, 80))
    picture.paste((255, 255, 255), (40, 20, 120, 60))  # the middle half of each side
    picture.save(body, "JPEG", quality=100)
    name = "CUB_200_2011/images/001.Bird/a.jpg"
    image_files.tar_archive(folder / "cub" / "CUB_200_2011.tgz", {name: body.getvalue()})
    white = (load_images("cub").images[0, 0] > 127).double()
    assert float(white.mean()) == pytest.approx((48 / 84) ** 2, abs=0.02)  # half of 96 pixels
    assert torch.equal(white, white.flip(0))


def test_the_lists_of_mini_imagenet(folder):
    path = image_files.mini_imagenet(folder / "mini-imagenet" / "mini-imagenet.tar")
    data = load_images("mini-imagenet")
    assert data.images.shape == (32, 3, 84, 84)
    assert data.class_groups == ("train",) * 6 + ("validation",) * 5 + ("test",) * 5
    reds = data.images[:, 0].double().mean((-2, -1))
    assert (reds - 10 * data.labels).abs().max() < 3
    image_files.tar_archive(path, {"train.csv": b"filename,label\na.jpg,bird"})
    with pytest.raises(DataError, match="1 of 1 photographs that are listed are not in it"):
        load_images("mini-imagenet")


@pytest.mark.parametrize("name", ["cifar10-part", "cifar10-part-test", "cyrillic", "fashion-part"])
def test_arrays_of_images(folder, monkeypatch, name):
    channels = 3 if name.startswith("cifar10") else 1
    colours = numpy.stack([IMAGES + channel for channel in range(3)], axis=-1)
    images = IMAGES if channels == 1 else colours.astype(numpy.uint8)
    image_files.register_arrays(monkeypatch, folder, name, images=images, labels=LABELS)
    data = load_images(name)
    assert data.images.shape == (20, channels, 28, 28)
    assert torch.equal(data.images[:, 0], torch.tensor(IMAGES))
    assert torch.equal(
        data.images[:, -1], torch.tensor(images[..., -1] if channels > 1 else images)
    )
    assert data.labels.tolist() == LABELS.tolist()


def test_pictures_by_person_pitch_and_yaw(folder):
    with pytest.raises(DataError, match=r"no people.*no public address"):
        load_head_poses()
    image_files.head_pose_folder(folder)
    data = load_head_poses()
    assert data.people == ("AnnA", "BobB")
    assert data.images.shape == (2, 7, 19, 3, 6, 6)
    colours = data.images[..., 0, 0].int()
    assert (colours[..., 1] - 2 * torch.tensor(PITCHES)[:, None]).abs().max() <= 3
    assert (colours[..., 2] - torch.tensor(YAWS)).abs().max() <= 3
    assert (colours[..., 0] - torch.tensor([0, 100])[:, None, None]).abs().max() <= 3


REAL = {
    "cifar10-part": (10, 800), "cifar10-part-test": (10, 200), "cyrillic": (42, 100),
    "fashion-part": (10, 90), "omniglot-small": (242, 20),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.data
def test_the_real_files(data_folder, monkeypatch):
    monkeypatch.setenv("GPCLML_DATA", str(data_folder))
    for name, (classes, count) in REAL.items():
        if all(file.path.is_file() for file in data_files()[name]):
            counts = load_images(name).labels.bincount()
            assert torch.equal(counts, torch.full((classes,), count)), name
    digits = load_images("mnist-test")
    assert digits.images.shape == (10_000, 1, 28, 28)
    assert digits.labels[:5].tolist() == [7, 2, 1, 0, 4]
