"""Checks of the directory: are the files there, whole, and readable by everybody who will read them?"""

from __future__ import annotations

from pathlib import Path

from draft.checkpoint import describe_file
from draft.config import FILE_NAME as CONFIG_NAME
from draft.config import DraftConfig
from draft.decoder import find_foreign_parts
from draft.formats import from_engine
from draft.jsonfile import is_there
from draft.notes import FILE_NAME as RECORD_NAME
from draft.notes import ExportRecord
from draft.validate.result import CheckFailure, CheckSkipped
from draft.validate.subject import Subject

COPY_AGAIN = "copy the draft again, or export it again from its training checkpoint"


def check_files(subject: Subject) -> str:
    """config.json is JSON; the safetensors files are whole, and the bytes that headrace.json recorded."""
    try:
        subject.load_config()
        headers = subject.load_headers()
    except (ValueError, FileNotFoundError) as error:
        raise CheckFailure(str(error), COPY_AGAIN) from error
    pickles = [path.name for suffix in ("*.bin", "*.pt", "*.pth") for path in subject.directory.glob(suffix)]
    if pickles:
        raise CheckFailure(f"pickled files lie beside the weights: {', '.join(pickles)}", "remove them")
    recorded = _recorded_digests(subject)
    for name, expected in recorded.items():
        path = subject.directory / Path(name).name  # names in a record are data: none leads out of the directory
        found = describe_file(path) if path.is_file() else None
        if found != expected:
            raise CheckFailure(f"{name} is not the file that {RECORD_NAME} recorded at export", COPY_AGAIN)
    digests = f", digests as {RECORD_NAME} recorded" if recorded else ""
    return f"{len(headers)} tensors in {len({header.file for header in headers.values()})} file(s){digests}"


def _recorded_digests(subject: Subject) -> dict[str, dict[str, object]]:
    try:
        record = subject.record
    except CheckSkipped:
        return {}  # the check `schema` reports it
    return record.files if record is not None else {}


def check_schema(subject: Subject) -> str:
    """Our own files parse: draft_config.json and headrace.json."""
    seen: list[str] = []
    try:
        if is_there(subject.directory / CONFIG_NAME):
            DraftConfig.load(subject.directory / CONFIG_NAME)
            seen.append(CONFIG_NAME)
        if is_there(subject.directory / RECORD_NAME):
            ExportRecord.load(subject.directory / RECORD_NAME)
            seen.append(RECORD_NAME)
    except ValueError as error:
        raise CheckFailure(str(error), "mend the file, or export the draft again") from error
    if not seen:
        raise CheckSkipped(f"no {CONFIG_NAME} beside config.json", "import and export the draft to get one")
    return f"{' and '.join(seen)} parse"


def check_config(subject: Subject) -> str:
    """config.json describes a possible draft, of the kind that is trained, exported and validated here."""
    foreign = find_foreign_parts(subject.config)
    if foreign:
        raise CheckFailure(
            f"not a draft with plain Llama layers: {'; '.join(foreign)}",
            "engines may serve it, but training and these checks know Llama-type EAGLE-3 drafts only",
        )
    try:
        from_engine(subject.config, subject.verifier)
    except ValueError as error:
        raise CheckFailure(str(error), "mend config.json: `headrace draft export` writes a sound one") from error
    return "a Llama-type EAGLE-3 draft"


def check_transformers(subject: Subject) -> str:
    """The configuration parses with transformers (flat) or the speculators library (nested)."""
    config = subject.config
    remedy = "compare with a sound file: `headrace draft check`"
    if subject.form == "flat":
        report = subject.engine_report()
        if report.transformers_error is not None:
            raise CheckFailure(f"transformers.AutoConfig: {report.transformers_error}", remedy)
        return f"transformers reads {report.transformers_class}"
    # The library fills these with defaults of another model family; vLLM does not.
    missing = [name for name in ("speculators_config", "transformer_layer_config") if not config.get(name)]
    if missing:
        raise CheckFailure(f"a nested configuration without {', '.join(missing)}", remedy)
    from huggingface_hub.errors import StrictDataclassError
    from speculators.config import SpeculatorModelConfig

    try:
        nested = SpeculatorModelConfig.from_dict(config)
    except (ValueError, TypeError, KeyError, StrictDataclassError) as error:
        raise CheckFailure(f"speculators: {error}", remedy) from error
    return f"speculators reads {type(nested).__name__}"
