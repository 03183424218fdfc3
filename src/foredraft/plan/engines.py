"""A plan as another engine's own flags or configuration, or what that engine cannot do.

Names were read in the engines' released code and documentation: vLLM 0.33, SGLang 0.5.23,
TensorRT-LLM's PyTorch backend, llama.cpp, TGI and Ollama as of 2026-11. They drift; the first line
of what is written says what it is for.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import dataclass, field

from foredraft.errors import PlanError
from foredraft.plan.result import Plan

METHODS = ("ngram", "suffix", "draft-model", "eagle", "eagle3", "medusa", "mtp")
_WITH_DRAFT_MODEL = ("draft-model", "eagle", "eagle3", "medusa")
_TARGET = "MODEL"
_DRAFT = "DRAFT_MODEL"
_LONGEST_MATCH, _SHORTEST_MATCH = 4, 2


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What to give another engine.

    Attributes:
        engine: Its name.
        text: A command, YAML or Modelfile, or empty where the engine cannot or need not.
        files: Contents of files that the text names, by name.
        notes: What to know.
    """

    engine: str
    text: str
    files: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def render(self) -> str:
        """Return it as one text: notes as comments, then the text, then the files."""
        parts = [f"# {note}" for note in self.notes]
        if self.text:
            parts.append(self.text)
        for name, content in self.files.items():
            parts += [f"# {name}", content]
        return "\n".join(parts)


@dataclass(frozen=True, slots=True)
class _Wish:
    """The part of a plan that an engine is told."""

    method: str
    best: int
    tiers: tuple[tuple[int, int, int], ...]
    last_batch: int | None
    known_batch: int | None
    draft_model: str

    @property
    def most(self) -> int:
        return max(n for _, _, n in self.tiers)

    @property
    def fixed(self) -> int:
        """For an engine with one number for all batch sizes: the one of the first."""
        return self.best or self.most

    @property
    def names_draft_model(self) -> bool:
        """An MTP module is usually a part of the target's own checkpoint."""
        return self.method in _WITH_DRAFT_MODEL or (
            self.method == "mtp" and self.draft_model != _DRAFT
        )

    @property
    def is_by_batch(self) -> bool:
        return len(self.tiers) > 1


def emit(plan: Plan, engine: str, draft_model: str | None = None) -> EngineConfig:
    """Write a plan for another engine.

    Args:
        plan: The plan; its method is what the engine is told to use.
        engine: One of ``ENGINES``.
        draft_model: Name or path of the draft model or head; not given, a placeholder stands there.

    Raises:
        PlanError: The engine or the method is unknown, or a draft model is given to a method
            without one.
    """
    if engine not in ENGINES:
        raise PlanError(f"engine is {engine!r}; allowed is one of {', '.join(ENGINES)}.")
    if plan.method not in METHODS:
        raise PlanError(
            f"method is {plan.method!r}, for which other engines have no name; allowed is one of "
            f"{', '.join(METHODS)}."
        )
    if draft_model is not None and plan.method in ("ngram", "suffix"):
        raise PlanError(
            f"a draft model is given, but method {plan.method} has none; choose another method or "
            "leave the draft model out."
        )
    tiers = tuple(plan.tiers())
    wish = _Wish(
        method=plan.method,
        best=plan.first.best.num_speculative_tokens,
        tiers=tiers,
        last_batch=None if plan.break_even_batch is None else plan.break_even_batch - 1,
        known_batch=plan.most_known_batch,
        draft_model=draft_model or _DRAFT,
    )
    head = (f"for {_TITLES[engine]}; plan: {plan.verdict}",)
    if not wish.most:
        config = EngineConfig(engine, "", notes=("start it without any speculative option",))
    else:
        config = ENGINES[engine](wish)
    placeholder: tuple[str, ...] = ()
    if wish.draft_model == _DRAFT and _DRAFT in config.render():
        placeholder = (f"put the draft model in place of {_DRAFT}",)
    return EngineConfig(engine, config.text, config.files, (*head, *config.notes, *placeholder))


def _cannot(engine: str, why: str) -> EngineConfig:
    return EngineConfig(engine, "", notes=(f"{_TITLES[engine]} cannot do this: {why}",))


def _no_batches(wish: _Wish, engine: str) -> tuple[str, ...]:
    if not wish.is_by_batch:
        return ()
    best = ", ".join(f"{low} to {high}: {n}" for low, high, n in wish.tiers)
    return (
        f"{_TITLES[engine]} cannot change the number by batch size; best by batch size is {best}",
    )


