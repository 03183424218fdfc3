"""``make bench-batch``: many requests at once, plain and drafting, beside Transformers and vLLM.

Each side serves the same requests to the end, prompts included, at most so many at a time. What
common beginnings save, and what memory comes to, is measured beside it.
"""

from __future__ import annotations

import copy
import functools
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from foredraft.bench import harness, workloads
from foredraft.bench.sides import settle
from foredraft.bench.vllm_side import VllmSide, VllmSides
from foredraft.config import EngineConfig
from foredraft.control.cost_table import CostTable
from foredraft.engine.engine import Engine
from foredraft.engine.llm import LLM
from foredraft.engine.request_state import RequestState
from foredraft.model.loader import Target
from foredraft.params import SamplingParams, SpeculationParams

_CONCURRENCY = (1, 2, 4, 8, 16, 32)
_CONTINUOUS_AT = (1, 16)
"""Where Transformers' continuous batching is measured: it takes as long as all others together."""

_KINDS = ("copy", "chat")
_NUM_TOKENS = 64
_LEAST_REQUESTS, _TIMES_OVER = 8, 3
"""Requests come three times over: were they all served at once from first to last, the slowest of
them would decide how long it takes, and what is saved in the others would count for nothing."""

_SIDES = {
    "plain": SpeculationParams("none", 0),
    "auto": SpeculationParams("auto"),
}
_PREFIX_TOKENS, _PREFIX_REQUESTS = 768, 6
_LONGEST = 2048
"""Longest text that vLLM is told to expect."""

_BOUND_TOKENS, _BOUND_REQUESTS = 6000, 24


def run(model: str, rounds: int, vllm: Path | None = None) -> dict[str, Any]:
    """Measure everything; return the report.

    Args:
        model: The target.
        rounds: Interleaved rounds.
        vllm: Python of an environment that has vLLM, to serve beside; ``None`` leaves it out.
    """
    with harness.Progress("bench batch") as progress:
        progress("loading")
        llm = LLM(model, notify=progress.say, reuse_prefixes=False)
        target = llm.engine.target
        theirs = _load_transformers(target, progress)
        has_continuous = _has_continuous(theirs, progress)
        progress("warming up")
        settle(llm.engine, 16, _NUM_TOKENS, 8)
        cells: list[dict[str, Any]] = []
        with (
            tempfile.TemporaryDirectory() as logs,
            VllmSides(
                vllm,
                theirs.config.name_or_path,
                str(target.dtype).removeprefix("torch."),
                min(_LONGEST, target.max_model_len),
                max(_CONCURRENCY),
                Path(logs),
                progress.say,
                progress,
            ) as others,
        ):
            for kind in _KINDS:
                for concurrency in _CONCURRENCY:
                    cells.append(
                        _cell(
                            llm, theirs, has_continuous, others, kind, concurrency, rounds, progress
                        )
                    )
                    shown = "  ".join(f"{n} {v:.2f}" for n, v in cells[-1]["speedup"].items())
                    progress.say(f"{kind:5} {concurrency:2} at once: {shown}")
        prefix = _prefix(llm, rounds, progress)
        memory = _memory(target, progress)
        summary = _summary(cells, prefix, memory)
        for name, value in summary.items():
            progress.say(f"{name:28} {value if value is None else round(value, 3)}")
    return harness.report("batch", [*cells, prefix, memory], summary)


def _load_transformers(target: Target, progress: harness.Progress) -> Any:
    from transformers import AutoModelForCausalLM

    from foredraft.model.loader import resolve_source

    progress("loading the model in Transformers")
    source = resolve_source(target.name, target.dtype, progress.say)
    return AutoModelForCausalLM.from_pretrained(source, dtype=target.dtype).eval()


