"""The model card (README.md) of an exported draft, with the front matter that Hugging Face reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from draft.config import DraftConfig
from draft.notes import Acceptance, ExportRecord
from draft.serve import serve_command


def model_card(config: DraftConfig, record: ExportRecord, *, name: str) -> str:
    """Markdown with YAML front matter. Only what is known is stated; nothing is estimated."""
    verifier = config.verifier.name_or_path
    about = (
        f"# {name}\n\nEAGLE-3 draft for `{verifier}`: it proposes {config.num_speculative_tokens} tokens per step that "
        "the verifier checks, so the verifier's outputs keep their distribution."
    )
    line = serve_command("<this directory>", verifier, num_speculative_tokens=config.num_speculative_tokens)
    sections = [
        _front_matter(config, record),
        about,
        "## Shape\n\n" + _table(("field", "value"), _shape_rows(config, record)),
        f"## Serving\n\n```bash\n{line}\n```",
        "## Measured acceptance\n\n" + _acceptance(record.notes.acceptance),
        "## Training\n\n" + _training(record),
    ]
    return "\n\n".join(sections) + "\n"


def _front_matter(config: DraftConfig, record: ExportRecord) -> str:
    fields: dict[str, Any] = {
        "library_name": "speculators" if record.form == "nested" else "vllm",
        "pipeline_tag": "text-generation",
        "tags": ["speculative-decoding", config.algorithm, "draft-model", "headrace"],
    }
    if not Path(config.verifier.name_or_path).is_absolute():
        fields["base_model"] = config.verifier.name_or_path
    return "---\n" + yaml.safe_dump(fields, sort_keys=False).rstrip() + "\n---"


def _shape_rows(config: DraftConfig, record: ExportRecord) -> list[tuple[str, object]]:
    return [
        ("form", record.form),
        ("engine", record.engine),
        ("decoder layers", config.num_hidden_layers),
        ("hidden size", config.hidden_size),
        (
            "heads / KV heads / head_dim",
            f"{config.num_attention_heads} / {config.num_key_value_heads} / {config.head_dim}",
        ),
        ("draft vocabulary", f"{config.draft_vocab_size:,} of {config.vocab_size:,}"),
        ("verifier layers read", f"{config.aux_layer_ids} of {config.verifier.num_hidden_layers} (vLLM convention)"),
        ("rope", config.rope_parameters),
        ("weights", config.dtype),
    ]


def _acceptance(measured: list[Acceptance]) -> str:
    if not measured:
        return "Not measured yet (`headrace evaluate`)."
    rows = [
        (
            m.prompts,
            m.num_speculative_tokens,
            f"{m.acceptance_length:.3f}",
            " / ".join(f"{rate:.3f}" for rate in m.position_rates),
            f"{m.num_drafts:,}",
        )
        for m in measured
    ]
    return _table(("prompts", "draft tokens", "acceptance length", "per position", "drafts"), rows)


def _training(record: ExportRecord) -> str:
    notes = record.notes
    if not notes.datasets and not notes.recipe:
        return "No record of the training run came with the weights."
    parts: list[str] = []
    if notes.datasets:
        rows = [(d.uri, f"`{d.identity_digest}`", d.version, f"{d.weight:g}") for d in notes.datasets]
        parts.append(_table(("data set", "identity", "snapshot", "weight"), rows))
    facts: list[tuple[str, object]] = []
    if notes.created:
        facts.append(("trained", notes.created))
    if notes.step is not None:
        facts.append(("optimizer steps", f"{notes.step:,}"))
    if notes.coverage is not None:
        facts.append(("loss tokens inside the draft vocabulary", f"{notes.coverage:.4f}"))
    if notes.training_metrics:
        accuracy = " / ".join(f"{value:.3f}" for value in notes.training_metrics.position_accuracy)
        facts.append((f"accuracy per position ({notes.training_metrics.split}, teacher-forced)", accuracy))
    if facts:
        parts.append(_table(("fact", "value"), facts))
    if notes.recipe:
        parts.append("Recipe:\n\n```yaml\n" + yaml.safe_dump(notes.recipe, sort_keys=False).rstrip() + "\n```")
    return "\n\n".join(parts)


def _table(header: tuple[str, ...], rows: list[Any]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    lines += ["| " + " | ".join(str(cell).replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join(lines)
