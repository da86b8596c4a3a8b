"""Choice of the device that a benchmark runs on."""

import argparse

import torch

from alignedserve.core.errors import ConfigError
from alignedserve.runtime.device.devices import CPU, CUDA, cuda_obstacle

AUTO = "auto"


def add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default=AUTO, help="auto (a GPU where there is one), cpu or cuda")


def chosen_device(choice: str) -> torch.device:
    """Return the device named auto, cpu or cuda.

    Raises ConfigError for another name and for a GPU that is not there.
    """
    if choice not in (AUTO, CPU, CUDA):
        raise ConfigError(f"device {choice!r} must be auto, cpu or cuda.")
    obstacle = cuda_obstacle()
    if choice == CUDA and obstacle is not None:
        raise ConfigError(f"device cuda cannot be had: {obstacle}")
    return torch.device(CPU if choice == CPU or obstacle is not None else CUDA)
