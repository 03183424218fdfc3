"""A whole training run: prompts, the target's answers, a head, its record."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from foredraft.config import EngineConfig
from foredraft.errors import ConfigError
from foredraft.heads.checkpoint import load_head, load_medusa, make_head
from foredraft.heads.draft_model import KeptLayers, spread_layers
from foredraft.heads.medusa import MedusaHead
from foredraft.heads.recurrent import RecurrentHead
from foredraft.heads.shape import shape_for
from foredraft.model.loader import Target, load_target
from foredraft.train.begin import begin_from_target, choose_words
from foredraft.train.learner import DraftLearner, HeadLearner, Learner
from foredraft.train.texts import Text, answer, answered, data_hash, read_prompts
from foredraft.train.trainer import Progress, TrainConfig, Trainer, need_accelerate

_DEFAULT_WORDS = 8192

METHODS = ("eagle", "eagle3", "medusa", "mtp", "draft-model")


@dataclass(frozen=True, slots=True)
class Run:
    """What to train, on what, to where.

    Attributes:
        method: ``eagle``, ``eagle3``, ``medusa``, ``mtp`` or ``draft-model``.
        model: The target.
        data: A JSON-lines file of prompts.
        out: Folder of the head; a run that was stopped goes on in it.
        init: Folder of a head to begin from; empty begins from the target's own layers.
        answers: File of the target's answers; ``None`` takes ``answers.jsonl`` in ``out``.
        num_prompts: Use the first so many of the data, shuffled by the seed; 0 takes all.
        answer_tokens: Most tokens of an answer.
        answer_minutes: Answer for so long at most, 0 until all are answered; below 0 takes those
            that there are.
        draft_vocab_size: Words that are drafted; 0 takes all of the target's, ``None`` 8192.
        num_layers: Draft model: layers of the target that it keeps.
        with_embedding: Draft model: write it with its embedding and tokenizer, for any program.
        features: Folder to keep features in for other runs too; ``None`` keeps them in ``out``
            while the run lasts.
        device: As for the engine.
        train: Options of the loop.
    """

    method: str
    model: str
    data: Path
    out: Path
    train: TrainConfig
    init: str = ""
    answers: Path | None = None
    num_prompts: int = 0
    answer_tokens: int = 256
    answer_minutes: float = 0.0
    draft_vocab_size: int | None = None
    num_layers: int = 2
    with_embedding: bool = True
    features: Path | None = None
    device: str = "auto"

    def __post_init__(self) -> None:
        """Refuse what cannot be trained."""
        if self.method not in METHODS:
            raise ConfigError(f"method is {self.method!r}; allowed is one of {', '.join(METHODS)}.")
        for name, least in (
            ("num_prompts", 0),
            ("answer_tokens", 1),
            ("draft_vocab_size", 0),
            ("num_layers", 1),
        ):
            value = getattr(self, name)
            if value is None and name == "draft_vocab_size":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigError(f"{name} is {value!r}; allowed is an integer of {least} or more.")
        is_draft = self.method == "draft-model"
        if is_draft and self.init:
            raise ConfigError("a draft model begins from the target's layers; leave init out.")
        if not is_draft and (self.num_layers != 2 or not self.with_embedding):
            raise ConfigError(
                f"num_layers and with_embedding are a draft model's, and method is {self.method!r};"
                " leave them out."
            )
        if self.train.regression and self.method in ("medusa", "draft-model"):
            raise ConfigError(
                f"regression is {self.train.regression!r}, and {self.method} stands for no feature "
                "of the target; leave it out."
            )
        if self.features is not None and not self.train.feature_gb:
            raise ConfigError("features names a folder and feature_gb is 0; leave one of them out.")
        if self.init and self.draft_vocab_size is not None:
            raise ConfigError(
                f"draft_vocab_size is {self.draft_vocab_size!r}, and the head at init has its "
                "words; leave one of them out."
            )
        if not math.isfinite(self.answer_minutes):
            raise ConfigError(
                f"answer_minutes is {self.answer_minutes!r}; allowed is a number, 0 to answer all."
            )


def train(
    run: Run,
    tell_answers: Callable[[int, int, int], None],
    tell: Callable[[Progress], None],
    say: Callable[[str], None],
) -> tuple[float, ...]:
    """Run it.

    Args:
        run: What to do.
        tell_answers: Told how many prompts are answered, of how many, and tokens written so far.
        tell: Told where training stands.
        say: Told, in a sentence, what begins.

    Returns:
        The survival of a greedy chain on held-out answers, by level.
    """
    need_accelerate()
    prompts = _prompts(run)
    with _one_after_another(run) as device:
        texts = _texts(run, prompts, device, tell_answers, say)
    say("Loading the target to read its features.")
    target = load_target(EngineConfig(run.model, "float32", device), say, packs=False)
    learner = _learner(run, target, texts)
    num_answer = sum(len(text.token_ids) - text.num_prompt for text in texts)
    record = {
        "method": run.method,
        "target": target.name,
        "data": run.data.name,
        "data_sha256": data_hash(run.data),
        "num_texts": len(texts),
        "num_answer_tokens": num_answer,
        "init": _record_of(run.init),
        "command": " ".join(["foredraft", *map(_without_place, sys.argv[1:])]),
        "date": time.strftime("%Y-%m-%d"),
    }
    say(f"Learning from {len(texts):,} texts with {num_answer:,} tokens of answers.")
    return Trainer(learner, texts, run.train, run.out, record, run.features).run(tell)


def _record_of(init: str) -> dict[str, Any] | bool:
    """How the head that a run begins from was trained, where it says so; else whether there is."""
    try:
        found = json.loads((Path(init) / "run.json").read_text(encoding="utf-8")) if init else False
    except (OSError, ValueError):
        return True
    return found if isinstance(found, dict) else bool(init)


@contextmanager
def _one_after_another(run: Run) -> Iterator[str]:
    """Of several processes the first answers, and the others then read; a device for each."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield run.device
        return
    import torch
    from accelerate import PartialState

    if run.device not in ("auto", "cpu", "cuda"):
        raise ConfigError(
            f"device is {run.device!r}, and each of several processes has one of its own; allowed "
            "is auto, cpu or cuda."
        )
    is_cpu = run.device == "cpu" or not torch.cuda.is_available()
    state = PartialState(cpu=is_cpu, timeout=timedelta(days=7))
    with state.main_process_first():
        yield "cpu" if is_cpu else str(state.device)


