"""Settings of every test run."""

from __future__ import annotations

import torch

# The models here are tiny: a second thread costs more than it brings.
torch.set_num_threads(1)
