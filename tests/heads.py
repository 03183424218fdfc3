"""Heads for tests: random ones, and small ones that have learnt what a tiny target writes."""

from __future__ import annotations

import copy
import dataclasses
import functools
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from foredraft.config import make_config
from foredraft.drafters.base import DrafterContext
from foredraft.drafters.heads import HeadDrafter
from foredraft.drafters.medusa import MedusaDrafter
from foredraft.heads.checkpoint import make_head
from foredraft.heads.medusa import MedusaHead
from foredraft.heads.output_law import OutputLaw
from foredraft.heads.shape import HeadShape, shape_for
from foredraft.model.loader import Target
from foredraft.params import SamplingParams, SpeculationParams
from foredraft.registry import drafter_class
from foredraft.sampling.noise import gumbel_of
from foredraft.train.features import FeatureReader
from foredraft.train.parallel import medusa_losses
from foredraft.train.texts import Text
from foredraft.train.unroll import Options, losses
from foredraft.types import (
    Budgets,
    DraftBatch,
    Segment,
    StepPlan,
    TargetOutput,
    Verdict,
)
from tests.tiny import CONTEXT, VOCAB, engine, family_target, run

RECURRENT = ("eagle", "eagle3", "mtp")
HEAD_METHODS = (*RECURRENT, "medusa")
SIZE = 16
NOISE_SEED = 7


def random_head(shape: HeadShape, seed: int = 0, words: list[int] | None = None) -> Any:
    """Random weights, large enough that tokens and places matter."""
    torch.manual_seed(seed)
    head = MedusaHead(shape) if shape.kind == "medusa" else make_head(shape)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(0, 0.2)
        if words is not None:
            head.d2t.copy_(torch.tensor(words) - torch.arange(len(words)))
    return head.eval()


def sizes(vocab_size: int, num_layers: int = 2) -> Any:
    return SimpleNamespace(
        hidden_size=SIZE,
        intermediate_size=24,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=vocab_size,
        max_position_embeddings=CONTEXT,
        rms_norm_eps=1e-5,
        model_type="test",
    )


def fake_drafter(method: str, vocab_size: int, max_model_len: int = 512) -> Any:
    """A drafter with a random head, beside a target that is nothing but its two ends."""
    config = sizes(vocab_size)
    torch.manual_seed(3)
    embed, output = torch.nn.Embedding(vocab_size, SIZE), torch.nn.Linear(SIZE, vocab_size)
    model = SimpleNamespace(
        config=config,
        get_input_embeddings=lambda: embed,
        get_output_embeddings=lambda: output,
    )
    target = SimpleNamespace(
        model=model, name="fake", dtype=torch.float32, device=torch.device("cpu"), num_ranks=1
    )
    context = DrafterContext(
        vocab_size, max_model_len, method=method, max_num_requests=8, target=target
    )
    cls = drafter_class(method)
    head = random_head(shape_for(config, method))
    made = cls(make_config(cls.Config, {}, method), context, head)
    assert isinstance(made, HeadDrafter | MedusaDrafter)
    return made


def observe_texts(drafter: Any, segments: list[Segment], seed: int = 0) -> None:
    """Show a drafter features of all that stands before each segment's root."""
    shown = []
    for segment in segments:
        length = len(segment.token_ids)
        if not segment.is_decode or length < 2:
            continue
        speculation = dataclasses.replace(
            segment.request.speculation, method=drafter.context.method
        )
        request = dataclasses.replace(segment.request, speculation=speculation)
        shown.append(
            dataclasses.replace(
                segment,
                request=request,
                token_ids=segment.token_ids[:-1],  # so that its last row is picked at
                start=0,
                num_rows=length - 1,
                is_decode=False,
            )
        )
    counts = [segment.num_rows for segment in shown]
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    generator = torch.Generator().manual_seed(seed)
    states = {
        layer: torch.randn(int(offsets[-1]), SIZE, generator=generator)
        for layer in drafter.needs.hidden_layers
    }
    none = np.zeros(0, dtype=np.int64)
    zeros = np.zeros(len(shown) + 1, dtype=np.int64)
    drafter.observe(
        StepPlan(tuple(shown)),
        DraftBatch.empty(len(shown)),
        TargetOutput(torch.zeros(0, 1), zeros, states, offsets),
        Verdict(none, zeros, none, zeros, np.ones(len(shown), dtype=np.bool_)),
    )


