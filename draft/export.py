"""From a training checkpoint to a directory that an engine serves."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from draft.card import model_card
from draft.checkpoint import MODEL_NAME, describe_file, publish_directory, read_checkpoint
from draft.config import DraftConfig
from draft.formats import Engine, Form, to_form
from draft.notes import FILE_NAME as RECORD_NAME
from draft.notes import Acceptance, ExportRecord
from draft.vocab import find_mapping_faults
from draft.weights import EMBEDDING, name_in_form, tensor_shapes

if TYPE_CHECKING:
    import torch


def export(
    training_checkpoint_dir: Path,
    out_dir: Path,
    form: Form = "flat",
    *,
    engine: Engine = "vllm",
    embedding: bool | None = None,
    head: Path | None = None,
    verifier_name: str | None = None,
    acceptance: list[Acceptance] | None = None,
) -> Path:
    """Write config.json, model.safetensors, draft_config.json, headrace.json and README.md to a new directory.

    Floating-point tensors are cast to the draft's dtype, d2t to int64 and t2d to bool. Engines share the verifier's
    embedding with a draft that has none. By default the draft keeps an embedding that the checkpoint holds (an imported
    draft's own; training stores none); with `embedding=True` it gets one in any case, failing the checkpoint from
    `head`, a safetensors file with `embed_tokens.weight`; with False it goes without. `verifier_name` replaces the
    verifier's name in the configuration (a path on the training machine says nothing elsewhere). `acceptance` is added
    to the measurements that the checkpoint already carries.

    Raises ValueError when the weights are not finite or do not fit the configuration, FileExistsError when `out_dir`
    is taken.
    """
    checkpoint = read_checkpoint(training_checkpoint_dir)
    config = checkpoint.config
    if verifier_name:
        config = config.replace(verifier={**config.verifier.model_dump(), "name_or_path": verifier_name})
    engine_config = to_form(config, form, engine=engine)
    tensors = checkpoint.tensors()
    if embedding and EMBEDDING not in tensors:
        tensors[EMBEDDING] = _embedding_from(head, config)
    if embedding is False:
        tensors.pop(EMBEDDING, None)
    tensors = serving_tensors(config, tensors)
    notes = checkpoint.notes
    if acceptance:
        notes = notes.model_copy(update={"acceptance": [*notes.acceptance, *acceptance]})

    from safetensors.torch import save_file

    out_dir.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{out_dir.name}.", dir=out_dir.parent))
    try:
        named = {name_in_form(name, form, config.num_hidden_layers): tensor for name, tensor in tensors.items()}
        save_file(named, staging / MODEL_NAME, metadata={"format": "pt"})
        (staging / "config.json").write_text(json.dumps(engine_config, indent=2) + "\n")
        config.save(staging)
        record = ExportRecord(
            form=form, engine=engine, files={MODEL_NAME: describe_file(staging / MODEL_NAME)}, notes=notes
        )
        (staging / "README.md").write_text(model_card(config, record, name=out_dir.name))
        publish_directory(staging, out_dir, RECORD_NAME, record.to_json())
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return out_dir


def serving_tensors(config: DraftConfig, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors in the order and dtypes of an export. Raises ValueError for weights or maps that cannot be served."""
    import torch

    dtype = getattr(torch, config.dtype)
    served: dict[str, torch.Tensor] = {}
    for name in tensor_shapes(config, embedding=EMBEDDING in tensors):
        tensor = tensors[name]
        if name in ("d2t", "t2d"):
            served[name] = tensor.to(torch.int64 if name == "d2t" else torch.bool).contiguous()
            continue
        served[name] = tensor.to(dtype).contiguous()
        if not bool(torch.isfinite(served[name]).all()):
            raise ValueError(f"{name} has values that are not finite in {config.dtype}: the training run diverged")
    if config.uses_draft_vocab:
        faults = find_mapping_faults(served["d2t"].numpy(), served["t2d"].numpy(), config.vocab_size)
        if faults:
            raise ValueError("the vocabulary mapping is unsound: " + "; ".join(faults))
    return served


def _embedding_from(head: Path | None, config: DraftConfig) -> torch.Tensor:
    if head is None:
        raise ValueError("the checkpoint holds no embedding: give the verifier head's file, or export without one")
    from safetensors import safe_open

    with safe_open(head, framework="pt") as content:
        if EMBEDDING not in content.keys():  # noqa: SIM118 (safe_open is no mapping)
            raise ValueError(f"{head} has no {EMBEDDING}")
        tensor = content.get_tensor(EMBEDDING)
    if tuple(tensor.shape) != (config.vocab_size, config.hidden_size):
        raise ValueError(
            f"{head}: {EMBEDDING} is {list(tensor.shape)}, the draft needs {[config.vocab_size, config.hidden_size]}"
        )
    return tensor
