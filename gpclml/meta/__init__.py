"""Learning from few points of a task what many tasks have in common."""

from gpclml.meta._kernels import KERNELS
from gpclml.meta.backbones import Conv3, Conv4, ConvBlocks
from gpclml.meta.class_probabilities import class_probabilities
from gpclml.meta.deep_kernel_transfer import DeepKernelTransfer
from gpclml.meta.episodes import Episodes, ImageTasks
from gpclml.meta.evaluation import Tasks, TaskScores, evaluate_tasks
from gpclml.meta.head_pose_tasks import HeadPoseTasks
from gpclml.meta.regression_tasks import PeriodicTasks, RotationTasks
from gpclml.meta.training import Training, load_model, train_on_tasks

__all__ = [
    "KERNELS",
    "Conv3",
    "Conv4",
    "ConvBlocks",
    "DeepKernelTransfer",
    "Episodes",
    "HeadPoseTasks",
    "ImageTasks",
    "PeriodicTasks",
    "RotationTasks",
    "TaskScores",
    "Tasks",
    "Training",
    "class_probabilities",
    "evaluate_tasks",
    "load_model",
    "train_on_tasks",
]
