"""Small files in the original formats of image data sets."""

from __future__ import annotations

import gzip
import io
import struct
import zipfile

import numpy
from PIL import Image

from gpclml.datasets.head_poses import PITCHES, YAWS


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


def emnist_archive(path, part="test", split="byclass", images=None, labels=(0, 61)):
    images = numpy.arange(24).reshape(2, 3, 4) if images is None else images
    bodies = {"images-idx3": images, "labels-idx1": numpy.array(labels)}
    entries = {
        f"gzip/emnist-{split}-{part}-{kind}-ubyte.gz": gzip.compress(idx(body))
        for kind, body in bodies.items()
    }
    return archive(path, {"gzip/": b"", "gzip/other.gz": b"not read", **entries})


def head_pose_folder(folder, people=("AnnA", "BobB"), size=6):
    """A picture of one colour each: red the person, green the pitch, blue the yaw."""
    for place, person in enumerate(people):
        home = folder / "qmul" / "images" / f"{person}Grey"
        home.mkdir(parents=True)
        for pitch in PITCHES:
            for yaw in YAWS:
                image = Image.new("RGB", (size, size), (100 * place, 2 * pitch, yaw))
                image.save(home / f"{person}_{pitch:03d}_{yaw:03d}.jpg", quality=100, subsampling=0)
    return folder