def _vllm(wish: _Wish) -> EngineConfig:
    config: dict[str, object] = {}
    notes: list[str] = []
    if wish.method == "medusa":
        return _cannot("vllm", "support for Medusa heads was removed")
    config["method"] = {"draft-model": "draft_model"}.get(wish.method, wish.method)
    if wish.names_draft_model:
        config["model"] = wish.draft_model
    config["num_speculative_tokens"] = wish.most
    if wish.method == "ngram":
        config["prompt_lookup_max"] = _LONGEST_MATCH
        config["prompt_lookup_min"] = _SHORTEST_MATCH
    if wish.method == "suffix":
        notes.append("suffix decoding needs the package arctic-inference beside vLLM")
    if wish.is_by_batch:
        tiers = _with_zero(wish)
        config["num_speculative_tokens_per_batch_size"] = [list(tier) for tier in tiers]
        notes.append("the numbers by batch size are not applied with data parallelism above 1")
    command = f"vllm serve {_TARGET} --speculative-config {shlex.quote(json.dumps(config))}"
    return EngineConfig("vllm", command, notes=tuple(notes))


def _sglang(wish: _Wish) -> EngineConfig:
    algorithms = {
        "ngram": "NGRAM",
        "draft-model": "STANDALONE",
        "eagle": "EAGLE",
        "eagle3": "EAGLE3",
        "mtp": "NEXTN",
    }
    if wish.method not in algorithms:
        why = {
            "suffix": "its nearest is the n-gram method with an external corpus",
            "medusa": "it does not load Medusa heads",
        }
        return _cannot("sglang", why[wish.method])
    command = [
        "python -m sglang.launch_server --model-path MODEL",
        f"--speculative-algorithm {algorithms[wish.method]}",
    ]
    # Of all methods, adaptive_unsupported_reason lets these two alone through.
    is_adaptive = wish.is_by_batch and wish.method in ("eagle", "eagle3")
    most = wish.most if is_adaptive else wish.fixed
    if wish.method == "ngram":
        # Counted with the root, the last token of the text so far.
        command.append(f"--speculative-num-draft-tokens {most + 1}")
        return EngineConfig("sglang", " ".join(command), notes=_no_batches(wish, "sglang"))
    if wish.names_draft_model:
        command.append(f"--speculative-draft-model-path {shlex.quote(wish.draft_model)}")
    command += [
        f"--speculative-num-steps {most}",
        "--speculative-eagle-topk 1",
        f"--speculative-num-draft-tokens {most + 1}",
    ]
    if not is_adaptive:
        notes: tuple[str, ...] = ()
        if wish.is_by_batch:
            notes = ("SGLang adapts to batch size with EAGLE only", *_no_batches(wish, "sglang"))
        return EngineConfig("sglang", " ".join(command), notes=notes)
    command += ["--speculative-adaptive", "--speculative-adaptive-config adaptive.json"]
    tiers = {str(low): {"candidate_steps": [n]} for low, _, n in _with_zero(wish)}
    return EngineConfig(
        "sglang",
        " ".join(command),
        {"adaptive.json": json.dumps(tiers)},
        ("each key of adaptive.json is the smallest batch size it holds for",),
    )


def _tensorrt(wish: _Wish) -> EngineConfig:
    types = {
        "ngram": "NGram",
        "suffix": "SA",
        "draft-model": "Draft_Target",
        "eagle3": "Eagle3",
        "mtp": "MTP",
    }
    if wish.method not in types:
        why = {
            "eagle": "its PyTorch backend loads EAGLE-3 heads only",
            "medusa": "its PyTorch backend does not load Medusa heads",
        }
        return _cannot("tensorrt-llm", why[wish.method])
    lines = [
        "speculative_config:",
        f"  decoding_type: {types[wish.method]}",
        f"  max_draft_len: {wish.most}",
    ]
    if wish.names_draft_model:
        lines.append(f"  speculative_model: {json.dumps(wish.draft_model)}")
    if wish.method == "ngram":
        lines.append(f"  max_matching_ngram_size: {_LONGEST_MATCH}")
    notes: tuple[str, ...] = ("in the file given to trtllm-serve as --config",)
    tiers = _with_zero(wish)
    last = max(index for index, (_, _, n) in enumerate(tiers) if n)
    drafting = [(high, n) for _, high, n in tiers[: last + 1]]
    if len(drafting) > 1:
        lines.append("  draft_len_schedule:")
        lines += [f"    {high}: {n}" for high, n in drafting]
        notes += (
            "draft_len_schedule: up to so many requests, so many draft tokens, and none above the "
            "last (older releases read a key as the smallest batch size instead: check yours)",
        )
    elif wish.last_batch is not None:
        lines.append(f"  max_concurrency: {wish.last_batch}")
    return EngineConfig("tensorrt-llm", "\n".join(lines), notes=notes)


