"""The front door in Python: strings, token ids or chat messages in, finished or streamed text out."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from foredraft.config import EngineConfig, make_config
from foredraft.engine.detokenizer import Detokenizer
from foredraft.engine.engine import Engine
from foredraft.errors import ForedraftError, InvalidRequestError
from foredraft.params import SamplingParams, SpeculationParams
from foredraft.stats import RequestStats
from foredraft.types import Delta

if TYPE_CHECKING:
    from foredraft.drafters.base import Drafter
    from foredraft.model.loader import Target

_LOG = logging.getLogger("foredraft")

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]] | np.ndarray
"""A text, token ids, or chat messages (mappings with ``role`` and ``content``)."""


@dataclass(frozen=True)
class RequestOutput:
    """One finished request.

    Attributes:
        request_id: Its name in the engine; empty if it was refused.
        prompt_ids: The prompt's token ids; empty if it was refused.
        token_ids: What was generated, the stopping token included.
        text: The same as text, without special tokens and without a stopping token.
        finish_reason: ``stop``, ``length`` or ``error``.
        stop_token_id: The token id that ended it, for ``stop``.
        seed: The seed in force: with it, the same prompt and parameters give the same text again.
        stats: Its counters.
        error: What went wrong, for ``error``.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    finish_reason: str
    stop_token_id: int | None
    seed: int | None
    stats: RequestStats
    error: str | None = None


@dataclass(frozen=True)
class StreamChunk:
    """A piece of a streamed request.

    Attributes:
        text: Text that this step completed; may be empty.
        pieces: The same text in pieces, each with whether its last token was an accepted draft token.
        token_ids: Tokens that this step emitted.
        num_accepted: How many of them, from the first, were draft tokens.
        finish_reason: ``None`` while it runs.
        output: The whole result, with the last chunk.
    """

    text: str
    pieces: tuple[tuple[str, bool], ...]
    token_ids: tuple[int, ...]
    num_accepted: int
    finish_reason: str | None = None
    output: RequestOutput | None = None


