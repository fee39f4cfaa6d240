"""Few-shot learning: tasks, backbones, Deep Kernel Transfer, its training and evaluation."""

from gpclml.meta.backbones import Conv3, Conv4, ConvBlocks, ResNet10
from gpclml.meta.deep_kernel_transfer import KERNELS, DeepKernelTransfer
from gpclml.meta.episodes import Episodes
from gpclml.meta.evaluation import (
    Tasks,
    TaskScores,
    class_probabilities,
    evaluate_tasks,
    fit_task_temperature,
)
from gpclml.meta.tasks import (
    AugmentedTasks,
    HeadPoseTasks,
    ImageTasks,
    PeriodicTasks,
    RotationTasks,
)
from gpclml.meta.training import TasksFitResult, load_model, train_on_tasks

__all__ = [
    "KERNELS",
    "AugmentedTasks",
    "Conv3",
    "Conv4",
    "ConvBlocks",
    "DeepKernelTransfer",
    "Episodes",
    "HeadPoseTasks",
    "ImageTasks",
    "PeriodicTasks",
    "ResNet10",
    "RotationTasks",
    "TaskScores",
    "Tasks",
    "TasksFitResult",
    "class_probabilities",
    "evaluate_tasks",
    "fit_task_temperature",
    "load_model",
    "train_on_tasks",
]
