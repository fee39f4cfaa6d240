"""Small files in the original formats of image data sets."""

from __future__ import annotations

import gzip
import hashlib
import io
import struct
import tarfile
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy
import pytest
from PIL import Image

from benchmarks.data.files import DataFile, data_files
from benchmarks.data.images import PITCHES, YAWS


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


def characters(path, alphabets, count=2):
    """An archive of Omniglot's layout: characters of alphabets, 20 drawings each."""
    entries = {
        f"{path.stem}/{alphabet}/character{c:02d}/{c:04d}_{k:02d}.png": drawing(
            (5 * c + k) % 20, 28
        )
        for alphabet in alphabets
        for c in range(1, count + 1)
        for k in range(1, 21)
    }
    return archive(path, entries)


def register(patch: pytest.MonkeyPatch, folder: Path, names: Iterable[str]) -> None:
    """Files in a data folder become those of the registry, until the patch is undone."""

    def add_checksum(file: DataFile) -> DataFile:
        body = (folder / file.folder / file.file).read_bytes()
        return replace(file, checksum=f"sha256:{hashlib.sha256(body).hexdigest()}")

    for name in names:
        patch.setitem(data_files(), name, tuple(map(add_checksum, data_files()[name])))


def register_arrays(patch: pytest.MonkeyPatch, folder: Path, name: str, **arrays) -> Path:
    """Arrays become the images of that name, in a numpy file of the data folder."""
    [file] = data_files()[name]
    path = folder / file.folder / file.file
    path.parent.mkdir(exist_ok=True)
    numpy.savez(path, **arrays)
    register(patch, folder, [name])
    return path


def emnist_archive(path, subset="test", split="byclass", images=None, labels=(0, 61)):
    images = numpy.arange(24).reshape(2, 3, 4) if images is None else images
    bodies = {"images-idx3": images, "labels-idx1": numpy.array(labels)}
    entries = {
        f"gzip/emnist-{split}-{subset}-{kind}-ubyte.gz": gzip.compress(idx(body))
        for kind, body in bodies.items()
    }
    return archive(path, {"gzip/": b"", "gzip/other.gz": b"not read", **entries})


CIFAR = {
    "cifar10": ("cifar-10-batches-bin/data_batch_2.bin", "cifar-10-batches-bin/data_batch_1.bin"),
    "cifar10-test": ("cifar-10-batches-bin/test_batch.bin",),
    "cifar100": ("cifar-100-binary/train.bin",),
    "cifar100-test": ("cifar-100-binary/test.bin",),
}
"""Files of the archives, as they follow each other in them."""


def cifar(
    patch: pytest.MonkeyPatch, folder: Path, name: str, labels: Sequence[int]
) -> numpy.ndarray:
    """Registers an archive whose files have an image of noise for each label; returns the images.

    Args:
        patch: Undoes the registration.
        folder: The data folder.
        name: ``"cifar10"`` or ``"cifar100"``.
        labels: Classes, from 0; of CIFAR-100 each is preceded by its group's.
    """
    images = numpy.random.default_rng(0).integers(0, 256, (len(labels), 3072), dtype=numpy.uint8)
    columns = [numpy.array(labels, dtype=numpy.uint8)[:, None], images]
    groups = [columns[0] // 5] if name == "cifar100" else []
    body = numpy.concatenate([*groups, *columns], 1)
    test = f"{name}-test"
    entries = {file: body.tobytes() for file in [*CIFAR[name], *CIFAR[test]]}
    [file] = data_files()[name]
    (folder / file.folder).mkdir(exist_ok=True)
    tar_archive(folder / file.folder / file.file, {"readme.html": b"not read", **entries})
    register(patch, folder, [name, test])
    return images.reshape(-1, 3, 32, 32)


def photograph(colour, size=(40, 30)):
    body = io.BytesIO()
    Image.new("RGB", size, colour).save(body, "JPEG", quality=100, subsampling=0)
    return body.getvalue()


def tar_archive(path, entries):
    mode = "w:gz" if path.suffix in (".tgz", ".gz") else "w"
    with tarfile.open(path, mode) as file:
        for name, body in entries.items():
            info = tarfile.TarInfo(name)
            info.size = len(body)
            file.addfile(info, io.BytesIO(body))
    return path


def birds(path, species=8, each=2):
    """An archive of the layout of CUB-200-2011: species of one colour each."""
    entries = {"attributes.txt": b"1 has_bill", "CUB_200_2011/images.txt": b"1 a.jpg"}
    for index in reversed(range(species)):
        for k in range(each):
            name = f"CUB_200_2011/images/{index + 1:03d}.Bird_{index}/Bird_{index}_{k:04d}.jpg"
            entries[name] = photograph((20 * index, 100, 200))
    return tar_archive(path, entries)


def mini_imagenet(path, classes=(6, 5, 5), each=2):
    """An archive of the layout of miniImageNet: classes of one colour each."""
    entries, index = {}, 0
    for file, count in zip(("train", "val", "test"), classes, strict=True):
        rows = ["filename,label"]
        for _ in range(count):
            for k in range(each):
                name = f"n{index:08d}{k:08d}.jpg"
                rows.append(f"{name},n{index:08d}")
                entries[f"mini/images/{name}"] = photograph((10 * index, 50, 0))
            index += 1
        entries[f"mini/{file}.csv"] = "\n".join(rows).encode()
    return tar_archive(path, entries)


def head_pose_folder(folder, people=("AnnA", "BobB"), size=6):
    """A picture of one colour each: red the person, green the pitch, blue the yaw."""
    for index, person in enumerate(people):
        home = folder / "qmul" / "images" / f"{person}Grey"
        home.mkdir(parents=True)
        for pitch in PITCHES:
            for yaw in YAWS:
                image = Image.new("RGB", (size, size), (100 * index, 2 * pitch, yaw))
                image.save(home / f"{person}_{pitch:03d}_{yaw:03d}.jpg", quality=100, subsampling=0)
    return folder