class LLM:
    """A target model, ready to generate.

    Args:
        model: ``default`` (the embedded model), a Hugging Face folder or hub name, or a ``.gguf``.
        target: A target loaded already, instead of ``model``.
        drafters: Drafters of your own by method name.
        notify: Told, in a sentence, what takes long while the model loads.
        **options: Other fields of ``EngineConfig``.

    Raises:
        ModelLoadError: The model cannot be loaded.
        ConfigError: An option is unknown or cannot be honoured.

    Example:
        >>> from foredraft import LLM, SamplingParams  # doctest: +SKIP
        >>> llm = LLM("default")  # doctest: +SKIP
        >>> print(llm.generate("The capital of France is")[0].text)  # doctest: +SKIP
    """

    def __init__(
        self,
        model: str = "default",
        *,
        target: Target | None = None,
        drafters: Mapping[str, Drafter] | None = None,
        notify: Callable[[str], None] = _LOG.info,
        **options: Any,
    ) -> None:
        """Load the model."""
        config = make_config(EngineConfig, {"model": model, **options}, "the engine")
        self.engine = Engine(config, target, drafters, notify)
        self.tokenizer = self.engine.target.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        speculation: SpeculationParams | Sequence[SpeculationParams] | None = None,
        *,
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """Generate for one prompt or many, all in one batch.

        Args:
            prompts: One prompt (a string, token ids, or chat messages), or a list of prompts.
            sampling: For all, or one for each.
            speculation: For all, or one for each.
            progress: Show a bar on standard error; ``None`` shows it where that is a terminal and
                there are several prompts.

        Returns:
            One output a prompt, in order. In a list of prompts, one that cannot be honoured comes
            back with ``finish_reason == "error"`` and the others go on.

        Raises:
            InvalidRequestError: A single prompt that cannot be honoured, or lists of unequal length.
        """
        is_one = _is_one_prompt(prompts)
        every = [prompts] if is_one else list(prompts)
        samplings = _for_each(sampling, SamplingParams, len(every), "sampling")
        speculations = _for_each(speculation, SpeculationParams, len(every), "speculation")
        runs: list[_Run | RequestOutput] = []
        for prompt, one_sampling, one_speculation in zip(
            every, samplings, speculations, strict=True
        ):
            try:
                runs.append(self._start(prompt, one_sampling, one_speculation))
            except ForedraftError as error:
                if is_one:
                    raise
                runs.append(_refused(error))
        by_id = {run.request_id: run for run in runs if isinstance(run, _Run)}
        if progress is None:
            progress = sys.stderr.isatty() and len(every) > 1
        try:
            with _bar(progress, by_id.values()) as advance:
                while any(run.output is None for run in by_id.values()):
                    for delta in self.engine.step():
                        if delta.request_id in by_id:
                            by_id[delta.request_id].take(delta)
                            advance(delta)
        finally:
            for run in by_id.values():
                if run.output is None:
                    self.engine.abort(run.request_id)
        return [run if isinstance(run, RequestOutput) else run.finished() for run in runs]

    def stream(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        speculation: SpeculationParams | None = None,
    ) -> Iterator[StreamChunk]:
        """Generate for one prompt, step by step.

        The joined ``text`` of all chunks equals ``generate(prompt)[0].text``. Closing the iterator
        ends the request.

        Args:
            prompt: A string, token ids, or chat messages.
            sampling: How tokens are picked.
            speculation: How it speculates.

        Yields:
            A chunk a step in which the request emitted something; the last one has the output.

        Raises:
            InvalidRequestError: The request cannot be honoured; raised at the call.
        """
        run = self._start(prompt, sampling or SamplingParams(), speculation or SpeculationParams())
        return self._stream(run)

    def encode(self, prompt: Prompt) -> np.ndarray:
        """Return a prompt's token ids, int64.

        Raises:
            InvalidRequestError: It is empty, or chat messages for a tokenizer without a template.
        """
        if isinstance(prompt, np.ndarray):
            return prompt
        if isinstance(prompt, str):
            if not prompt:
                raise InvalidRequestError("the prompt is empty; allowed is any text. Give it some.")
            ids = self._need_tokenizer()(prompt)["input_ids"]
            if not ids:
                raise InvalidRequestError(
                    f"the prompt {prompt!r} gives no token; give it some text."
                )
            return np.asarray(ids, dtype=np.int64)
        items = list(prompt)
        if items and all(isinstance(item, Mapping) for item in items):
            return self._encode_chat(items)
        return np.asarray(items, dtype=np.int64 if not items else None)

    def _encode_chat(self, messages: list[Any]) -> np.ndarray:
        tokenizer = self._need_tokenizer()
        if not tokenizer.chat_template:
            raise InvalidRequestError(
                "chat messages were given, but this model's tokenizer has no chat template; pass the "
                "prompt as a text (without --chat), or use an instruct model."
            )
        for message in messages:
            if not isinstance(message.get("role"), str) or not isinstance(
                message.get("content"), str
            ):
                raise InvalidRequestError(
                    f"a chat message is {message!r}; allowed is a mapping with the strings 'role' and "
                    "'content'."
                )
        try:
            ids = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_dict=False
            )
        except Exception as error:  # noqa: BLE001 - templates raise what they like
            raise InvalidRequestError(
                f"the chat template refused the messages ({error}); check their roles and order."
            ) from error
        return np.asarray(ids, dtype=np.int64)

    def _need_tokenizer(self) -> Any:
        if self.tokenizer is None:
            raise InvalidRequestError(
                "a text was given, but this model's folder holds no tokenizer; pass token ids instead."
            )
        return self.tokenizer

    def _start(
        self, prompt: Prompt, sampling: SamplingParams, speculation: SpeculationParams
    ) -> _Run:
        request_id = self.engine.add(self.encode(prompt), sampling, speculation)
        return _Run(self, self.engine.request_state(request_id))

    def _stream(self, run: _Run) -> Iterator[StreamChunk]:
        try:
            while run.output is None:
                for delta in self.engine.step():
                    if delta.request_id == run.request_id:
                        pieces = run.take(delta, token_by_token=True)
                        yield StreamChunk(
                            "".join(text for text, _ in pieces),
                            tuple(pieces),
                            delta.token_ids,
                            delta.num_accepted,
                            delta.finish_reason,
                            run.output,
                        )
        finally:
            if run.output is None:
                self.engine.abort(run.request_id)


