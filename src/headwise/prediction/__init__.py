"""Predicted time and memory of a model on a device: its operators against the device's dense peaks. No torch here."""

from headwise.prediction.allocation import ENGINES, Allocation, allocation
from headwise.prediction.hardware import Device, device, devices
from headwise.prediction.memory import Memory, largest_batch, longest_context, peak_memory
from headwise.prediction.operators import MOST, Operator, Pass, operators
from headwise.prediction.predict import Prediction, predict
from headwise.prediction.roofline import Efficiency, Timed, merged, seconds
from headwise.prediction.work import LayerWork, ModelWork, Reach, Work, model_work

__all__ = [
    "ENGINES",
    "MOST",
    "Allocation",
    "Device",
    "Efficiency",
    "LayerWork",
    "Memory",
    "ModelWork",
    "Operator",
    "Pass",
    "Prediction",
    "Reach",
    "Timed",
    "Work",
    "allocation",
    "device",
    "devices",
    "largest_batch",
    "longest_context",
    "merged",
    "model_work",
    "operators",
    "peak_memory",
    "predict",
    "seconds",
]
