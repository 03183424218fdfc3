"""``foredraft train``: heads for a target, from its own answers to a file of prompts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foredraft.cli.files import check_folder

if TYPE_CHECKING:
    from foredraft.train.trainer import Progress

_EXAMPLES = """
Examples:

  foredraft train eagle3 --data prompts.jsonl --out my-head

  foredraft train eagle3 --data prompts.jsonl --out my-head --minutes 2 --num-prompts 64

  foredraft train mtp --model ./my-model --data prompts.jsonl --out my-head

  foredraft train draft-model --num-layers 3 --data prompts.jsonl --out my-draft

Each line of the data is a JSON object with 'prompt', 'text' or 'messages'.
The target answers them first; the answers are kept in OUT, and a run that was
stopped goes on where it was. The head is then used with
'foredraft generate --method eagle3 --drafter-option path=my-head'.
"""


def train(
    method: Annotated[
        str, typer.Argument(help="Which: eagle, eagle3, medusa, mtp or draft-model.")
    ],
    data: Annotated[Path, typer.Option(help="Prompts, a JSON-lines file.")],
    out: Annotated[Path, typer.Option(help="Folder of the head; a stopped run goes on in it.")],
    model: Annotated[str, typer.Option(help="The target, as for generate.")] = "default",
    init: Annotated[
        str, typer.Option(help="Folder of a head to begin from, else the target's own layer.")
    ] = "",
    answers: Annotated[
        Path | None, typer.Option(help="File of the target's answers (OUT/answers.jsonl).")
    ] = None,
    num_prompts: Annotated[int, typer.Option(help="Use so many prompts; 0 is all.")] = 0,
    answer_tokens: Annotated[int, typer.Option(help="Most tokens of an answer.")] = 256,
    answer_minutes: Annotated[
        float, typer.Option(help="Answer for so long at most; 0 answers all.")
    ] = 0.0,
    draft_vocab_size: Annotated[
        int | None, typer.Option(help="Words that are drafted, 8192 by default; 0 is all.")
    ] = None,
    num_layers: Annotated[
        int, typer.Option(help="draft-model: layers of the target that it keeps.")
    ] = 2,
    embedding: Annotated[
        bool,
        typer.Option(
            help="draft-model: write it with its embedding and tokenizer, for any program, or "
            "without, for foredraft beside this target."
        ),
    ] = True,
    minutes: Annotated[
        float, typer.Option(help="Learn for so long, and not for --num-epochs.")
    ] = 0.0,
    num_epochs: Annotated[int, typer.Option(help="Times that each text is learnt from.")] = 2,
    batch_tokens: Annotated[int, typer.Option(help="Tokens of a step.")] = 1024,
    max_len: Annotated[int, typer.Option(help="Longest text, in tokens.")] = 512,
    num_levels: Annotated[
        int, typer.Option(help="Levels of the training-time test; Medusa: heads.")
    ] = 4,
    learning_rate: Annotated[
        float | None, typer.Option(help="At its highest [default: 1 / hidden size].")
    ] = None,
    prompt_share: Annotated[
        float, typer.Option(help="Share of the prompts' tokens that are learnt from, too.")
    ] = 0.2,
    regression: Annotated[
        float, typer.Option(help="Weight of the distance to the target's feature (EAGLE-1).")
    ] = 0.0,
    num_held_out: Annotated[int, typer.Option(help="Texts to measure on.")] = 48,
    checkpoint_minutes: Annotated[float, typer.Option(help="Between checkpoints.")] = 5.0,
    feature_gb: Annotated[
        float,
        typer.Option(help="Gigabytes of features to keep on disk meanwhile; 0 keeps none."),
    ] = 4.0,
    features: Annotated[
        Path | None,
        typer.Option(help="Keep features there, for runs of other heads of this target, too."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of everything random.")] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda[:index].")] = "auto",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object at the end, and nothing else.")
    ] = False,
) -> None:
    """Train a head for a target (EAGLE 1 to 3, Medusa, MTP), or a draft model of its layers."""
    import json

    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    from foredraft.model.source import find_source
    from foredraft.train.run import Run
    from foredraft.train.run import train as run_training
    from foredraft.train.texts import read_prompts
    from foredraft.train.trainer import TrainConfig

    run = Run(
        method=method,
        model=model,
        data=data,
        out=out,
        init=init,
        answers=answers,
        num_prompts=num_prompts,
        answer_tokens=answer_tokens,
        answer_minutes=answer_minutes,
        draft_vocab_size=draft_vocab_size,
        num_layers=num_layers,
        with_embedding=embedding,
        features=features,
        device=device,
        train=TrainConfig(
            learning_rate=learning_rate,
            num_epochs=num_epochs,
            batch_tokens=batch_tokens,
            max_len=max_len,
            num_levels=num_levels,
            prompt_share=prompt_share,
            regression=regression,
            num_held_out=num_held_out,
            minutes=minutes,
            checkpoint_minutes=checkpoint_minutes,
            feature_gb=feature_gb,
            seed=seed,
        ),
    )
    find_source(model)
    read_prompts(data)  # before anything is made or loaded
    check_folder("--out", out)
    console = Console(stderr=True)
    with Bars(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[shown]}"),
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
    ) as bars:
        bar = bars.add_task("starting", total=1.0, shown="")

        def tell_answers(done: int, of: int, tokens: int) -> None:
            bars.update(
                bar,
                description="answering",
                completed=done / of,
                shown=f"{done:,} of {of:,} prompts, {tokens:,} tokens",
            )

        measured: list[tuple[float, ...]] = [()]

        def tell(now: Progress) -> None:
            survival = " ".join(f"{value:.2f}" for value in now.survival)
            shown = f"step {now.step:,}  loss {now.loss:.3f}  {now.tokens_per_s:,.0f} tokens/s"
            shown += f"  accepted by level {survival}" if survival else ""
            bars.update(bar, description="learning", completed=now.share, shown=shown)
            if not console.is_terminal and now.survival != measured[0]:  # a line for the log
                measured[0] = now.survival
                console.print(f"{now.share:.0%}  {shown}")

        survival = run_training(run, tell_answers, tell, lambda text: console.print(text))
    length = 1 + sum(survival)
    if as_json:
        typer.echo(json.dumps({"held_out_survival": survival, "acceptance_length": length}))
        return
    shown = ", ".join(f"{value:.3f}" for value in survival)
    typer.echo(
        f"{out}: a greedy chain on held-out answers survives {shown}: {length:.2f} tokens a step"
    )


train.__doc__ = f"{train.__doc__}\n{_EXAMPLES}"
