"""Recorded token streams: what the target answered to Spec-Bench's questions, made once and kept.

Replaying them needs no model, so drafters that read tokens alone are compared on the very same
texts in seconds.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from foredraft.cache import cache_folder
from foredraft.errors import InvalidRequestError
from foredraft.model.machine import model_hash
from foredraft.params import SamplingParams, SpeculationParams
from foredraft.types import Int64Array

if TYPE_CHECKING:
    from foredraft.engine.llm import LLM

_NAME = "spec_bench.jsonl"
_PLACES = (Path("../shared/data") / _NAME, Path("shared/data") / _NAME)
_BATCH = 16
_FORMAT = 1


@dataclass(frozen=True, slots=True)
class Stream:
    """One answer.

    Attributes:
        category: The question's, as Spec-Bench names it.
        prompt_ids: int64 [num_prompt_tokens].
        output_ids: int64 [num_tokens], the target's greedy answer.
    """

    category: str
    prompt_ids: Int64Array
    output_ids: Int64Array


def find_questions(data: Path | None) -> Path:
    """The file of questions: as given, beside the repository, or in the cache folder.

    Raises:
        InvalidRequestError: It is nowhere.
    """
    places = [data] if data is not None else [*_PLACES, cache_folder() / _NAME]
    for place in places:
        if place.is_file():
            return place
    where = ", ".join(map(str, places))
    raise InvalidRequestError(
        f"Spec-Bench's questions were looked for at {where}, and are not there; save "
        "data/spec_bench/question.jsonl of github.com/hemingkx/Spec-Bench as one of these, or name "
        "it with --data."
    )


def questions_of(path: Path, num_questions: int) -> list[str]:
    """First turns of questions spread evenly over the file."""
    lines = path.read_text(encoding="utf-8").splitlines()
    places = np.linspace(0, len(lines) - 1, num_questions).astype(int)
    return [str(json.loads(lines[place])["turns"][0]) for place in places]


def streams(
    llm: LLM, data: Path | None, num_questions: int, num_tokens: int, tell: Callable[[str], None]
) -> list[Stream]:
    """Answers to questions spread evenly over the file, from the cache or made now.

    Args:
        llm: The target.
        data: The file of questions; ``None`` looks for it.
        num_questions: How many.
        num_tokens: Most tokens of an answer.
        tell: Told what is being done.
    """
    questions = find_questions(data)
    lines = questions.read_text(encoding="utf-8").splitlines()
    chosen = [
        json.loads(lines[i]) for i in np.linspace(0, len(lines) - 1, num_questions).astype(int)
    ]
    dtype = str(llm.engine.target.dtype).removeprefix("torch.")
    key = hashlib.sha256(
        json.dumps([_FORMAT, model_hash(llm.engine.target), dtype, num_tokens, chosen]).encode()
    ).hexdigest()
    kept = cache_folder() / "streams" / f"{key[:16]}.npz"
    if not kept.exists():
        _record(llm, chosen, num_tokens, kept, tell)
    with np.load(kept) as arrays:
        return [
            Stream(q["category"], arrays[f"prompt{i}"], arrays[f"output{i}"])
            for i, q in enumerate(chosen)
        ]


def _record(
    llm: LLM,
    questions: list[dict[str, object]],
    num_tokens: int,
    kept: Path,
    tell: Callable[[str], None],
) -> None:
    """Answer every question, greedily, and write prompts and answers to a file."""
    room = llm.engine.target.max_model_len - num_tokens
    prompts = []
    for question in questions:
        turns = question["turns"]
        assert isinstance(turns, list)
        prompts.append(llm.encode([{"role": "user", "content": turns[0]}])[-room:])
    arrays: dict[str, Int64Array] = {}
    sampling = SamplingParams(max_tokens=num_tokens)
    for begin in range(0, len(prompts), _BATCH):
        tell(f"answering question {begin + 1} of {len(prompts)}")
        part = [list(map(int, prompt)) for prompt in prompts[begin : begin + _BATCH]]
        outputs = llm.generate(part, sampling, SpeculationParams("ngram"), progress=False)
        for index, output in enumerate(outputs):
            arrays[f"prompt{begin + index}"] = prompts[begin + index]
            arrays[f"output{begin + index}"] = np.array(output.token_ids, dtype=np.int64)
    kept.parent.mkdir(parents=True, exist_ok=True)
    with kept.with_suffix(".part").open("wb") as file:
        np.savez_compressed(file, **arrays)  # type: ignore[arg-type]
    kept.with_suffix(".part").replace(kept)
