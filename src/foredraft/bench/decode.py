"""``make bench-decode``: what decoding costs here, each figure against its baseline.

Plain decoding against Transformers, n-gram drafting against plain decoding, the price of a verify
pass, the host's share of a step, and memory.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import psutil
import torch

from foredraft.bench import harness, workloads
from foredraft.engine.llm import LLM
from foredraft.params import SamplingParams, SpeculationParams
from foredraft.plan.trace import trace_line
from foredraft.types import DraftBatch, Request, Segment, StepPlan

_PLAIN = SpeculationParams("none", 0)
_NGRAM = SpeculationParams("ngram", 8)
_NUM_PLAIN_TOKENS = 64
_MAX_TOKENS = 256
_MAX_CHAT_TOKENS = 128
_ROWS = (2, 4, 8, 16)
_VERIFY_CONTEXT = 300


def run(
    model: str, rounds: int, trace: Callable[[list[str]], None] = lambda lines: None
) -> dict[str, Any]:
    """Measure everything on ``model`` in the dtype the machine prefers; return the report.

    Args:
        model: The target.
        rounds: Interleaved rounds.
        trace: Given the trace lines of every request that drafted.
    """
    with harness.Progress("bench decode") as progress:
        progress("loading")
        llm = LLM(model, notify=progress.say, reuse_prefixes=False)
        cells: list[dict[str, Any]] = []
        summary: dict[str, Any] = {}
        _verify_cost(llm, rounds, cells, summary, progress)
        _workloads(llm, rounds, cells, summary, progress, trace)
        _memory(llm, cells, summary, progress)
        _against_transformers(llm, rounds, cells, summary, progress)
        for line in _table(summary):
            progress.say(line)
    order = (
        "plain_vs_transformers",
        "host_share",
        "ngram_vs_plain_summarize",
        "ngram_vs_plain_edit",
        "verify_cost",
    )
    summary = {name: summary[name] for name in order} | summary
    return harness.report("decode", cells, summary)


def _greedy(num_tokens: int, ignore_eos: bool = False) -> SamplingParams:
    return SamplingParams(max_tokens=num_tokens, ignore_eos=ignore_eos)


def _against_transformers(
    llm: LLM,
    rounds: int,
    cells: list[dict[str, Any]],
    summary: dict[str, Any],
    progress: harness.Progress,
) -> None:
    """The same prompt, dtype and number of tokens by ``generate`` of Transformers, as it comes."""
    from transformers import AutoModelForCausalLM

    from foredraft.model.loader import resolve_source

    target = llm.engine.target
    progress("loading the model in Transformers")
    source = resolve_source(target.name, target.dtype, progress.say)
    theirs = AutoModelForCausalLM.from_pretrained(source, dtype=target.dtype).eval()
    ids = llm.encode(workloads.as_chat(workloads.CHAT))
    inputs = torch.from_numpy(ids)[None].to(theirs.device)

    def transformers() -> float:
        started = time.perf_counter()
        out = theirs.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            do_sample=False,
            max_new_tokens=_NUM_PLAIN_TOKENS,
            eos_token_id=None,
            pad_token_id=0,
        )
        return (out.shape[1] - inputs.shape[1]) / (time.perf_counter() - started)

    def foredraft() -> float:
        started = time.perf_counter()
        output = llm.generate(ids, _greedy(_NUM_PLAIN_TOKENS, ignore_eos=True), _PLAIN)[0]
        return len(output.token_ids) / (time.perf_counter() - started)

    sides = {"transformers": transformers, "foredraft plain": foredraft}
    rates = harness.interleave(sides, rounds, tell=progress)
    summary["plain_vs_transformers"] = harness.ratio(
        rates["foredraft plain"], rates["transformers"]
    )
    cells += [
        {"what": "plain", "side": name, "tokens_per_s": harness.spread(values)}
        for name, values in rates.items()
    ]


def _workloads(
    llm: LLM,
    rounds: int,
    cells: list[dict[str, Any]],
    summary: dict[str, Any],
    progress: harness.Progress,
    trace: Callable[[list[str]], None],
) -> None:
    """N-gram drafting against plain decoding, prompt included, to the model's own end."""
    host_shares = []
    for name, text, num_tokens in (
        ("summarize", workloads.SUMMARIZE, _MAX_TOKENS),
        ("edit", workloads.EDIT, _MAX_TOKENS),
        ("chat", workloads.CHAT, _MAX_CHAT_TOKENS),
    ):
        outputs: dict[str, Any] = {}
        generate = functools.partial(
            _generate, llm, workloads.as_chat(text), _greedy(num_tokens), outputs
        )
        sides = {
            f"{name} plain": functools.partial(generate, "plain", _PLAIN),
            f"{name} ngram": functools.partial(generate, "ngram", _NGRAM),
        }
        rates = harness.interleave(sides, rounds, tell=progress)
        plain, ngram = rates[f"{name} plain"], rates[f"{name} ngram"]
        summary[f"ngram_vs_plain_{name}"] = harness.ratio(ngram, plain)
        drafted = outputs["ngram"].stats
        beside = outputs["plain"].stats
        trace(
            [
                trace_line(
                    "ngram",
                    1,
                    0.0,
                    drafted.num_tokens,
                    drafted.steps,
                    drafted.elapsed_s - drafted.first_token_s,
                    (beside.elapsed_s - beside.first_token_s) / beside.num_verify_steps,
                    is_auto=_NGRAM.is_auto,
                    model=llm.engine.target.name,
                )
            ]
        )
        for key, values in (("plain", plain), ("ngram", ngram)):
            stats = outputs[key].stats
            total = stats.draft_s + stats.target_s + stats.verify_s + stats.host_s
            outside = (total - stats.target_s) / total
            if key == "plain":
                host_shares.append(outside)
            cells.append(
                {
                    "what": name,
                    "side": key,
                    "tokens_per_s": harness.spread(values),
                    "num_tokens": stats.num_tokens,
                    "acceptance_length": stats.acceptance_length,
                    "acceptance_by_position": stats.acceptance_by_position,
                    "share_outside_target_pass": outside,
                    "same_text_as_plain": outputs[key].token_ids == outputs["plain"].token_ids,
                }
            )
    summary["host_share"] = statistics.median(host_shares)


