"""Data sets by name, whose files are checked against registries: regression and images.

``load`` loads a regression data set and ``fetch`` downloads its original file; ``split`` draws a
random split, ``load_published_splits`` loads those of published results. ``load_images`` loads
labelled images, ``load_head_poses`` pictures of heads at known angles. Files are kept in the folder
named by ``$GPCLML_DATA``, or in the user's cache if it is not set.
"""

from gpclml.datasets.images import (
    HeadPoses,
    LabelledImages,
    image_names,
    load_cub,
    load_emnist,
    load_head_poses,
    load_images,
    load_mini_imagenet,
    load_omniglot,
)
from gpclml.datasets.regression import (
    RegressionData,
    TrainTestSplit,
    load,
    load_published_split,
    load_published_splits,
    names,
    num_published_splits,
    split,
    subset,
)
from gpclml.datasets.sources import UciSource, fetch, uci_source, uci_sources

__all__ = [
    "HeadPoses",
    "LabelledImages",
    "RegressionData",
    "TrainTestSplit",
    "UciSource",
    "fetch",
    "image_names",
    "load",
    "load_cub",
    "load_emnist",
    "load_head_poses",
    "load_images",
    "load_mini_imagenet",
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
