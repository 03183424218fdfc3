"""What a head learns from: prompts of a file, and the target's own answers to them.

A head is to guess what this target writes, so the answers are the target's: written by foredraft's
own engine, many at once, half of them greedily and half drawn. They are kept as token ids in a
file, one line each, so that a run that was stopped goes on where it was.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from foredraft.errors import DataError
from foredraft.params import SamplingParams, SpeculationParams
from foredraft.types import Int64Array

if TYPE_CHECKING:
    from foredraft.engine.llm import LLM


_LEAST_ANSWER = 16
"""Tokens of an answer that is worth reading its prompt for."""


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt and an answer.

    Attributes:
        token_ids: int64, both.
        num_prompt: Tokens of the prompt.
    """

    token_ids: Int64Array
    num_prompt: int


def read_prompts(path: str | Path) -> list[str]:
    """The prompts of a JSON-lines file: ``prompt``, ``text`` or ``messages`` of each line.

    Raises:
        DataError: It cannot be read, or a line holds none of them: the message names the line.
    """
    path = Path(path)
    prompts = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read ({error}).") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            found = json.loads(line)
        except ValueError as error:
            raise DataError(f"{path}, line {number} is no JSON ({error}).") from error
        prompt = _prompt_of(found)
        if not prompt:
            raise DataError(
                f"{path}, line {number} holds no text; each line needs 'prompt', 'text' or "
                "'messages'."
            )
        prompts.append(prompt)
    if not prompts:
        raise DataError(f"{path} holds no line; there is nothing to learn from.")
    return prompts


def data_hash(path: str | Path) -> str:
    """SHA-256 of a file."""
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def _prompt_of(line: Any) -> str | None:
    if not isinstance(line, dict):
        return None
    for name in ("prompt", "text"):
        if isinstance(line.get(name), str) and line[name].strip():
            return str(line[name])
    messages = line.get("messages")
    if isinstance(messages, list):
        said = [m.get("content") for m in messages if isinstance(m, dict)]
        users = [text for text in said if isinstance(text, str) and text.strip()]
        return users[0] if users else None
    return None


def answered(path: str | Path) -> dict[int, Text]:
    """Answers kept so far, by the number of their prompt; a line that was cut off is none."""
    found: dict[int, Text] = {}
    path = Path(path)
    if not path.is_file():
        return found
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            one = json.loads(line)
            ids = np.array(one["prompt_ids"] + one["answer_ids"], dtype=np.int64)
            found[int(one["number"])] = Text(ids, len(one["prompt_ids"]))
        except (ValueError, KeyError, TypeError):
            continue
    return found


def answer(
    llm: LLM,
    prompts: Sequence[str],
    path: str | Path,
    max_tokens: int,
    seed: int,
    tell: Callable[[int, int], None],
    should_stop: Callable[[], bool] = lambda: False,
    max_len: int | None = None,
) -> dict[int, Text]:
    """Let the target answer every prompt that has no answer yet.

    One that leaves no room for an answer is passed over.

    Args:
        llm: The target.
        prompts: What to answer.
        path: Where answers are kept.
        max_tokens: Of an answer.
        seed: Of the drawn ones.
        tell: Told how many prompts are answered or passed over, and how many tokens were written.
        should_stop: Asked now and then; what was begun is finished.
        max_len: Tokens of a prompt and its answer together, of which a head learns; ``None`` goes
            by what the target can read.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    done = answered(path)
    waiting = iter([number for number in range(len(prompts)) if number not in done])
    engine = llm.engine
    running: dict[str, int] = {}
    num_tokens = num_passed_over = 0
    most = engine.max_num_requests
    most_together = min(engine.target.max_model_len, max_len or engine.target.max_model_len)
    with path.open("a", encoding="utf-8") as file:
        while True:
            for number in _some(waiting, most - len(running), should_stop):
                ids = llm.encode([{"role": "user", "content": prompts[number]}])
                limit = min(max_tokens, most_together - len(ids))
                if limit < min(max_tokens, _LEAST_ANSWER):
                    num_passed_over += 1
                    continue
                sampling = SamplingParams(
                    max_tokens=limit, temperature=0.0 if number % 2 else 0.8, seed=seed + number
                )
                running[engine.add(ids, sampling, SpeculationParams("suffix"))] = number
            if not running:
                return done
            states = {name: engine.request_state(name) for name in running}
            for delta in engine.step():
                if delta.finish_reason is None:
                    continue
                number, state = running.pop(delta.request_id), states[delta.request_id]
                ids, num_prompt = state.token_ids, len(state.request.prompt_ids)
                num_tokens += len(ids) - num_prompt
                done[number] = Text(ids.copy(), num_prompt)
                line = {
                    "number": number,
                    "prompt_ids": ids[:num_prompt].tolist(),
                    "answer_ids": ids[num_prompt:].tolist(),
                }
                file.write(json.dumps(line, separators=(",", ":")) + "\n")
                file.flush()
                tell(len(done) + num_passed_over, num_tokens)


def _some(waiting: Iterator[int], most: int, should_stop: Callable[[], bool]) -> list[int]:
    if should_stop():
        return []
    found = []
    for _ in range(most):
        number = next(waiting, None)
        if number is None:
            break
        found.append(number)
    return found


def batches(
    texts: Sequence[Text], max_tokens: int, max_len: int, rng: np.random.Generator
) -> list[list[Text]]:
    """Texts in batches of about so many tokens, of like length, in random order.

    Args:
        texts: All of them; longer ones are cut.
        max_tokens: Of a batch, padding counted.
        max_len: Of a text.
        rng: Decides the order.
    """
    cut = [Text(text.token_ids[:max_len], text.num_prompt) for text in texts]
    cut = [text for text in cut if len(text.token_ids) >= 4]
    order = np.argsort([len(text.token_ids) + rng.random() * 16 for text in cut], kind="stable")
    found: list[list[Text]] = []
    batch: list[Text] = []
    longest = 0
    for index in order.tolist():
        text = cut[index]
        longest = max(longest, len(text.token_ids))
        if batch and longest * (len(batch) + 1) > max_tokens:
            found.append(batch)
            batch, longest = [], len(text.token_ids)
        batch.append(text)
    if batch:
        found.append(batch)
    return [found[index] for index in rng.permutation(len(found)).tolist()]
