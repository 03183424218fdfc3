"""``python -m foredraft.bench.gpu_check``: does a machine keep what the arithmetic promises?

Needs no model: random weights of an 8B Llama's shape (or a small one) and the synthetic drafter,
whose acceptance is set. In one run: what a step costs besides the target pass, what a draft token
costs by batch, and the speedup that follows from both beside the one that was measured.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from foredraft.bench import harness
from foredraft.config import ATTENTIONS, CUDA_GRAPHS, KV_LAYOUTS, EngineConfig
from foredraft.engine.engine import Engine
from foredraft.engine.measure import prepared_requests, time_rows
from foredraft.model.loader import Target, prepare_target
from foredraft.params import SamplingParams, SpeculationParams
from foredraft.types import StepStats

_SHAPES: dict[str, dict[str, int]] = {
    "8b": {
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "tiny": {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
}
_DRAFTED = (1, 2, 4, 8, 16)
_NUM_SPECULATIVE = 4
_ROUNDS = 7


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the check; the last line is one JSON object."""
    parser = argparse.ArgumentParser(
        prog="python -m foredraft.bench.gpu_check", description=__doc__
    )
    parser.add_argument("--shape", choices=sorted(_SHAPES), default="8b")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda[:index]")
    parser.add_argument("--dtype", default="auto", help="auto, float32 or bfloat16")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--context", type=int, default=512, help="tokens of each prompt")
    parser.add_argument("--num-tokens", type=int, default=48, help="tokens to write of each")
    parser.add_argument("--acceptance", type=float, default=0.8)
    parser.add_argument("--kv-layout", choices=KV_LAYOUTS, default="auto")
    parser.add_argument("--attention", choices=ATTENTIONS, default="auto")
    parser.add_argument("--cuda-graphs", choices=CUDA_GRAPHS, default="auto")
    given = parser.parse_args(arguments)
    report = run(
        given.shape,
        given.device,
        given.dtype,
        given.batches,
        given.context,
        given.num_tokens,
        given.acceptance,
        {
            "kv_layout": given.kv_layout,
            "attention": given.attention,
            "cuda_graphs": given.cuda_graphs,
        },
    )
    sys.stdout.write(json.dumps(report) + "\n")


def run(
    shape: str,
    device: str,
    dtype: str,
    batches: Sequence[int],
    context: int,
    num_tokens: int,
    acceptance: float,
    layout: dict[str, str],
) -> dict[str, Any]:
    """Check every batch; return the report.

    Args:
        shape: ``8b`` or ``tiny``.
        device: ``auto``, ``cpu`` or ``cuda[:index]``.
        dtype: ``auto`` (bfloat16 on CUDA, else float32), ``float32`` or ``bfloat16``.
        batches: Requests that decode at once.
        context: Tokens of each prompt.
        num_tokens: Tokens that each request writes.
        acceptance: Of the synthetic drafter.
        layout: Where keys and values lie and how they are read, as ``EngineConfig`` takes it.
    """
    with harness.Progress("gpu check") as progress:
        progress("making the model")
        target = _target(shape, device, dtype, context + num_tokens + 64)
        cells = []
        for batch in batches:
            progress(f"batch {batch}")
            cells.append(_cell(target, batch, context, num_tokens, acceptance, layout))
            progress.say(_line(cells[-1]))
    first = cells[0]
    summary = {
        "step_overhead_ms": 1e3 * first["overhead_s"],
        "overhead_share_b1": first["overhead_s"] / first["plain_step_s"],
        "alpha": {str(cell["batch"]): cell["alpha"] for cell in cells},
        "max_prediction_error": max(
            abs(cell["predicted_speedup"] / cell["speedup"] - 1) for cell in cells
        ),
    }
    return harness.report("gpu check", cells, summary)


