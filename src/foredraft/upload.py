"""Arrays of the host to the device, without waiting for what the device is doing.

A plain copy to a CUDA device makes the host wait until it is through with all that it was given;
from pinned memory it only joins the queue. A step waits once: for the tokens that were accepted.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


def upload(array: np.ndarray[Any, Any], device: torch.device) -> torch.Tensor:
    """An array as a tensor on a device; on a CPU it shares the array's memory."""
    tensor = torch.from_numpy(array)
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
