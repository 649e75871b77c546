"""The `headrace` command. Verbs live in `ray_jobs/commands/`, one module each; heavy imports happen inside them."""

from __future__ import annotations

import sys

import typer

from ray_jobs.commands import (
    compact,
    demo,
    draft,
    evaluate,
    export,
    gc,
    generate,
    plan,
    query,
    status,
    train,
    validate,
    verify,
)
from ray_jobs.errors import JobError

app = typer.Typer(
    name="headrace",
    help="Channels a verifier's hidden states to the training of its draft model.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for verb in (demo, generate, plan, train, status, query, verify, gc, compact, export, validate, evaluate):
    app.command(verb.__name__.rpartition(".")[2])(verb.command)
app.add_typer(draft.app, name="draft", help="Write, compare, convert and serve draft configurations.")


def main() -> None:
    """Run the command line.

    Exit codes: 0 done, 1 found something wrong, 2 wrong usage or configuration, 3 could not be done: storage or cluster
    failed, or another writer was in the way. An error of this program itself is a traceback, and 1.
    """
    try:
        app()
    except Exception as error:
        code = _exit_code(error)
        if code is None:
            raise
        message = str(error) or type(error).__name__
        # One line for a log; what a user mends may be laid out, as a wrong query with a mark below it.
        print(f"headrace: {message if code < 3 else ' '.join(message.split())}", file=sys.stderr)
        sys.exit(code)


def _exit_code(error: Exception) -> int | None:
    """The exit code of an error that its message explains; None for a bug."""
    from storage.errors import CompleteError, ContentionError, DamagedError, FencedError  # heavy, and only needed here

    match error:
        case DamagedError() | JobError():
            return 1
        case ValueError() | FileNotFoundError() | FileExistsError() | IsADirectoryError() | NotADirectoryError():
            return 2
        # The address of a cluster where none answers.
        case ConnectionError():
            return 2
        case OSError() | FencedError() | CompleteError() | ContentionError():
            return 3
    # Where a command has used Ray: what of it did not become an error of the job is the cluster's.
    ray_exceptions = sys.modules.get("ray.exceptions")
    return 3 if ray_exceptions is not None and isinstance(error, ray_exceptions.RayError) else None