class _Run:
    """One request on its way from deltas to an output."""

    def __init__(self, llm: LLM, state: Any) -> None:
        self._state = state
        self._detokenizer = Detokenizer(llm.tokenizer) if llm.tokenizer is not None else None
        self._text: list[str] = []
        self.request_id: str = state.request.request_id
        self.max_tokens: int = state.request.max_tokens
        self.output: RequestOutput | None = None

    def take(self, delta: Delta, token_by_token: bool = False) -> list[tuple[str, bool]]:
        """Add what a step did; return the text it completed, in pieces, and which were drafted."""
        shown = delta.token_ids[:-1] if delta.finish_reason == "stop" else delta.token_ids
        pieces: list[tuple[str, bool]] = []
        if self._detokenizer is not None:
            if token_by_token:
                for index, token_id in enumerate(shown):
                    is_draft = index < delta.num_accepted
                    pieces.append((self._detokenizer.push([token_id]), is_draft))
            else:
                pieces.append((self._detokenizer.push(shown), False))
            if delta.finish_reason is not None:
                pieces.append((self._detokenizer.flush(), False))
        pieces = [piece for piece in pieces if piece[0]]
        self._text.extend(text for text, _ in pieces)
        if delta.finish_reason is not None:
            request = self._state.request
            self.output = RequestOutput(
                request_id=self.request_id,
                prompt_ids=tuple(request.prompt_ids.tolist()),
                token_ids=tuple(self._state.output_ids.tolist()),
                text="".join(self._text),
                finish_reason=delta.finish_reason,
                stop_token_id=delta.stop_token_id,
                seed=request.seed,
                stats=self._state.stats,
                error=delta.error,
            )
        return pieces

    def finished(self) -> RequestOutput:
        """Return the output of a run that has ended."""
        if self.output is None:
            raise RuntimeError(f"request {self.request_id} has not ended")
        return self.output


def _refused(error: ForedraftError) -> RequestOutput:
    return RequestOutput("", (), (), "", "error", None, None, RequestStats(), str(error))


def _is_one_prompt(prompts: Any) -> bool:
    """Whether this is one prompt and not a list of them."""
    if isinstance(prompts, (str, np.ndarray)):
        return True
    if not isinstance(prompts, Sequence):
        raise InvalidRequestError(
            f"the prompt is of type {type(prompts).__name__}; allowed is a text, token ids, chat messages, "
            "or a list of these."
        )
    return not prompts or all(isinstance(p, (int, np.integer, Mapping)) for p in prompts)


def _for_each(given: Any, cls: type[Any], count: int, name: str) -> list[Any]:
    if given is None:
        return [cls()] * count
    if isinstance(given, cls):
        return [given] * count
    every = list(given)
    if len(every) != count or not all(isinstance(one, cls) for one in every):
        raise InvalidRequestError(
            f"{name} has {len(every)} entries for {count} prompts; allowed is one {cls.__name__} for all, or "
            "one for each."
        )
    return every


class _bar:  # noqa: N801 - used like a function
    """A progress bar over tokens on standard error, or nothing."""

    def __init__(self, is_shown: bool, runs: Any) -> None:
        self._is_shown = is_shown
        self._runs = list(runs)

    def __enter__(self) -> Callable[[Delta], None]:
        if not self._is_shown:
            return lambda delta: None
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
        )

        self._progress = Progress(
            TextColumn("[progress.description]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("prompts, {task.fields[tokens]} tokens"),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        self._progress.start()
        task = self._progress.add_task("generating", total=len(self._runs), tokens=0)
        num_tokens = 0

        def advance(delta: Delta) -> None:
            nonlocal num_tokens
            num_tokens += len(delta.token_ids)
            self._progress.update(task, advance=delta.finish_reason is not None, tokens=num_tokens)

        return advance

    def __exit__(self, *exc: object) -> None:
        if self._is_shown:
            self._progress.stop()