def _learner(run: Run, target: Target, texts: Sequence[Text]) -> Learner:
    """What is to learn, with what it begins from."""
    import torch

    asked = _DEFAULT_WORDS if run.draft_vocab_size is None else run.draft_vocab_size
    num_words = min(asked or target.vocab_size, target.vocab_size)
    if run.method == "draft-model":
        layers = spread_layers(int(target.model.config.num_hidden_layers), run.num_layers)
        words = None
        if num_words < target.vocab_size:
            words = choose_words(texts, num_words, target.vocab_size) + torch.arange(num_words)
        return DraftLearner(KeptLayers(target, layers, words), target, run.with_embedding)
    head: RecurrentHead | MedusaHead
    if run.init:
        load = load_medusa if run.method == "medusa" else load_head
        head = load(run.init, target.model.config)
        if head.shape.kind != run.method:
            raise ConfigError(
                f"{run.init} is a head of kind {head.shape.kind!r}, and method is {run.method!r}."
            )
        return HeadLearner(head.to(target.device), target)
    torch.manual_seed(run.train.seed)
    shape = shape_for(target.model.config, run.method, num_words, num_levels=run.train.num_levels)
    head = MedusaHead(shape) if run.method == "medusa" else make_head(shape)
    if head.shape.has_own_words:
        head.d2t.copy_(choose_words(texts, num_words, target.vocab_size))
    begin_from_target(head, target)
    return HeadLearner(head.to(target.device), target)


def _without_place(argument: str) -> str:
    """An argument, of a path its name alone: where it lay is nobody's business."""
    return Path(argument).name if os.path.isabs(argument) else argument


def _prompts(run: Run) -> list[str]:
    import numpy as np

    prompts = read_prompts(run.data)
    order = np.random.default_rng(run.train.seed).permutation(len(prompts)).tolist()
    most = run.num_prompts or len(prompts)
    return [prompts[index] for index in order[:most]]


def _texts(
    run: Run,
    prompts: Sequence[str],
    device: str,
    tell: Callable[[int, int, int], None],
    say: Callable[[str], None],
) -> list[Text]:
    from foredraft.engine.llm import LLM

    path = run.answers or run.out / "answers.jsonl"
    done = answered(path)
    done = {number: text for number, text in done.items() if number < len(prompts)}
    began = time.monotonic()

    def is_late() -> bool:
        minutes = run.answer_minutes
        return bool(minutes) and time.monotonic() - began > 60 * minutes

    is_first = int(os.environ.get("RANK", "0")) == 0
    if len(done) < len(prompts) and run.answer_minutes >= 0 and is_first:
        say(f"The target answers {len(prompts) - len(done):,} prompts, kept in {path}.")
        with LLM(run.model, max_num_requests=32, device=device) as llm:
            done = answer(
                llm,
                prompts,
                path,
                run.answer_tokens,
                run.train.seed,
                lambda num, tokens: tell(num, len(prompts), tokens),
                is_late,
                run.train.max_len,
            )
    return [done[number] for number in sorted(done) if number < len(prompts)]