def _generate(
    llm: LLM,
    prompt: Any,
    sampling: SamplingParams,
    outputs: dict[str, Any],
    side: str,
    speculation: SpeculationParams,
) -> float:
    """Generate once, keep the output under ``side``, return its tokens per second."""
    outputs[side] = llm.generate(prompt, sampling, speculation)[0]
    return float(outputs[side].stats.tokens_per_s or 0.0)


def _verify_cost(
    llm: LLM,
    rounds: int,
    cells: list[dict[str, Any]],
    summary: dict[str, Any],
    progress: harness.Progress,
) -> None:
    """A target pass over a root and N - 1 draft nodes against one over the root alone."""
    engine = llm.engine
    ids = np.arange(_VERIFY_CONTEXT, dtype=np.int64) % 1000 + 100
    request = Request(
        "bench", ids, SamplingParams(), _PLAIN, 0, engine.target.max_model_len, frozenset()
    )
    slot = engine.cache.allocate()
    prompt = Segment(request, ids[:-1], slot, 0, len(ids) - 1, is_decode=False)
    engine.runner.forward(StepPlan((prompt,)), DraftBatch.empty(1))
    root = Segment(request, ids, slot, len(ids) - 1, 1, is_decode=True)

    def side(num_rows: int) -> float:
        num_nodes = num_rows - 1
        drafts = DraftBatch(
            np.arange(num_nodes, dtype=np.int64) + 200,
            np.arange(num_nodes, dtype=np.int64),
            np.array([0, num_nodes]),
        )
        times = []
        for _ in range(5):
            started = time.perf_counter()
            engine.runner.forward(StepPlan((root,)), drafts)
            times.append(time.perf_counter() - started)
        return statistics.median(times)

    sides = {f"{n} rows": (lambda n=n: side(n)) for n in (1, *_ROWS)}
    times = harness.interleave(sides, 3 * rounds, tell=progress)
    engine.cache.free(slot)
    summary["verify_cost"] = {
        str(n): harness.ratio(times[f"{n} rows"], times["1 rows"]) for n in _ROWS
    }
    cells += [
        {"what": "verify pass", "rows": n, "seconds": harness.spread(times[f"{n} rows"])}
        for n in (1, *_ROWS)
    ]


def _memory(
    llm: LLM, cells: list[dict[str, Any]], summary: dict[str, Any], progress: harness.Progress
) -> None:
    """Memory of keys and values of long requests: what is counted, what is resident, and after."""
    progress("memory")
    engine = llm.engine
    ids = np.arange(2000, dtype=np.int64) % 1000 + 100
    process = psutil.Process()
    before = process.memory_info().rss
    for _ in range(4):
        engine.add(ids, _greedy(4, ignore_eos=True), _PLAIN)
    most_counted = most_resident = 0
    while engine.has_work:
        engine.step()
        if engine.cache.bytes_in_use > most_counted:
            most_counted = engine.cache.bytes_in_use
            most_resident = process.memory_info().rss - before
    after = process.memory_info().rss - before
    cells.append(
        {
            "what": "memory",
            "kv_bytes_counted": most_counted,
            "bytes_resident_more": most_resident,
            "bytes_resident_more_after": after,
            "kv_bytes_counted_after": engine.cache.bytes_in_use,
            "kv_bytes_bound": engine.max_kv_bytes,
            "kv_bytes_reserved_as_addresses": engine.cache.bytes_per_row
            * engine.cache.num_slots
            * engine.cache.capacity,
        }
    )
    summary["kv_bytes_counted_after"] = engine.cache.bytes_in_use


def _table(summary: dict[str, Any]) -> list[str]:
    cost = ", ".join(f"{rows} rows {ratio:.2f}" for rows, ratio in summary["verify_cost"].items())
    return [
        f"plain decoding against Transformers generate  {summary['plain_vs_transformers']:.2f}x",
        f"outside the target pass at batch 1            {summary['host_share']:.1%}",
        f"n-gram against plain, summarizing             {summary['ngram_vs_plain_summarize']:.2f}x",
        f"n-gram against plain, editing                 {summary['ngram_vs_plain_edit']:.2f}x",
        f"n-gram against plain, chat                    {summary['ngram_vs_plain_chat']:.2f}x",
        f"verify pass against one row                   {cost}",
    ]
