"""The check of a machine runs on any, and its figures fit together."""

from __future__ import annotations

import json

import pytest

from foredraft.bench import gpu_check


@pytest.mark.parametrize(
    "layout",
    [
        "",
        " --kv-layout blocks",
        pytest.param(" --attention flex", marks=pytest.mark.slow),
        " --attention flex --cuda-graphs on",
    ],
)
def test_the_check_on_a_small_model(layout: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = f"--shape tiny --device cpu --batches 1 3 --context 40 --num-tokens 30{layout}"
    gpu_check.main([*options.split(" "), "--acceptance", "0.9"])
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    one, three = report["cells"]
    assert (one["batch"], three["batch"]) == (1, 3)
    for cell in (one, three):
        assert 0.5 < cell["acceptance_rate"] <= 1
        assert 0 < cell["overhead_s"] < cell["plain_step_s"]
        assert (cell["num_graphs"] > 0) == layout.endswith("on")
        assert cell["speedup"] > 0 and cell["predicted_speedup"] > 0
    assert report["summary"]["alpha"].keys() == {"1", "3"}
