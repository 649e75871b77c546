"""`headrace draft init | check | export | import | serve`."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from draft.compare import Disagreement

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)


class Form(StrEnum):
    flat = "flat"
    nested = "nested"


class Engine(StrEnum):
    vllm = "vllm"
    sglang = "sglang"


@app.command()
def init(
    verifier: Annotated[Path, typer.Option("--verifier", help="directory of the verifier; only config.json is read")],
    output: Annotated[Path, typer.Option("--output", "-o", help="file to write")] = Path("draft_config.json"),
    draft_vocab_size: Annotated[int, typer.Option(help="tokens that the draft can propose")] = 32000,
    layer_ids: Annotated[
        str | None, typer.Option("--layers", help="verifier layers to read, such as 2,30,58; default: EAGLE-3's")
    ] = None,
    verifier_name: Annotated[
        str | None, typer.Option(help="name of the verifier to write in place of the path")
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="any other field as name=value, value in JSON; repeatable")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="replace an existing file")] = False,
) -> None:
    """Write draft_config.json from the verifier's configuration."""
    from draft.config import DraftConfig

    overrides = dict(_read_setting(setting) for setting in settings or [])
    if output.exists() and not force:
        raise ValueError(f"{output} exists: give another --output, or --force")
    config = DraftConfig.from_verifier(
        verifier,
        draft_vocab_size=draft_vocab_size,
        aux_layer_ids=_read_ids(layer_ids) if layer_ids else None,
        verifier_name=verifier_name,
        **overrides,
    )
    typer.echo(str(config.save(output)))


@app.command()
def check(
    paths: Annotated[list[Path], typer.Argument(help="draft_config.json, config.json of either form, or directories")],
    as_json: Annotated[bool, typer.Option("--json", help="the disagreements as one JSON object")] = False,
) -> None:
    """Compare any number of draft configurations field by field, and with what the weights beside them imply.

    Exit codes: 0 they agree, 1 they do not, 2 a file is missing or no such file, 3 it cannot be read.
    """
    from draft.compare import collect_statements, find_disagreements, implied_by_weights

    statements = collect_statements(paths)
    weights: dict[str, int] = {}
    for path in paths:
        for name, value in implied_by_weights(path).items():
            if weights.setdefault(name, value) != value:
                raise ValueError(f"the weights in {path} imply {name} {value}, others {weights[name]}: not one draft")
    differing = find_disagreements(statements, weights)
    if as_json:
        body = {"agree": not differing, "disagreements": [_as_json(d) for d in differing]}
        typer.echo(json.dumps(body))
    else:
        _print_disagreements([statement.source for statement in statements], differing, bool(weights))
    if differing:
        raise typer.Exit(1)


@app.command("export")
def export_draft(
    checkpoint: Annotated[Path, typer.Argument(help="training checkpoint")],
    output: Annotated[Path, typer.Argument(help="directory to make")],
    form: Annotated[Form, typer.Option(help="flat: vLLM and SGLang; nested: speculators, vLLM")] = Form.flat,
    engine: Annotated[Engine, typer.Option(help="whose counting of layers eagle_config follows")] = Engine.vllm,
    embedding: Annotated[
        bool | None, typer.Option(help="with an embedding of its own; default: if the checkpoint holds one")
    ] = None,
    head: Annotated[Path | None, typer.Option(help="verifier head to take the embedding from")] = None,
    verifier_name: Annotated[str | None, typer.Option(help="name of the verifier to write into the files")] = None,
    acceptance: Annotated[
        Path | None, typer.Option(help="what `headrace evaluate --json` printed: put it on the model card")
    ] = None,
) -> None:
    """Write a draft that engines serve, with its model card."""
    from draft.export import export

    measured = None
    if acceptance is not None:
        from draft.evaluate import acceptance_notes
        from draft.jsonfile import read_json_object

        measured = acceptance_notes(read_json_object(acceptance))
    directory = export(
        checkpoint,
        output,
        form.value,
        engine=engine.value,
        embedding=embedding,
        head=head,
        verifier_name=verifier_name,
        acceptance=measured,
    )
    typer.echo(str(directory))


@app.command("import")
def import_draft(
    draft: Annotated[Path, typer.Argument(help="directory of a draft, flat or nested")],
    output: Annotated[Path, typer.Argument(help="training checkpoint to make")],
    verifier: Annotated[Path, typer.Option("--verifier", help="directory of the verifier; only config.json is read")],
    engine: Annotated[
        Engine, typer.Option(help="for whom a foreign draft was made: SGLang counts layers in eagle_config one less")
    ] = Engine.vllm,
) -> None:
    """Turn a draft, ours or a published one, into a training checkpoint."""
    from draft.importing import import_draft

    typer.echo(str(import_draft(draft, verifier, output, engine=engine.value)))


@app.command()
def serve(
    draft: Annotated[Path, typer.Argument(help="directory of a draft")],
    verifier: Annotated[str, typer.Option("--verifier", help="verifier to serve: directory or Hugging Face id")],
    num_speculative_tokens: Annotated[
        int | None, typer.Option("--tokens", help="draft tokens per step; default: as the draft says")
    ] = None,
    tensor_parallel_size: Annotated[int | None, typer.Option("--tp", help="tensor-parallel size")] = None,
) -> None:
    """Print the `vllm serve` line for a draft."""
    from draft.serve import serve_command

    if not (draft / "config.json").is_file():
        raise FileNotFoundError(f"{draft} has no config.json: give a draft's directory")
    line = serve_command(
        draft, verifier, num_speculative_tokens=num_speculative_tokens, tensor_parallel_size=tensor_parallel_size
    )
    typer.echo(line)


def _read_ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise ValueError(f"--layers {text!r} is no list of integers such as 2,30,58") from error


def _read_setting(setting: str) -> tuple[str, object]:
    from draft.config import DraftConfig

    name, equals, value = setting.partition("=")
    if not equals or name not in DraftConfig.model_fields:
        known = ", ".join(sorted(DraftConfig.model_fields))
        raise ValueError(f"--set {setting!r} is not name=value with one of the fields {known}")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def _as_json(disagreement: Disagreement) -> dict[str, object]:
    return {
        "field": disagreement.field,
        "values": disagreement.values,
        "weights": disagreement.weights,
        "wrong": list(disagreement.wrong),
    }


def _print_disagreements(sources: list[str], differing: list[Disagreement], has_weights: bool) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console()
    if not differing:
        console.print(f"{len(sources)} file(s) agree" + (", and the weights with them" if has_weights else ""))
        return
    table = Table(title=f"{len(differing)} field(s) differ")
    for heading in ("field", "file", "says", "weights imply"):
        table.add_column(heading, overflow="fold")
    for disagreement in differing:
        for row, (source, value) in enumerate(disagreement.values.items()):
            colour = "red" if source in disagreement.wrong else "default"
            table.add_row(
                disagreement.field if row == 0 else "",
                escape(source),
                f"[{colour}]{escape(value)}[/]",
                escape(disagreement.weights or "") if row == 0 else "",
            )
        table.add_section()
    console.print(table)