def _target(shape: str, device: str, dtype: str, max_model_len: int) -> Target:
    import transformers

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if dtype == "auto":
        dtype = "bfloat16" if device.startswith("cuda") else "float32"
    config = transformers.LlamaConfig(
        **_SHAPES[shape],
        max_position_embeddings=max_model_len,
        tie_word_embeddings=False,
        # Wide enough that the likeliest token leads: else rounding decides what is written.
        initializer_range=0.1 if shape == "tiny" else 0.02,
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    return prepare_target(f"random {shape}", model.eval(), None, max_model_len)


def _cell(
    target: Target,
    batch: int,
    context: int,
    num_tokens: int,
    acceptance: float,
    layout: dict[str, str],
) -> dict[str, Any]:
    """One batch: passes by rows, then plain decoding and drafting of the same texts."""
    config = EngineConfig(
        kv_layout=layout["kv_layout"],
        attention=layout["attention"],
        cuda_graphs=layout["cuda_graphs"],
        max_num_requests=batch,
        reuse_prefixes=False,
        drafter_options={"synthetic": {"acceptance": acceptance}},
    )
    engine = Engine(config, target=target)
    rows = [batch * (1 + number) for number in (0, *_DRAFTED)]
    with prepared_requests(engine.runner, engine.cache, batch, context) as seconds:
        times = {
            number: statistics.median(found)
            for number, found in time_rows(seconds, rows, _ROUNDS).items()
        }
    draft = SpeculationParams("synthetic", _NUM_SPECULATIVE)
    plain_way = SpeculationParams("none", 0)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, target.vocab_size, context) for _ in range(batch)]
    _serve(engine, prompts, draft, num_tokens)  # makes the texts known
    plain = _serve(engine, prompts, plain_way, num_tokens)
    drafted = _serve(engine, prompts, draft, num_tokens)
    again = _serve(engine, prompts, plain_way, num_tokens)
    plain_step = statistics.median(step.total_s for step in (*plain, *again))
    rate = sum(s.num_tokens for s in drafted) / sum(s.total_s for s in drafted)
    plain_rate = sum(s.num_tokens for s in (*plain, *again)) / sum(
        s.total_s for s in (*plain, *again)
    )
    graphs = engine.runner.graphs
    num_waits = _waits_of_a_step(engine, prompts, draft, num_tokens)
    overhead = statistics.median(s.host_s + s.draft_s for s in (*plain, *drafted))
    base = times[batch]
    cost = {n: times[batch * (1 + n)] / base for n in _DRAFTED}
    # Steps as they were drafted, at the price of passes timed alone.
    expected = sum(
        float(np.interp(s.num_rows, sorted(times), [times[n] for n in sorted(times)])) + overhead
        for s in drafted
    )
    tokens = sum(s.num_tokens for s in drafted)
    return {
        "batch": batch,
        "plain_pass_s": base,
        "plain_step_s": plain_step,
        "overhead_s": overhead,
        "waits_per_step": num_waits,
        "num_graphs": 0 if graphs is None else graphs.num_graphs,
        "verify_cost": {str(n): ratio for n, ratio in cost.items()},
        "alpha": (cost[_NUM_SPECULATIVE] - 1) / _NUM_SPECULATIVE,
        "acceptance_rate": sum(s.num_accepted_tokens for s in drafted)
        / max(1, sum(s.num_draft_tokens for s in drafted)),
        "speedup": rate / plain_rate,
        "predicted_speedup": (tokens / expected) / (batch / (base + overhead)),
    }


def _serve(
    engine: Engine, prompts: Sequence[np.ndarray], way: SpeculationParams, num_tokens: int
) -> list[StepStats]:
    """Decode every prompt at once; the steps in which all of them decoded."""
    sampling = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    for prompt in prompts:
        engine.add(prompt, sampling, way)
    steps = []
    while engine.has_work:
        engine.step()
        step = engine.last_step
        if step is not None and step.num_decoding == step.num_segments == len(prompts):
            steps.append(step)
    return steps


def _waits_of_a_step(
    engine: Engine, prompts: Sequence[np.ndarray], way: SpeculationParams, num_tokens: int
) -> float | None:
    """How often a step makes the host wait for the device, as PyTorch counts it; CUDA only."""
    if engine.target.device.type != "cuda":
        return None
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            before = engine.stats.num_steps
            _serve(engine, prompts, way, num_tokens)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    num_waits = sum("synchronizing CUDA operation" in str(one.message) for one in found)
    return num_waits / (engine.stats.num_steps - before)


def _line(cell: dict[str, Any]) -> str:
    costs = ", ".join(f"{n}: {ratio:.2f}" for n, ratio in cell["verify_cost"].items())
    return (
        f"batch {cell['batch']:3}: plain step {1e3 * cell['plain_step_s']:.2f} ms, of it "
        f"{1e3 * cell['overhead_s']:.2f} ms besides the pass; verify by draft tokens {costs}; "
        f"speedup {cell['speedup']:.2f}, predicted {cell['predicted_speedup']:.2f}, at acceptance "
        f"{cell['acceptance_rate']:.2f}"
    )


if __name__ == "__main__":
    main()
