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
    """Run the command line. Exit codes: 0 done, 1 found something wrong, 2 wrong usage or configuration."""
    try:
        app()
    except (ValueError, FileNotFoundError, ConnectionError) as error:
        from storage.errors import DamagedError  # heavy, and only needed here

        print(f"headrace: {error}", file=sys.stderr)
        sys.exit(1 if isinstance(error, DamagedError) else 2)
    except JobError as error:
        print(f"headrace: {error}", file=sys.stderr)
        sys.exit(1)