def _cell(
    llm: LLM,
    theirs: Any,
    has_continuous: bool,
    others: Mapping[str, VllmSide],
    kind: str,
    concurrency: int,
    rounds: int,
    progress: harness.Progress,
) -> dict[str, Any]:
    """One kind of work with so many requests at once."""
    num_requests = max(_LEAST_REQUESTS, _TIMES_OVER * concurrency)
    prompts = workloads.prompts_of(kind, workloads.MOST_PROMPTS)
    ids = [llm.encode(prompts[index % len(prompts)]) for index in range(num_requests)]
    latencies: dict[str, list[float]] = {name: [] for name in _SIDES}
    firsts: dict[str, list[float]] = {name: [] for name in _SIDES}
    # Each side has an engine of its own, and a new one every round: what it learns is of the
    # requests of this round alone. What passes cost here is known from the first.
    config = EngineConfig(max_num_requests=concurrency, reuse_prefixes=False)
    tables: dict[str, CostTable] = {}

    def ours(name: str) -> float:
        engine = Engine(config, target=llm.engine.target)
        if name in tables:
            engine.controller.cost_table = copy.deepcopy(tables[name])
        started = time.perf_counter()
        states = _serve(engine, ids, _SIDES[name])
        if engine.controller.cost_table is not None:
            tables.setdefault(name, engine.controller.cost_table)
        seconds = time.perf_counter() - started
        latencies[name] += [state.stats.elapsed_s for state in states]
        firsts[name] += [state.stats.first_token_s for state in states]
        return sum(state.stats.num_tokens for state in states) / seconds

    def transformers() -> float:
        started = time.perf_counter()
        for first in range(0, num_requests, concurrency):
            _their_batch(theirs, ids[first : first + concurrency])
        return num_requests * _NUM_TOKENS / (time.perf_counter() - started)

    sides: dict[str, Callable[[], float]] = {
        name: (lambda name=name: ours(name))  # type: ignore[misc]
        for name in _SIDES
    }
    sides["transformers"] = transformers
    if has_continuous and concurrency in _CONTINUOUS_AT:
        sides["transformers continuous"] = functools.partial(
            _their_continuous, theirs, ids, concurrency
        )
    for name, other in others.items():
        sides[name] = functools.partial(other.serve, ids, concurrency, _NUM_TOKENS)
    rates = harness.interleave(
        sides, rounds, tell=lambda text: progress(f"{kind}, {concurrency} at once, {text}")
    )
    return {
        "what": "served",
        "kind": kind,
        "concurrency": concurrency,
        "tokens_per_s": {name: harness.spread(values) for name, values in rates.items()},
        "speedup": {name: harness.ratio(values, rates["plain"]) for name, values in rates.items()},
        "latency_s": {name: harness.spread(values) for name, values in latencies.items()},
        "first_token_s": {name: harness.spread(values) for name, values in firsts.items()},
    }


def _serve(
    engine: Engine, ids: Sequence[np.ndarray], speculation: SpeculationParams
) -> list[RequestState]:
    """Serve every prompt to the end."""
    sampling = SamplingParams(max_tokens=_NUM_TOKENS, ignore_eos=True)
    states = [engine.request_state(engine.add(prompt, sampling, speculation)) for prompt in ids]
    while engine.has_work:
        engine.step()
    return states


def _their_batch(theirs: Any, ids: Sequence[np.ndarray]) -> None:
    """The same prompts by ``generate``, padded on the left."""
    longest = max(len(prompt) for prompt in ids)
    inputs = torch.zeros((len(ids), longest), dtype=torch.int64)
    mask = torch.zeros_like(inputs)
    for row, prompt in enumerate(ids):
        inputs[row, longest - len(prompt) :] = torch.from_numpy(prompt)
        mask[row, longest - len(prompt) :] = 1
    with torch.inference_mode():
        theirs.generate(
            inputs.to(theirs.device),
            attention_mask=mask.to(theirs.device),
            do_sample=False,
            max_new_tokens=_NUM_TOKENS,
            eos_token_id=None,
            pad_token_id=0,
        )


def _has_continuous(theirs: Any, progress: harness.Progress) -> bool:
    """Whether Transformers' continuous batching runs here."""
    progress("trying Transformers' continuous batching")
    try:
        _their_continuous(theirs, [np.arange(5, 9)], 1)
    except Exception as error:  # noqa: BLE001 - it raises what it likes, and is not ours
        what = f"{type(error).__name__}: {error}".splitlines()[0][:100]
        progress.say(
            f"Transformers' continuous batching does not run here, so it is left out ({what})"
        )
        return False
    return True


