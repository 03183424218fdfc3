"""The ``foredraft`` command. One file a subcommand; nothing heavy is imported before it is needed."""

from __future__ import annotations

import sys

import typer

from foredraft.cli.bench import bench
from foredraft.cli.generate import generate
from foredraft.errors import ForedraftError

app = typer.Typer(
    name="foredraft",
    help="Lossless speculative decoding: draft, verify, and know when it pays.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
app.command()(generate)
app.command()(bench)


@app.callback(invoke_without_command=True)
def _root(
    version: bool = typer.Option(False, "--version", help="Print the version and leave."),
) -> None:
    if version:
        from foredraft import __version__

        typer.echo(f"foredraft {__version__}")
        raise typer.Exit


def main() -> None:
    """Run the command; an error made on purpose is one line on standard error and exit status 2."""
    try:
        app()
    except ForedraftError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(2)
    except KeyboardInterrupt:
        typer.echo("stopped", err=True)
        sys.exit(130)


if __name__ == "__main__":
    main()
