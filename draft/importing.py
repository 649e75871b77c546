"""From a draft in an engine's format (ours or anybody's) back to a training checkpoint."""

from __future__ import annotations

from pathlib import Path

from draft.checkpoint import write_checkpoint
from draft.compare import find_disagreements, read_statement
from draft.config import FILE_NAME as CONFIG_NAME
from draft.config import DraftConfig
from draft.formats import SGLANG_LAYER_SHIFT, Engine, engine_view, from_engine
from draft.jsonfile import read_json_object
from draft.notes import FILE_NAME as RECORD_NAME
from draft.notes import ExportRecord, GenerationNotes
from draft.tensorfiles import read_canonical, read_headers
from draft.verifier import read_verifier


def load_draft_config(draft_dir: Path, verifier_dir: Path, engine: Engine = "vllm") -> DraftConfig:
    """The DraftConfig of a draft directory: its own where it has one that its config.json agrees with, else derived.

    `engine` is the one whose counting of layers a foreign `eagle_config` follows (see `import_draft`).
    """
    engine_file = draft_dir / "config.json"
    if not engine_file.is_file():
        raise FileNotFoundError(f"{draft_dir} has no config.json: it is no draft in an engine's format")
    if not (draft_dir / CONFIG_NAME).is_file():
        config = read_json_object(engine_file)
        try:
            ids = engine_view(config).get("aux_layer_ids")
            if engine == "sglang" and ids and not config.get("eagle_aux_hidden_state_layer_ids"):
                config |= {"eagle_aux_hidden_state_layer_ids": [layer + SGLANG_LAYER_SHIFT for layer in ids]}
            return from_engine(config, read_verifier(verifier_dir))
        except ValueError as error:
            raise ValueError(f"{engine_file}: {error}") from error
    own = draft_dir / CONFIG_NAME
    differing = find_disagreements([read_statement(own), read_statement(engine_file)])
    if differing:
        fields = ", ".join(disagreement.field for disagreement in differing)
        raise ValueError(f"{own} and {engine_file} disagree about {fields}: see `headrace draft check {draft_dir}`")
    return DraftConfig.load(own)


def import_draft(draft_dir: Path, verifier_dir: Path, out_dir: Path, *, engine: Engine = "vllm") -> Path:
    """Turn a flat or nested draft into a training checkpoint (to go on training, or to export in the other form).

    vLLM takes layer ids in `eagle_config` as they are, SGLang adds one: `engine` says whom the draft was made for. It
    matters only for foreign drafts that name their ids nowhere else.

    A missing t2d is rebuilt from d2t. Weights keep their dtype. Notes of our own exports are carried over.

    Raises ValueError when configuration and weights contradict each other, naming each tensor.
    """
    config = load_draft_config(draft_dir, verifier_dir, engine)
    tensors = read_canonical(read_headers(draft_dir))
    if "d2t" in tensors and "t2d" not in tensors:
        import torch

        targets = tensors["d2t"] + torch.arange(len(tensors["d2t"]))
        if int(targets.min()) < 0 or int(targets.max()) >= config.vocab_size:
            raise ValueError(f"{draft_dir}: d2t maps outside the vocabulary of {config.vocab_size}")
        tensors["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool)
        tensors["t2d"][targets] = True
    has_record = (draft_dir / RECORD_NAME).is_file()
    notes = ExportRecord.load(draft_dir).notes if has_record else GenerationNotes.model_validate({})
    return write_checkpoint(out_dir, config, tensors, {"imported_from": str(draft_dir)}, notes)
