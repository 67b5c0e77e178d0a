"""Optimizers that train with others."""

from __future__ import annotations

from dlc.compat.hivemind.optim.grad_averager import GradientAverager, GradientAveragerFactory
from dlc.compat.hivemind.optim.grad_scaler import GradScaler
from dlc.compat.hivemind.optim.optimizer import Optimizer
from dlc.compat.hivemind.optim.power_sgd_averager import PowerSGDGradientAverager
from dlc.compat.hivemind.optim.progress_tracker import ProgressTracker
from dlc.compat.hivemind.optim.state_averager import TrainingStateAverager
from dlc.compat.hivemind.optim.training_averager import TrainingAverager

__all__ = [
    "GradScaler",
    "GradientAverager",
    "GradientAveragerFactory",
    "Optimizer",
    "PowerSGDGradientAverager",
    "ProgressTracker",
    "TrainingAverager",
    "TrainingStateAverager",
]
