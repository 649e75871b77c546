"""Checks of config.json: what it leaves to guessing, whether it fits the verifier, whether its parts agree."""

from __future__ import annotations

from typing import Any

from draft.compare import find_disagreements, read_statement
from draft.config import FILE_NAME as CONFIG_NAME
from draft.formats import SGLANG_LAYER_SHIFT
from draft.tolerance import same
from draft.validate.result import CheckFailure, CheckSkipped
from draft.validate.subject import Subject
from draft.verifier import normal_rope


def check_explicit(subject: Subject) -> str:
    """Everything that readers guess differently, or wrongly, is written out."""
    missing: list[str] = []
    if "head_dim" not in subject.view:
        missing.append("head_dim (readers take hidden_size / num_attention_heads and cut larger weights silently)")
    if "norm_before_residual" not in subject.view:
        missing.append("norm_before_residual (vLLM reads false in a flat file, true in a nested one)")
    if "draft_vocab_size" not in subject.view and subject.has_tensor("d2t"):
        missing.append("draft_vocab_size (there is a d2t)")
    if "aux_layer_ids" not in subject.view:
        missing.append("eagle_aux_hidden_state_layer_ids (engines take their defaults)")
    if missing:
        raise CheckFailure(
            f"config.json does not state {'; '.join(missing)}",
            "write the fields out: `headrace draft import`, then `headrace draft export`, does; `headrace draft check` "
            "shows what the weights imply",
        )
    return "head_dim, norm_before_residual, draft_vocab_size and layer ids are written out"


def check_verifier_fit(subject: Subject) -> str:
    """Sizes that the draft shares with its verifier are the verifier's."""
    verifier, view = subject.verifier, subject.view
    wrong: list[str] = []
    for name, expected in (("hidden_size", verifier.hidden_size), ("vocab_size", verifier.vocab_size)):
        if view.get(name) != expected:
            wrong.append(f"{name} is {view.get(name)}, the verifier's is {expected}")
    target_hidden = subject.config.get("target_hidden_size")
    if target_hidden is not None and target_hidden != verifier.hidden_size:
        wrong.append(f"target_hidden_size is {target_hidden}, the verifier's hidden_size is {verifier.hidden_size}")
    own = subject.own_config
    if own is not None and own.verifier.num_hidden_layers != verifier.num_hidden_layers:
        wrong.append(
            f"{CONFIG_NAME} was made for {own.verifier.num_hidden_layers} layers, the verifier has "
            f"{verifier.num_hidden_layers}"
        )
    implied = subject.weights_imply
    for name, expected in (("hidden_size", verifier.hidden_size), ("vocab_size", verifier.vocab_size)):
        if name in implied and implied[name] != expected:
            wrong.append(f"the weights imply {name} {implied[name]}, the verifier's is {expected}")
    if wrong:
        raise CheckFailure("; ".join(wrong), "this draft belongs to another verifier: give the right pair")
    return f"hidden_size {verifier.hidden_size} and vocab_size {verifier.vocab_size} are the verifier's"


def check_layer_ids(subject: Subject) -> str:
    """Layer ids ascend, exist in this verifier, leave out its final state, and are as many as fc reads."""
    ids = subject.view.get("aux_layer_ids")
    if not ids:
        raise CheckSkipped("config.json names no layer ids", "see the check `explicit`")
    num_layers = subject.verifier.num_hidden_layers
    remedy = "give the ids that the training data was captured with (vLLM convention)"
    if num_layers in ids:
        raise CheckFailure(
            f"{ids} lists {num_layers}, the final state of a verifier with {num_layers} layers: it is the training "
            "target, not an input",
            "leave the final id out of the draft's ids; fc must have been trained without it",
        )
    if list(ids) != sorted(set(ids)):
        raise CheckFailure(f"{ids} do not ascend without duplicates: most verifiers sort what they are given", remedy)
    if ids[0] < 0 or ids[-1] > num_layers:
        raise CheckFailure(
            f"{ids} do not lie within [0, {num_layers - 1}], the verifier has {num_layers} layers", remedy
        )
    num_read = subject.weights_imply.get("num_aux_layers", len(ids))
    if num_read != len(ids):
        raise CheckFailure(f"{len(ids)} layer ids, but fc reads {num_read} layers", remedy)
    return f"{ids} of {num_layers} layers"


def check_layer_id_places(subject: Subject) -> str:
    """All places that engines read layer ids from say the same, and fc gets its width everywhere."""
    config = subject.config
    assert subject.view is not None  # skips where config.json cannot be read
    eagle = config.get("eagle_config") or {}
    top, nested = config.get("eagle_aux_hidden_state_layer_ids"), eagle.get("eagle_aux_hidden_state_layer_ids")
    remedy = "write the ids at top level and in eagle_config, with num_aux_hidden_states: `headrace draft export` does"
    if not top and not nested:
        raise CheckSkipped("config.json names no layer ids", "see the check `explicit`")
    if not top:
        raise CheckFailure(
            f"layer ids {nested} stand only in eagle_config: vLLM's model runner V1 reads them, V2 takes its defaults, "
            "SGLang adds one to each",
            f"{remedy}; `headrace draft import` takes --engine sglang where they were counted SGLang's way",
        )
    record = subject.record
    shift = SGLANG_LAYER_SHIFT if record is not None and record.engine == "sglang" else 0
    if nested and nested != [layer - shift for layer in top]:
        counted = f" (counted SGLang's way, {shift} less)" if shift else ""
        raise CheckFailure(f"top level says {top}, eagle_config says {nested}{counted}", remedy)
    stated = subject.decoder.get("num_aux_hidden_states")
    width = stated if stated is not None else len(nested) if nested and subject.form == "flat" else 3
    if width != len(top):
        raise CheckFailure(f"{len(top)} layer ids, but vLLM sizes fc for {width}", remedy)
    report = subject.report
    if report is not None and report.config_error is None and report.layer_ids_v1 != report.layer_ids_v2:
        raise CheckFailure(
            f"vLLM's model runner V1 reads {report.layer_ids_v1}, V2 reads {report.layer_ids_v2}", remedy
        )
    both = "both model runners of vLLM read" if report is not None and report.config_error is None else "stated:"
    return f"{both} {list(top)}"