def _llama_cpp(wish: _Wish) -> EngineConfig:
    kinds = {
        "ngram": "ngram-simple",
        "draft-model": "draft-simple",
        "eagle3": "draft-eagle3",
        "mtp": "draft-mtp",
    }
    if wish.method not in kinds:
        why = {
            "suffix": "its nearest is --spec-type ngram-cache",
            "eagle": "it loads EAGLE-3 heads only",
            "medusa": "it does not load Medusa heads",
        }
        return _cannot("llama.cpp", why[wish.method])
    command = [f"llama-server -m {_TARGET}.gguf", f"--spec-type {kinds[wish.method]}"]
    if wish.method == "ngram":
        command += [
            f"--spec-ngram-simple-size-n {_LONGEST_MATCH}",
            f"--spec-ngram-simple-size-m {wish.fixed}",
        ]
    else:
        if wish.names_draft_model:
            command.append(f"--spec-draft-model {shlex.quote(wish.draft_model)}")
        command.append(f"--spec-draft-n-max {wish.fixed}")
    return EngineConfig("llama.cpp", " ".join(command), notes=_no_batches(wish, "llama.cpp"))


def _tgi(wish: _Wish) -> EngineConfig:
    if wish.method not in ("ngram", "medusa"):
        return _cannot("tgi", f"it drafts by n-grams or by Medusa heads, not by {wish.method}")
    model = wish.draft_model if wish.method == "medusa" else _TARGET
    command = f"text-generation-launcher --model-id {shlex.quote(model)} --speculate {wish.fixed}"
    notes = _no_batches(wish, "tgi")
    if wish.method == "medusa":
        notes += ("the Medusa checkpoint names its target and loads by itself",)
    return EngineConfig("tgi", command, notes=notes)


def _ollama(wish: _Wish) -> EngineConfig:
    if wish.method not in ("draft-model", "mtp"):
        return _cannot(
            "ollama", f"it drafts with a small model or an MTP module, not by {wish.method}"
        )
    lines = [
        f"FROM {_TARGET}",
        f"DRAFT {wish.draft_model}",
        f"PARAMETER draft_num_predict {wish.fixed}",
    ]
    notes = (
        "a Modelfile, for 'ollama create'; one call turns drafting off with the option "
        "draft_num_predict 0",
        *_no_batches(wish, "ollama"),
    )
    return EngineConfig("ollama", "\n".join(lines), notes=notes)


def _with_zero(wish: _Wish) -> list[tuple[int, int, int]]:
    """Tiers up to the largest batch known, and one without a draft from break-even on."""
    tiers = list(wish.tiers)
    end = tiers[-1][1]
    if wish.last_batch is None and wish.known_batch is not None and wish.known_batch > end:
        tiers[-1] = (tiers[-1][0], wish.known_batch, tiers[-1][2])
    if wish.last_batch is not None and tiers[-1][2]:
        if wish.last_batch > end:
            tiers[-1] = (tiers[-1][0], wish.last_batch, tiers[-1][2])
            end = wish.last_batch
        if wish.last_batch == end:
            tiers.append((end + 1, end + 1, 0))
    return tiers


ENGINES: dict[str, Callable[[_Wish], EngineConfig]] = {
    "vllm": _vllm,
    "sglang": _sglang,
    "tensorrt-llm": _tensorrt,
    "llama.cpp": _llama_cpp,
    "tgi": _tgi,
    "ollama": _ollama,
}
"""Writers by the name of the engine."""

_TITLES = {
    "vllm": "vLLM 0.33",
    "sglang": "SGLang 0.5.23",
    "tensorrt-llm": "TensorRT-LLM",
    "llama.cpp": "llama.cpp",
    "tgi": "TGI",
    "ollama": "Ollama",
}
