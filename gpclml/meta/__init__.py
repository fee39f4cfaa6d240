"""Few-shot learning: tasks, backbones, Deep Kernel Transfer, its training and evaluation."""

from gpclml.meta.backbones import Conv4, ConvBlocks
from gpclml.meta.deep_kernel_transfer import KERNELS, DeepKernelTransfer
from gpclml.meta.evaluation import (
    TaskScores,
    class_probabilities,
    evaluate_tasks,
    fit_task_temperature,
)
from gpclml.meta.tasks import DatasetTasks, Episodes, ImageTasks, PeriodicTasks, Tasks
from gpclml.meta.training import TasksFitResult, train_on_tasks

__all__ = [
    "KERNELS",
    "Conv4",
    "ConvBlocks",
    "DatasetTasks",
    "DeepKernelTransfer",
    "Episodes",
    "ImageTasks",
    "PeriodicTasks",
    "TaskScores",
    "Tasks",
    "TasksFitResult",
    "class_probabilities",
    "evaluate_tasks",
    "fit_task_temperature",
    "train_on_tasks",
]