def check_rope(subject: Subject) -> str:
    """One rope in every spelling, which training and serving compute alike, long enough for the verifier's context."""
    decoder = subject.decoder
    remedy = "write rope as `headrace draft export` does"
    try:
        spellings = _rope_spellings(decoder)
    except ValueError as error:
        raise CheckFailure(str(error), remedy) from error
    parameters = decoder.get("rope_parameters") or {}
    partial = decoder.get("partial_rotary_factor") or parameters.get("partial_rotary_factor") or 1.0
    if partial != 1.0:
        raise CheckFailure(
            f"partial_rotary_factor {partial}: training (transformers' Llama) turns whole heads, serving (vLLM) a part",
            "train and serve without it",
        )
    if not spellings:
        raise CheckFailure("config.json says nothing of rope: readers take theta 10000", remedy)
    rope, *others = spellings.values()
    if not all(same(rope, other) for other in others):
        said = "; ".join(f"{place}: {rope}" for place, rope in spellings.items())
        raise CheckFailure(f"two different ropes: {said}", remedy)
    difference = subject.report.rope_difference if subject.report is not None else None
    if difference is not None and difference > ROPE_TOLERANCE:
        raise CheckFailure(
            f"{rope}: vLLM's table of rotations differs from training's by up to {difference:.3f}",
            f"training and serving compute this rope differently; {remedy}",
        )
    if rope["rope_type"] == "yarn" and subject.implied_config:  # skips where a parameter is missing
        reach = int(rope["factor"] * rope["original_max_position_embeddings"])
        needed = subject.verifier.max_position_embeddings
        if reach < needed:
            raise CheckFailure(
                f"YaRN reaches {reach} positions, the verifier {needed}: vLLM's table ends there and is read beyond",
                "give the draft the verifier's rope, or serve with --max-model-len",
            )
    own = "the verifier's" if same(rope, subject.verifier.rope_parameters) else "unlike the verifier's: "
    return f"{rope}, {own}" + ("" if own == "the verifier's" else str(subject.verifier.rope_parameters))


# Entries of the table are cosines and sines; float32 angles at the compared positions are exact to 1e-4.
ROPE_TOLERANCE = 0.01


def _rope_spellings(decoder: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The rope in every spelling that the file has. Raises ValueError where one cannot be read."""
    spellings = {}
    if decoder.get("rope_parameters"):
        spellings["rope_parameters"] = normal_rope({"rope_parameters": decoder["rope_parameters"]})
    if decoder.get("rope_theta") or decoder.get("rope_scaling"):
        legacy = {key: decoder.get(key) for key in ("rope_theta", "rope_scaling")}
        spellings["rope_theta and rope_scaling"] = normal_rope(legacy)
    return spellings


def check_embedding(subject: Subject) -> str:
    """The head is not tied to the embedding: a draft's head has draft-vocabulary rows."""
    if subject.config.get("tie_word_embeddings"):
        raise CheckFailure(
            "tie_word_embeddings is true: SGLang and transformers would use the embedding in place of lm_head",
            "set it to false",
        )
    if "embed_tokens.weight" not in subject.canonical_headers:
        return "not tied; the draft takes the verifier's embedding"
    shape = list(subject.canonical_headers["embed_tokens.weight"].shape)
    expected = [subject.verifier.vocab_size, subject.verifier.hidden_size]
    if shape != expected:
        raise CheckFailure(f"its embedding is {shape}, the verifier's {expected}", "export without the embedding")
    return f"not tied; the draft brings its own embedding {shape}"


def check_agreement(subject: Subject) -> str:
    """config.json, draft_config.json and the weights say the same."""
    if subject.own_config is None and not subject.canonical_headers:
        raise CheckSkipped(f"no {CONFIG_NAME} and no weights to compare config.json with")
    assert subject.implied_config is not None  # skips where config.json cannot be read
    statements = [
        read_statement(subject.directory / name)
        for name in (CONFIG_NAME, "config.json")
        if (subject.directory / name).is_file()
    ]
    differing = find_disagreements(statements, subject.weights_imply)
    if differing:
        said = "; ".join(
            f"{d.field}: "
            + ", ".join(f"{source.rsplit('/', 1)[-1]} {value}" for source, value in d.values.items())
            + (f", weights {d.weights}" if d.weights is not None else "")
            for d in differing
        )
        raise CheckFailure(said, f"see `headrace draft check {subject.directory}`")
    compared = f"{CONFIG_NAME}, config.json" if len(statements) > 1 else "config.json"
    return f"{compared} and the weights agree"
