"""The same texts from every layout of the cache and every back-end of attention."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from foredraft.config import EngineConfig
from foredraft.errors import ConfigError
from foredraft.model.kv_blocks import BlockKVCache
from foredraft.params import SamplingParams, SpeculationParams
from tests.tiny import VOCAB, ScriptDrafter, engine, family_target, run, run_to_end

_RNG = np.random.default_rng(4)
_SHARED = _RNG.integers(3, VOCAB, 70).tolist()
PROMPTS = [
    _SHARED,
    *(_RNG.integers(3, VOCAB, length).tolist() for length in (1, 40)),
    [*_SHARED[:64], *_RNG.integers(3, VOCAB, 5).tolist()],
    _SHARED,
    [*_SHARED, 5, 6],
]
SAMPLINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "seed": 1},
    {"temperature": 0.8, "seed": 2, "repetition_penalty": 1.2},
    {"temperature": 1.0, "seed": 3, "top_p": 0.9},
    {"logprobs": 2},
    {"temperature": 0.7, "seed": 5, "prompt_logprobs": 1},
]
LAYOUTS: dict[str, dict[str, Any]] = {
    "blocks": {"kv_layout": "blocks"},
    "flex": {"attention": "flex"},
    "graphs": {"attention": "flex", "cuda_graphs": "on"},
}


def texts(family: str, method: str, number: int, **options: Any) -> tuple[list[list[int]], Any]:
    samplings = [SamplingParams(max_tokens=24, ignore_eos=True, **one) for one in SAMPLINGS]
    speculation = SpeculationParams(method, number)
    target = family_target(family)
    plain = run(engine(target), PROMPTS, samplings, SpeculationParams("none"))
    known = [prompt + text for prompt, text in zip(PROMPTS, plain, strict=True)]
    drafters = {
        name: ScriptDrafter("half", known, children, seed=7, ragged=True)
        for name, children in (("chain", 1), ("tree", 3))
    }
    the_engine = engine(target, drafters, max_num_requests=3, max_num_batched_tokens=24, **options)
    found = run(the_engine, PROMPTS, samplings, speculation, arrivals=[0, 0, 0, 2, 5, 9])
    assert found == plain
    return found, the_engine


def cases() -> list[Any]:
    """All of them; the default run leaves out most of those with FlexAttention, uncompiled."""
    found = []
    for layout, family, (method, number), reuse in itertools.product(
        LAYOUTS,
        ["llama", "gemma3", "gpt_oss"],
        [("none", 0), ("chain", 4), ("tree", 9)],
        [False, True],
    ):
        quick = {("llama", "tree"), ("gemma3", "tree"), ("gpt_oss", "chain")}
        is_slow = layout != "blocks" and not (reuse and (family, method) in quick)
        marks = [pytest.mark.slow] if is_slow else []
        found.append(pytest.param(layout, family, method, number, reuse, marks=marks))
    return found


@pytest.mark.parametrize(("layout", "family", "method", "number", "reuse"), cases())
def test_texts_are_those_of_contiguous_slots(
    layout: str, family: str, method: str, number: int, reuse: bool
) -> None:
    _, the_engine = texts(family, method, number, reuse_prefixes=reuse, **LAYOUTS[layout])
    cache = the_engine.cache
    assert isinstance(cache, BlockKVCache)
    assert (the_engine.runner.graphs is not None) == (layout == "graphs")
    assert layout != "graphs" or the_engine.runner.graphs.num_graphs > 1
    the_engine.scheduler.drop_prefixes()
    assert cache.num_free_blocks == cache.num_blocks
    assert cache.num_free_slots == cache.num_slots


def test_requests_that_begin_alike_share_blocks() -> None:
    the_engine = engine(
        family_target("llama"), kv_layout="blocks", reuse_prefixes=True, max_num_requests=4
    )
    sampling, plain = SamplingParams(max_tokens=30, ignore_eos=True), SpeculationParams("none")
    first = the_engine.add(_SHARED, sampling, plain)
    the_engine.step()
    the_engine.step()
    others = [the_engine.add(_SHARED, sampling, plain) for _ in range(3)]
    the_engine.step()
    cache = the_engine.cache
    assert isinstance(cache, BlockKVCache)
    states = [the_engine.request_state(name) for name in (first, *others)]
    for state in states:
        assert cache.num_holders(state.slot)[:2] == [4, 4]
    assert all(state.stats.num_reused_tokens >= 64 for state in states[1:])
    whole = sum(len(cache.block_table(state.slot)) for state in states)
    assert cache.num_blocks - cache.num_free_blocks == whole - 2 * 3


@pytest.mark.parametrize("layer", ["embedding", "values"])
@pytest.mark.parametrize("options", [{}, *LAYOUTS.values()], ids=["contiguous", *LAYOUTS])
def test_what_is_broken_in_one_request_stays_in_it(options: dict[str, Any], layer: str) -> None:
    """Its rows are not finite; a neighbour's text is the same, wherever keys and values lie."""
    target = family_target("llama")
    sampling, plain = SamplingParams(max_tokens=12, ignore_eos=True), SpeculationParams("none")
    whole = run_to_end(engine(target, **options), [[5, 6, 7, 8]], sampling, plain)[0]
    weight = target.model.get_input_embeddings().weight.data
    if layer == "embedding":
        weight[40] = torch.nan
    else:  # keys stay finite, values overflow
        value = target.model.model.layers[0].self_attn.v_proj
        value.register_forward_hook(
            lambda module, args, out: torch.where(
                target.model.broken_rows[None, :, None], torch.inf, out
            )
        )
        target.model.register_forward_pre_hook(
            lambda module, args, kwargs: setattr(
                module, "broken_rows", kwargs["input_ids"][0] == 40
            ),
            with_kwargs=True,
        )
    assert 40 not in whole.ids
    found, broken = run_to_end(
        engine(target, **options), [[5, 6, 7, 8], [9, 40, 9]], sampling, plain
    )
    assert (found.ids, found.error) == (whole.ids, None)
    assert "not finite" in str(broken.error)


def test_layouts_are_checked() -> None:
    with pytest.raises(ConfigError, match="kv_layout is 'paged'; allowed is one of auto"):
        EngineConfig(kv_layout="paged")
    with pytest.raises(ConfigError, match="attention is 'flash'; allowed is one of auto"):
        EngineConfig(attention="flash")
    with pytest.raises(ConfigError, match="reads blocks, and kv_layout is 'contiguous'"):
        EngineConfig(kv_layout="contiguous", attention="flex")
    for options in ({}, {"attention": "flex", "tensor_parallel_size": 2}):
        with pytest.raises(ConfigError, match="cuda_graphs is 'on', which records passes that"):
            EngineConfig(cuda_graphs="on", **options)  # type: ignore[arg-type]
