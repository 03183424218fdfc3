"""The prompts of a command: arguments and files, read and checked before anything is loaded."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from foredraft.errors import InvalidRequestError
from foredraft.params import SamplingParams, SpeculationParams

_ALLOWED = "allowed is a string, or an object with a string 'prompt' or a list 'messages'"
_OPTIONS = {f.name for cls in (SamplingParams, SpeculationParams) for f in dataclasses.fields(cls)}


def read_prompts(prompts: list[str], files: list[Path], chat: bool) -> list[Any]:
    """Return every prompt, texts or lists of chat messages, in order: arguments, then files.

    Args:
        prompts: Texts.
        files: ``.jsonl`` files with a prompt a line; any other file is one prompt.
        chat: Make each text a chat message of the user.

    Raises:
        InvalidRequestError: A file cannot be read, or there is no prompt.
    """
    every: list[Any] = list(prompts)
    for file in files:
        text = _read(file)
        if file.suffix.lower() == ".jsonl":
            # Not splitlines: that also splits at characters that a JSON string may hold.
            lines = enumerate(text.split("\n"), 1)
            every += [_from_json(file, number, line) for number, line in lines if line.strip()]
        else:
            every.append(text)
    if not every:
        where = f" in {', '.join(map(str, files))}" if files else ""
        raise InvalidRequestError(
            f"no prompt was given{where}; pass one as an argument or with --prompt-file. For "
            'example: foredraft generate "The capital of France is"'
        )
    if len(every) == 1 and isinstance(every[0], str) and not every[0].strip():
        raise InvalidRequestError("the prompt is empty; allowed is any text. Give it some.")
    if chat:
        return [[{"role": "user", "content": p}] if isinstance(p, str) else p for p in every]
    return every


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise InvalidRequestError(
            f"prompt file {file} cannot be read ({reason}); check the path."
        ) from error


def _from_json(file: Path, number: int, line: str) -> Any:
    where = f"{file}, line {number}"
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{where}, is no JSON ({error}); mend the line.") from error
    if isinstance(value, str):
        return value
    if not isinstance(value, dict) or ("prompt" in value) == ("messages" in value):
        raise InvalidRequestError(f"{where}: {_ALLOWED}, and not both. Mend the line.")
    if options := sorted(_OPTIONS & value.keys()):
        raise InvalidRequestError(
            f"{where}, holds {', '.join(map(repr, options))}, but such options are not read from a "
            "prompt file; pass them on the command line, for all prompts."
        )
    prompt = value.get("prompt", value.get("messages"))
    is_right = isinstance(prompt, str) if "prompt" in value else _are_messages(prompt)
    if not is_right:
        raise InvalidRequestError(
            f"{where}: {_ALLOWED}; messages are objects with the strings 'role' and 'content'. "
            "Mend the line."
        )
    return prompt


def _are_messages(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) > 0
        and all(
            isinstance(m, dict)
            and isinstance(m.get("role"), str)
            and isinstance(m.get("content"), str)
            for m in value
        )
    )
