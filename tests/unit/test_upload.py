"""A step waits for the device once: to read what was picked.

There is no device here, so what would wait for one is counted: reading a tensor's numbers, and the
operations whose result has a size that depends on them. The branches for other devices are taken
where picking, filters and chances have branches of their own.
"""

from __future__ import annotations

import re
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import foredraft
from foredraft.control import controller
from foredraft.params import SamplingParams, SpeculationParams
from foredraft.sampling import pick as picking
from foredraft.sampling import processors
from foredraft.upload import upload
from foredraft.verify import step as verifying
from tests.tiny import engine, family_target

SOURCE = Path(foredraft.__file__).resolve().parent
READS = {"cpu", "item", "tolist", "__bool__", "__float__", "__int__", "__index__"}
SIZED_BY_NUMBERS = {"nonzero", "masked_select", "_unique2", "unique_dim", "_local_scalar_dense"}

FEATURES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.9},
    "filters": {"temperature": 0.9, "top_k": 30, "top_p": 0.9, "min_p": 0.01, "top_n_sigma": 3.0},
    "typical": {"temperature": 0.9, "typical_p": 0.7},
    "penalties": {"repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.2},
    "bias": {"logit_bias": {5: 4.0, 9: 3.5}},
    "bans": {"allowed_token_ids": tuple(range(2, 90)), "bad_token_ids": (7, (8, 8))},
    "min tokens": {"min_tokens": 12},
}


class Waits(TorchFunctionMode):
    """Counts, by the line of the sources that asked, what would wait for a device."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def note(self, what: str) -> None:
        for frame in reversed(traceback.extract_stack()):
            if str(SOURCE) in frame.filename:
                self.found[f"{Path(frame.filename).name}: {frame.line} ({what})"] += 1
                return

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in READS:
            self.note(name)
            with torch._C.DisableTorchFunction():
                return func(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


class SizedByNumbers(TorchDispatchMode):
    """Beneath: operations that must know numbers to know their result's size."""

    def __init__(self, waits: Waits) -> None:
        super().__init__()
        self.waits = waits

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        indices = args[1] if name in ("index", "index_put", "index_put_") else ()
        has_mask = any(one is not None and one.dtype == torch.bool for one in indices)
        if name in SIZED_BY_NUMBERS or has_mask:
            self.waits.note(name)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def as_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifying, "pick", picking._pick_torch)
    monkeypatch.setattr(processors, "cuts", processors.cuts_by_sorting)
    monkeypatch.setattr(controller, "may_read", lambda target: False)


@pytest.mark.usefixtures("as_on_a_device")
@pytest.mark.parametrize("way", ["none", "ngram", "auto"])
@pytest.mark.parametrize("feature", FEATURES)
def test_a_step_waits_once(feature: str, way: str) -> None:
    the_engine = engine(family_target("llama"), kv_layout="blocks")
    sampling = SamplingParams(max_tokens=16, seed=3, ignore_eos=True, **FEATURES[feature])
    number = {"none": 0, "ngram": 4, "auto": "auto"}[way]
    speculation = SpeculationParams(way, number)
    for first in (3, 9):
        the_engine.add([first, 4, 5, 6] * 5, sampling, speculation)
    num_drafted = num_steps = 0
    waits = Waits()
    while the_engine.has_work:
        with waits, SizedByNumbers(waits):
            the_engine.step()
        num_steps += 1
        assert the_engine.last_step is not None
        num_drafted += the_engine.last_step.num_draft_tokens
    assert sum(waits.found.values()) == num_steps, waits.found
    assert (num_drafted > 0) == (way != "none")


def test_what_waits_is_counted() -> None:
    """The counting itself: a mask, a number, a copy; and nothing where nothing is read."""
    rows = torch.arange(6.0)
    waits = Waits()
    waits.note = lambda what: waits.found.update([what])  # type: ignore[method-assign]
    with waits, SizedByNumbers(waits):
        rows[upload(np.array([1, 2]), rows.device)] += 1
        assert not waits.found
        rows[rows > 3] = 0
        float(rows[0])
        rows.cpu()
        rows.nonzero()
    assert set(waits.found) >= {"index_put_", "cpu", "nonzero"}
    assert waits.found["__float__"] + waits.found["_local_scalar_dense"] >= 1


def test_arrays_are_brought_over_in_one_place() -> None:
    """A plain copy waits: each goes through ``upload``."""
    plain = re.compile(r"from_numpy\([^\n]*\)\.to\(|torch\.(as_)?tensor\([^\n]*device=")
    layers = ("model", "engine", "sampling", "verify", "drafters", "control")
    found = [
        f"{path.name}: {line.strip()}"
        for layer in layers
        for path in sorted((SOURCE / layer).glob("*.py"))
        for line in path.read_text(encoding="utf-8").splitlines()
        if plain.search(line)
    ]
    assert not found
