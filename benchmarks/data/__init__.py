"""Data sets of the benchmarks by name: tables and images, whose files have known checksums.

``load`` loads a regression table, ``split`` draws a random split of its rows and
``load_published_split`` loads one of published results. ``load_images`` loads labelled images,
``load_head_poses`` pictures of heads at known angles. Files are kept in the folder that
``$GPCLML_DATA`` names, or in the user's cache if it is not set, and downloaded if they are missing.
"""

from benchmarks.data.files import VARIABLE, data_folder, fetch, has_files
from benchmarks.data.images import (
    HeadPoses,
    LabelledImages,
    image_names,
    load_head_poses,
    load_images,
)
from benchmarks.data.tables import (
    EMBEDDED,
    RegressionData,
    TrainTestSplit,
    load,
    load_published_split,
    names,
    split,
    subset,
)

__all__ = [
    "EMBEDDED",
    "VARIABLE",
    "HeadPoses",
    "LabelledImages",
    "RegressionData",
    "TrainTestSplit",
    "data_folder",
    "fetch",
    "has_files",
    "image_names",
    "load",
    "load_head_poses",
    "load_images",
    "load_published_split",
    "names",
    "split",
    "subset",
]
