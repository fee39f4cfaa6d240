"""Data sets by name, checked against registries: regression with its splits, and images.

``load`` gives a regression data set, ``fetch`` the original file of one, ``split`` a random split
and ``load_published_splits`` those that published results were computed with; ``load_images`` gives
labelled images, ``load_head_poses`` faces at known angles. Files are kept under ``$GPCLML_DATA``
where that environment variable is set, else in the user's cache.
"""

from gpclml import explain_moved
from gpclml.datasets._fetch import fetch
from gpclml.datasets._load import load, names
from gpclml.datasets._load_images import image_names, load_emnist, load_images, load_omniglot
from gpclml.datasets._published import (
    load_published_split,
    load_published_splits,
    num_published_splits,
)
from gpclml.datasets.head_poses import HeadPoses, load_head_poses
from gpclml.datasets.labelled_images import LabelledImages
from gpclml.datasets.regression_data import RegressionData
from gpclml.datasets.sources import UciSource, uci_source, uci_sources
from gpclml.datasets.splits import TrainTestSplit, split, subset

__all__ = [
    "HeadPoses",
    "LabelledImages",
    "RegressionData",
    "TrainTestSplit",
    "UciSource",
    "fetch",
    "image_names",
    "load",
    "load_emnist",
    "load_head_poses",
    "load_images",
    "load_omniglot",
    "load_published_split",
    "load_published_splits",
    "names",
    "num_published_splits",
    "split",
    "subset",
    "uci_source",
    "uci_sources",
]

explain_moved(__name__)