def random_budgets(rng: np.random.Generator, count: int) -> Budgets:
    return Budgets(rng.integers(0, 12, count).astype(np.int64))


@functools.cache
def tiny_texts() -> list[Text]:
    """What the tiny target writes, greedily and not."""
    rng = np.random.default_rng(5)
    prompts = [rng.integers(3, VOCAB, int(n)).tolist() for n in rng.integers(1, 24, 48)]
    prompts += [
        np.resize(rng.integers(3, VOCAB, int(n)), 30).tolist() for n in rng.integers(1, 30, 24)
    ]
    samplings = [
        SamplingParams(float(i % 2), seed=i, max_tokens=40, ignore_eos=True)
        for i in range(len(prompts))
    ]
    plain = SpeculationParams("none")
    written = run(engine(family_target("llama")), prompts, samplings, plain)
    return [
        Text(np.array(prompt + text, dtype=np.int64), len(prompt))
        for prompt, text in zip(prompts, written, strict=True)
    ]


@functools.cache
def _learnt(method: str) -> Any:
    """Learnt once in a run of the tests, however many processes and files need it."""
    shape = shape_for(family_target("llama", packs=False).model.config, method)
    head = MedusaHead(shape) if method == "medusa" else make_head(shape)
    run_id = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    kept = Path(tempfile.gettempdir()) / f"foredraft-{run_id}-{method}.pt"
    if run_id and kept.is_file():
        head.load_state_dict(torch.load(kept, weights_only=True))
        return head.eval()
    made = _learn(method)
    if run_id:
        new = kept.with_suffix(f".{os.getpid()}")
        torch.save(made.state_dict(), new)
        new.replace(kept)
    return made


def _learn(method: str, num_steps: int = 300) -> Any:
    target = family_target("llama", packs=False)
    shape = shape_for(target.model.config, method)
    torch.manual_seed(0)
    head = MedusaHead(shape) if method == "medusa" else make_head(shape)
    reader = FeatureReader(target, shape.feature_layers, CONTEXT)
    embed = target.model.get_input_embeddings()
    weight = target.model.get_output_embeddings().weight.detach()
    optimizer = torch.optim.AdamW(head.parameters(), 5e-3)
    texts = tiny_texts()
    all_of_them = [reader.read(texts[first : first + 24]) for first in range(0, len(texts), 24)]
    for step in range(num_steps):
        batch, options = all_of_them[step % len(all_of_them)], Options(3, prompt_share=0.1)
        if method == "medusa":
            found = medusa_losses(head, batch, OutputLaw(weight), options)
        else:
            found = losses(head, batch, embed, OutputLaw(weight), options)
        found.total.backward()
        optimizer.step()
        optimizer.zero_grad()
    return head.eval()


def learnt_head(method: str) -> Any:
    """A head that has learnt what ``family_target("llama")`` writes; a copy of its own."""
    return copy.deepcopy(_learnt(method))


def with_words(head: Any, words: Sequence[int]) -> Any:
    """The same head, which drafts by some rows of the target's output layer alone."""
    made = make_head(head.shape.replace(draft_vocab_size=len(words)))
    made.load_state_dict(head.state_dict())
    made.d2t.copy_(torch.tensor(words) - torch.arange(len(words)))
    return made.eval()


def learnt_drafter(
    method: str,
    target: Target,
    max_num_requests: int = 8,
    words: Sequence[int] = (),
    **options: Any,
) -> Any:
    context = DrafterContext(
        VOCAB, target.max_model_len, method=method, max_num_requests=max_num_requests, target=target
    )
    cls = drafter_class(method)
    head = with_words(learnt_head(method), words) if words else learnt_head(method)
    made = cls(make_config(cls.Config, options, method), context, head)
    assert isinstance(made, HeadDrafter | MedusaDrafter)
    return made


def ranked(logits: torch.Tensor, head: Any, temperature: float, position: int) -> int:
    """The target's id of the word that a head puts first for a position of a text."""
    top = logits.detach().double().topk(min(32, len(logits)))
    words, values = head.target_ids[top.indices].numpy(), top.values.numpy()
    if temperature:
        seed, at = np.array([NOISE_SEED]), np.array([position])
        values = values / temperature + gumbel_of(seed, at, words[None])[0]
    return int(words[np.argmax(values)])
