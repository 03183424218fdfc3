"""The ``foredraft`` command. One file a subcommand; nothing heavy is imported before it is needed.

Exit status: 0; 1 if some prompt failed and the others were done; 2 if what was asked for cannot be
done, with one line on standard error that begins with ``error:``; 130 after Ctrl-C.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
from collections.abc import Callable, Sequence

import typer

from foredraft.cli.bench import bench
from foredraft.cli.generate import generate
from foredraft.cli.heads import app as heads
from foredraft.cli.plan import plan
from foredraft.cli.profile import profile
from foredraft.cli.train import train
from foredraft.errors import ForedraftError

app = typer.Typer(
    name="foredraft",
    help="Lossless speculative decoding: draft, verify, and know when it pays.",
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_COMMANDS: dict[str, Callable[..., None]] = {
    "generate": generate,
    "profile": profile,
    "bench": bench,
    "plan": plan,
    "train": train,
}
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
for _name, _command in _COMMANDS.items():
    app.command(_name)(_command)
app.add_typer(heads)


def _show_version(is_asked: bool) -> None:
    if is_asked:
        from foredraft import __version__

        typer.echo(f"foredraft {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(
        False,
        "--version",
        callback=_show_version,
        is_eager=True,
        help="Print the version and leave.",
    ),
) -> None:
    pass


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command and leave with its exit status.

    Args:
        argv: The arguments; ``None`` takes those of the process. Without any, it shows the help.
    """
    for stream in (sys.stdout, sys.stderr):  # generated text may hold what the terminal cannot show
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    arguments = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    status = 0
    try:
        status = app(args=arguments, prog_name="foredraft", standalone_mode=False) or 0
        sys.stdout.flush()
    except ForedraftError as error:
        status = _fail(str(error))
    except (KeyboardInterrupt, typer.Abort):
        status = 130
    except OSError as error:
        if error.errno == errno.EPIPE:  # whoever read it has left, and knows; typer says 1 too
            status = 1
        elif error.errno in _NO_ROOM:
            where = "the output" if error.filename is None else str(error.filename)
            reason = f"{where} cannot be written ({error.strerror})"
            status = _fail(f"{reason}; make room, or write elsewhere.")
        else:
            raise
        _drop_output()
    except Exception as error:
        # Wrong usage, found by typer; the class of this error moved between its versions.
        format_message = getattr(error, "format_message", None)
        if format_message is None:
            raise
        command = getattr(getattr(error, "ctx", None), "command_path", None)
        if command is None:
            command = f"foredraft {arguments[0]}" if arguments[0] in _COMMANDS else "foredraft"
        message = format_message().rstrip(".")
        status = _fail(f"{message[:1].lower()}{message[1:]}; see '{command} --help'.")
    if status == 130:
        typer.echo("stopped", err=True)
    sys.exit(status)


def _fail(message: str) -> int:
    with contextlib.suppress(OSError):  # standard error may be as full as the rest
        typer.echo(f"error: {' '.join(message.split())}", err=True)
    return 2


def _drop_output() -> None:
    """Let what standard output still holds go nowhere: Python would fail on it when it leaves."""
    with contextlib.suppress(OSError, ValueError):  # a stream without a file descriptor
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


if __name__ == "__main__":
    main()
