"""Archives of photographs in their original layouts: what is read, and what is refused."""

from __future__ import annotations

import tarfile
from io import BytesIO

import pytest
import torch
from image_files import archive, birds, mini_imagenet, photograph, tar_archive
from PIL import Image

from gpclml import datasets
from gpclml.errors import ArgumentError, DataError


def test_birds_by_species_in_three_parts(tmp_path):
    data = datasets.load_cub(birds(tmp_path / "CUB_200_2011.tgz"), size=20)
    assert data.images.shape == (16, 3, 20, 20)
    assert data.class_names == tuple(f"{k + 1:03d}.Bird_{k}" for k in range(8))
    parts = ["train", "validation", "train", "test", "train", "validation", "train", "test"]
    assert data.class_groups == tuple(parts)
    assert data.labels.tolist() == [k for k in range(8) for _ in range(2)]
    reds = data.images[:, 0].double().mean((-2, -1))
    assert (reds - 20 * data.labels).abs().max() < 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["CUB_200_2011.tgz"]


def test_the_middle_of_a_photograph_is_taken(tmp_path):
    body, picture = BytesIO(), Image.new("RGB", (80, 40))
    picture.paste((255, 255, 255), (20, 10, 60, 30))  # the middle half of each side
    picture.save(body, "JPEG", quality=100)
    name = "CUB_200_2011/images/001.Bird/a.jpg"
    path = tar_archive(tmp_path / "a.tgz", {name: body.getvalue()})
    white = (datasets.load_cub(path, size=40).images[0, 0] > 127).double()
    assert float(white.mean()) == pytest.approx((23 / 40) ** 2, abs=0.03)  # 46 of 40 pixels
    assert torch.allclose(white, white.flip(0), atol=1)


@pytest.mark.parametrize("packed", [False, True])
def test_the_lists_of_mini_imagenet(tmp_path, packed):
    path = mini_imagenet(tmp_path / "mini-imagenet.tar")
    if packed:
        with tarfile.open(path) as file:
            entries = {one.name: file.extractfile(one).read() for one in file}
        path = archive(tmp_path / "mini-imagenet.zip", entries)
    data = datasets.load_mini_imagenet(path)
    assert data.images.shape == (32, 3, 84, 84)
    assert data.class_groups == ("train",) * 6 + ("validation",) * 5 + ("test",) * 5
    reds = data.images[:, 0].double().mean((-2, -1))
    assert (reds - 10 * data.labels).abs().max() < 3


def test_data_folders(tmp_path):
    for name in ("cub", "mini-imagenet"):
        with pytest.raises(DataError, match="missing, cut short or not a zip or tar archive"):
            datasets.load_images(name, folder=tmp_path)
        (tmp_path / name).mkdir()
    birds(tmp_path / "cub" / "CUB_200_2011.tgz", each=1)
    mini_imagenet(tmp_path / "mini-imagenet" / "mini-imagenet.tar", each=1)
    assert datasets.load_images("cub", folder=tmp_path).images.shape == (8, 3, 84, 84)
    assert datasets.load_images("mini-imagenet", folder=tmp_path).images.shape == (16, 3, 84, 84)


def test_archives_of_another_layout(tmp_path):
    other = tar_archive(tmp_path / "other.tgz", {"readme.txt": b"hello"})
    with pytest.raises(DataError, match=r"no images/<number>\.<species>/<file>\.jpg in it"):
        datasets.load_cub(other)
    with pytest.raises(DataError, match=r"no train\.csv in it"):
        datasets.load_mini_imagenet(other)
    lists = {
        f"{name}.csv": f"filename,label\n{name}.jpg,{name}".encode()
        for name in ("train", "val", "test")
    }
    with pytest.raises(
        DataError, match=r"3 of 3 photographs that are listed are not in it, test\.jpg"
    ):
        datasets.load_mini_imagenet(archive(tmp_path / "lists.zip", lists))
    columns = lists | {"val.csv": b"image\na.jpg"}
    with pytest.raises(DataError, match=r"val\.csv has no rows of filename and label"):
        datasets.load_mini_imagenet(archive(tmp_path / "columns.zip", columns))
    for row in (b"a.jpg,val", b"val.jpg,b"):
        twice = lists | {"test.csv": b"filename,label\n" + row}
        with pytest.raises(DataError, match=r"test\.csv lists .* and another row the same"):
            datasets.load_mini_imagenet(archive(tmp_path / "twice.zip", twice))
    no_picture = {"CUB_200_2011/images/001.Bird/a.jpg": b"no picture"}
    with pytest.raises(DataError, match="not an image that can be read"):
        datasets.load_cub(tar_archive(tmp_path / "damaged.tgz", no_picture))
    path = birds(tmp_path / "cut.tgz")
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(DataError, match="cut short"):
        datasets.load_cub(path)
    with pytest.raises(ArgumentError, match="size"):
        datasets.load_cub(path, size=0)


def test_entries_that_lead_out_and_links(tmp_path):
    for name in ("../a.jpg", "/a.jpg", "x/../../a.jpg"):
        path = tar_archive(tmp_path / "a.tgz", {name: photograph((0, 0, 0))})
        with pytest.raises(DataError, match="leads out of the archive"):
            datasets.load_cub(path)
    link = tarfile.TarInfo("CUB_200_2011/images/001.Bird/a.jpg")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    with tarfile.open(path, "w:gz") as file:
        file.addfile(link)
    with pytest.raises(DataError, match="is a link or a device"):
        datasets.load_cub(path)
    assert list(tmp_path.iterdir()) == [path]