def _their_continuous(theirs: Any, ids: Sequence[np.ndarray], concurrency: int) -> float:
    """The same prompts by ``generate_batch``, so many at a time; tokens per second."""
    from transformers import GenerationConfig

    config = GenerationConfig(
        do_sample=False, max_new_tokens=_NUM_TOKENS, eos_token_id=-1, pad_token_id=0
    )
    started = time.perf_counter()
    num_tokens = 0
    for first in range(0, len(ids), concurrency):
        part = [prompt.tolist() for prompt in ids[first : first + concurrency]]
        outputs = theirs.generate_batch(part, generation_config=config)
        if len(outputs) < len(part):
            raise RuntimeError(f"{len(outputs)} of {len(part)} requests came back")
        num_tokens += sum(len(output.generated_tokens) for output in outputs.values())
    return num_tokens / (time.perf_counter() - started)


def _prefix(llm: LLM, rounds: int, progress: harness.Progress) -> dict[str, Any]:
    """Requests that share a long beginning, one after the other: time to the first token."""
    target = llm.engine.target
    rng = np.random.default_rng(0)
    most = min(1000, target.vocab_size - 1)
    texts = [rng.integers(1, most, _PREFIX_TOKENS) for _ in range(2)]
    tails = [rng.integers(1, most, 24) for _ in range(_PREFIX_REQUESTS)]
    engines = {
        name: Engine(EngineConfig(reuse_prefixes=is_warm), target=target)
        for name, is_warm in (("cold", False), ("warm", True))
    }
    sampling = SamplingParams(max_tokens=1, ignore_eos=True)

    def side(name: str, number: int) -> float:
        times = []
        for index, tail in enumerate(tails):
            prompt = np.concatenate([texts[number % 2], tail])
            started = time.perf_counter()
            engines[name].add(prompt, sampling, _SIDES["plain"])
            while engines[name].has_work:
                engines[name].step()
            if index:  # the first has nothing to begin from
                times.append(time.perf_counter() - started)
        return statistics.median(times)

    counters = {"cold": 0, "warm": 0}

    def timed(name: str) -> float:
        counters[name] += 1
        engines[name].scheduler.drop_prefixes()
        return side(name, counters[name])

    times = harness.interleave(
        {"cold": lambda: timed("cold"), "warm": lambda: timed("warm")}, rounds, tell=progress
    )
    return {
        "what": f"a common beginning of {_PREFIX_TOKENS} tokens",
        "first_token_s": {name: harness.spread(values) for name, values in times.items()},
        "saved": 1 - harness.ratio(times["warm"], times["cold"]),
        "share_of_prompt": _PREFIX_TOKENS / (_PREFIX_TOKENS + 24),
    }


def _memory(target: Target, progress: harness.Progress) -> dict[str, Any]:
    """Requests that want far more memory than the bound: what is counted, what is resident."""
    progress("memory")
    probe = Engine(EngineConfig(max_num_requests=1), target=target)
    bound = _BOUND_TOKENS * probe.cache.bytes_per_row
    config = EngineConfig(max_num_requests=_BOUND_REQUESTS, kv_cache_gb=bound / 2**30)
    engine = Engine(config, target=target)
    rng = np.random.default_rng(1)
    most = min(1000, target.vocab_size - 1)
    sampling = SamplingParams(max_tokens=200, ignore_eos=True)
    process = psutil.Process()
    for _ in range(_BOUND_REQUESTS):
        engine.add(rng.integers(1, most, 400), sampling, _SIDES["auto"])
    before = process.memory_info().rss
    counted = resident = 0
    while engine.has_work:
        engine.step()
        counted = max(counted, engine.cache.bytes_in_use)
        resident = max(resident, process.memory_info().rss - before)
    return {
        "what": "memory",
        "bytes_bound": bound,
        "bytes_counted": counted,
        "bytes_resident_more": resident,
        "num_preemptions": engine.scheduler.num_preemptions,
    }


def _summary(
    cells: Sequence[dict[str, Any]], prefix: dict[str, Any], memory: dict[str, Any]
) -> dict[str, Any]:
    at_16 = [cell["speedup"] for cell in cells if cell["concurrency"] == 16]
    return {
        "min_auto_vs_plain": min(cell["speedup"]["auto"] for cell in cells),
        "plain_b16_vs_transformers": min(1 / speedup["transformers"] for speedup in at_16),
        "prefix_hit_saving": prefix["saved"],
        "peak_memory_vs_bound": memory["bytes_counted"] / memory["bytes_bound"],
    }
