"""``foredraft heads``: what a head is, whether it is alive, and how other engines get it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any

import typer

from foredraft.cli.files import check_folder
from foredraft.errors import InvalidRequestError

app = typer.Typer(
    name="heads",
    help="Look at heads (EAGLE, EAGLE-3, Medusa, MTP), check them, write them for other engines.",
    context_settings={"help_option_names": ["-h", "--help"]},
    no_args_is_help=True,
)

_PROMPTS = (
    "Explain in a few sentences why the sky is blue.",
    "Write a short story about a lighthouse keeper and a storm.",
    "A shop sells pens at 3 dollars each. How much do 14 pens cost? Show your steps.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "List five tips for learning a new language.",
    "Summarize: The river rose all night, and by morning the bridge was under water.",
    "What is the difference between a virus and a bacterium?",
    "Translate into French: Where is the train station?",
)
_DEAD, _WEAK = 0.1, 0.4
"""First-position acceptance below which a head is dead, or weak."""

_Path = Annotated[Path, typer.Argument(help="Folder of the head.")]
_Model = Annotated[str, typer.Option(help="The target, as for generate.")]
_Json = Annotated[bool, typer.Option("--json", help="Print one JSON object, and nothing else.")]


@app.command("inspect")
def inspect(path: _Path, model: _Model = "default", as_json: _Json = False) -> None:
    """Say what a head is, which of the target's layers it reads, and what looks wrong.

    Example: foredraft heads inspect my-head --model ./my-model
    """
    from foredraft.heads.inspect import inspect_head
    from foredraft.model.loader import target_config

    found = inspect_head(path, target_config(model))
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(found)))
        return
    words = "all of the target's"
    if found.draft_vocab_size < found.vocab_size:
        words = f"{found.draft_vocab_size:,} of {found.vocab_size:,}"
    typer.echo(f"kind     {found.kind}")
    typer.echo(
        f"size     {found.num_parameters / 1e6:.1f} million parameters, "
        f"{found.num_bytes / 1e6:.1f} MB in bfloat16"
    )
    typer.echo(f"words    {words}")
    typer.echo(f"reads    inputs of layers {_listed(found.inputs_of)} (as vLLM counts)")
    typer.echo(f"         outputs of layers {_listed(found.outputs_of)} (as SGLang counts)")
    if found.flags:
        typer.echo(f"flags    {', '.join(found.flags)}")
    for warning in found.warnings:
        typer.echo(f"warning: {warning}")
    if not found.warnings:
        typer.echo("nothing looks wrong; 'foredraft heads check' measures whether it is alive")


@app.command("check")
def check(
    path: _Path,
    model: _Model = "default",
    max_tokens: Annotated[int, typer.Option(help="Tokens to write of each prompt.")] = 64,
    as_json: _Json = False,
) -> None:
    """Measure a head's acceptance on a few prompts; say whether it is alive.

    Example: foredraft heads check my-head --model ./my-model
    """
    from foredraft.engine.llm import LLM
    from foredraft.heads.inspect import read_any
    from foredraft.model.loader import target_config
    from foredraft.params import SamplingParams, SpeculationParams

    if not 1 <= max_tokens <= 4096:
        raise InvalidRequestError(f"max_tokens is {max_tokens}; allowed is 1 to 4096.")
    kind = read_any(path, target_config(model)).shape.kind
    options = {kind: {"path": str(path), "num_children": 1}}
    with LLM(model, drafter_options=options) as llm:
        prompts: list[Any] = list(_PROMPTS)
        if getattr(llm.engine.target.tokenizer, "chat_template", None):
            prompts = [[{"role": "user", "content": prompt}] for prompt in _PROMPTS]
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        outputs = llm.generate(prompts, sampling, SpeculationParams(kind, 4))
    steps = sum(output.stats.num_drafts for output in outputs)
    by_place = [0.0] * 4
    for output in outputs:
        for place, count in enumerate(output.stats.accepted_at[:4]):
            by_place[place] += count
    survival = [count / max(1, steps) for count in by_place]
    first = survival[0]
    verdict = "dead" if first < _DEAD else "weak" if first < _WEAK else "alive"
    if as_json:
        told = {"kind": kind, "survival": survival, "verdict": verdict, "num_drafts": steps}
        typer.echo(json.dumps(told))
        return
    shown = ", ".join(f"{value:.2f}" for value in survival)
    typer.echo(f"{verdict}: of {steps} greedy chains of 4 tokens {shown} survive, by position")
    if verdict == "dead":
        typer.echo(
            "A head that was trained for this target accepts half of its first tokens or more; "
            "this one was made for another, or reads other layers than it was trained on."
        )


@app.command("export")
def export(
    path: _Path,
    out: Annotated[Path, typer.Argument(help="Folder to write, which is not there yet.")],
    to: Annotated[str, typer.Option(help="vllm, sglang, specforge or speculators.")],
    model: _Model = "default",
) -> None:
    """Write a head in the layout that another engine reads.

    Example: foredraft heads export my-head for-vllm --to vllm --model ./my-model
    """
    from foredraft.heads.export import export_head
    from foredraft.heads.inspect import read_any, refuse_same
    from foredraft.model.loader import target_config

    refuse_same(path, out)
    config = target_config(model)
    head = read_any(path, config)
    check_folder("OUT", out.absolute().parent)
    export_head(head, to, out, model, config)
    typer.echo(f"{out}: written for {to}")


app.command("convert", help="The same as export: read any layout, write another.")(export)


def _listed(layers: tuple[int, ...]) -> str:
    return ", ".join(map(str, layers))
