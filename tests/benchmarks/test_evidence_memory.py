"""Images read from disk: what the files hold, and the memory of a step."""

import pytest
import torch

from benchmarks.evidence.memory import STEPS, ImagesOnDisk, memory_of_step, write_images


def test_images_are_read_as_they_were_written(tmp_path):
    write_images(tmp_path, 40)
    data = ImagesOnDisk(str(tmp_path))
    images = torch.stack([data[index][0] for index in range(len(data))])
    labels = torch.tensor([data[index][1] for index in range(len(data))])
    assert images.shape == (40, 3, 32, 32)
    assert -1 <= float(images.min()) < float(images.max()) <= 1
    brightness = torch.stack([images[labels == label].mean() for label in labels.unique()])
    assert bool((brightness.diff() > 0).all())


@pytest.mark.parametrize("step", STEPS)
def test_each_step_takes_the_loader(step, tmp_path):
    write_images(tmp_path, 30)
    assert memory_of_step(step, "cnn-2x1", str(tmp_path)) < 2**28
