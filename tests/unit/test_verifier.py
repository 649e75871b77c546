"""What is read from a checkpoint's directory, and that its digests notice what they promise to notice."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from gen.verifier import describe_verifier
from gen.weights import SAMPLE_BLOCK_BYTES, SAMPLES_PER_FILE, sample_offsets, tensor_files, weights_digest

KIMI_TEXT = {
    "model_type": "kimi_k2",
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "vocab_size": 163840,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-05,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
    "quantization_config": {"quant_method": "compressed-tensors", "format": "pack-quantized"},
}


def write_checkpoint(directory: Path, config: dict[str, Any]) -> Path:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "tokenizer.json").write_text("{}")
    save_file({"w": np.arange(8, dtype=np.float32)}, directory / "model.safetensors")
    return directory


@pytest.fixture
def copy_of_verifier(verifier_dir: Path, tmp_path: Path) -> Path:
    """The embedded verifier with its weights linked, so that its small files can be changed."""
    directory = tmp_path / "copy"
    directory.mkdir()
    for path in verifier_dir.iterdir():
        if path.suffix == ".safetensors":
            (directory / path.name).symlink_to(path.resolve())
        else:
            shutil.copy(path, directory / path.name)
    return directory


def test_embedded_verifier(verifier_dir: Path) -> None:
    info = describe_verifier(verifier_dir)
    assert (info.num_layers, info.hidden_size, info.vocab_size) == (30, 576, 49152)
    assert (info.num_heads, info.num_kv_heads, info.head_dim) == (9, 3, 64)
    assert (info.architecture, info.model_type, info.dtype) == ("LlamaForCausalLM", "llama", "bfloat16")
    assert info.tied_embeddings
    assert info.quantization is None
    assert info.rms_norm_eps == pytest.approx(1e-5)
    assert info.weights_digest.startswith("sha256:")  # small enough to be read whole
    identity = info.identity(name="smol", revision=None, kv_cache_dtype="auto")
    assert json.loads(json.dumps(identity)) == identity
    assert identity["weights_digest"] == info.weights_digest


def test_multimodal_wrapper_gives_its_language_model(tmp_path: Path) -> None:
    wrapper = {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "vision_config": {"hidden_size": 1152, "num_hidden_layers": 27},
        "text_config": KIMI_TEXT,
    }
    info = describe_verifier(write_checkpoint(tmp_path / "kimi", wrapper))
    assert (info.num_layers, info.hidden_size, info.vocab_size) == (61, 7168, 163840)
    assert info.head_dim == 128  # not 7168 / 64
    assert (info.model_type, info.text_model_type) == ("kimi_k25", "kimi_k2")
    assert info.quantization == "compressed-tensors"
    assert not info.tied_embeddings


def test_defaults_of_a_known_model_type_are_filled_in(tmp_path: Path) -> None:
    info = describe_verifier(write_checkpoint(tmp_path / "llama", {"model_type": "llama", "hidden_size": 64}))
    assert info.hidden_size == 64
    assert (info.num_layers, info.vocab_size) == (32, 32000)


def test_unknown_configuration_is_refused_by_field(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"config\.json has no hidden_size"):
        describe_verifier(write_checkpoint(tmp_path / "odd", {"model_type": "of-my-own"}))
    with pytest.raises(FileNotFoundError, match=r"no config\.json"):
        describe_verifier(tmp_path)


def test_digests_ignore_what_tools_rewrite(copy_of_verifier: Path) -> None:
    before = describe_verifier(copy_of_verifier, digest="sampled")
    for name in ("config.json", "tokenizer_config.json"):
        path = copy_of_verifier / name
        content = json.loads(path.read_text())
        content["transformers_version"] = "9.9.9"
        path.write_text(json.dumps(dict(reversed(content.items()))))
    assert describe_verifier(copy_of_verifier, digest="sampled").tokenizer_identity() == before.tokenizer_identity()
    assert describe_verifier(copy_of_verifier, digest="sampled").config_digest == before.config_digest


def test_digests_notice_a_changed_tokenizer_template_and_config(copy_of_verifier: Path) -> None:
    def digests() -> tuple[str, str | None, str]:
        info = describe_verifier(copy_of_verifier, digest="sampled")
        return info.tokenizer_digest, info.chat_template_digest, info.config_digest

    before = digests()
    template = copy_of_verifier / "chat_template.jinja"
    template.write_text(template.read_text() + " ")
    assert [a == b for a, b in zip(before, digests(), strict=True)] == [True, False, True]
    template.unlink()
    assert digests()[1] is None
    config = copy_of_verifier / "tokenizer_config.json"
    # Older checkpoints keep the template there; it is the template's digest that changes, not the tokenizer's.
    config.write_text(json.dumps({**json.loads(config.read_text()), "chat_template": "{{ messages }}"}))
    assert digests()[1] not in (None, before[1])
    assert digests()[0] == before[0]
    config.write_text(json.dumps({**json.loads(config.read_text()), "bos_token": "<s>"}))
    assert digests()[0] != before[0]
    main = copy_of_verifier / "config.json"
    main.write_text(json.dumps({**json.loads(main.read_text()), "rope_theta": 1.0}))
    assert digests()[2] != before[2]


def test_given_chat_template_replaces_the_own(copy_of_verifier: Path, tmp_path: Path) -> None:
    info = describe_verifier(copy_of_verifier, digest="sampled")
    other = tmp_path / "other.jinja"
    other.write_text("{{ messages }}")
    identity = info.tokenizer_identity(chat_template=other, chat_template_kwargs={"thinking": False})
    assert identity["chat_template_digest"] != info.chat_template_digest
    assert identity["chat_template_kwargs"] == {"thinking": False}
    shutil.copy(copy_of_verifier / "chat_template.jinja", other)
    assert info.tokenizer_identity(chat_template=other) == info.tokenizer_identity()


def write_big(directory: Path, seed: int) -> Path:
    directory.mkdir(parents=True)
    rng = np.random.default_rng(seed)
    # Larger than the blocks that a sampled digest reads.
    size = 3 * SAMPLES_PER_FILE * SAMPLE_BLOCK_BYTES // 2
    save_file({"w": rng.integers(0, 255, size, dtype=np.uint8)}, directory / "model.safetensors")
    return directory


def test_full_digest_notices_one_byte_and_sampled_a_training_step(tmp_path: Path) -> None:
    one = write_big(tmp_path / "one", 1)
    two = write_big(tmp_path / "two", 2)
    assert weights_digest(one) == weights_digest(one, "full") != weights_digest(two, "full")
    assert weights_digest(one, "sampled") != weights_digest(two, "sampled")
    assert weights_digest(one, "sampled").startswith("sampled-sha256:")
    full, sampled = weights_digest(one, "full"), weights_digest(one, "sampled")
    path = one / "model.safetensors"
    # A byte between two sampled blocks: only the full digest can see it, which is why the value says how it was made.
    offsets = list(sample_offsets(path.stat().st_size))
    position = offsets[5] + SAMPLE_BLOCK_BYTES + 1
    assert position < offsets[6]
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)
    assert weights_digest(one, "full") != full
    assert weights_digest(one, "sampled") == sampled


def test_sampled_blocks_reach_from_start_to_end() -> None:
    size = 10_000_000
    offsets = list(sample_offsets(size))
    assert offsets[0] == 0
    assert offsets[-1] + SAMPLE_BLOCK_BYTES == size
    assert len(offsets) == SAMPLES_PER_FILE
    assert list(sample_offsets(100)) == [0]


def test_index_names_the_files(tmp_path: Path) -> None:
    save_file({"a": np.zeros(1)}, tmp_path / "model-1.safetensors")
    save_file({"b": np.zeros(1)}, tmp_path / "model-2.safetensors")
    save_file({"c": np.zeros(1)}, tmp_path / "consolidated.safetensors")
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert {name: path.name for name, path in tensor_files(tmp_path).items()} == index["weight_map"]
    (tmp_path / "model-2.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"names model-2\.safetensors"):
        weights_digest(tmp_path)


def test_broken_and_missing_weights_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no \.safetensors weights"):
        weights_digest(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 20)
    with pytest.raises(ValueError, match="is no safetensors file"):
        weights_digest(tmp_path, "sampled")
    (tmp_path / "model.safetensors").write_bytes(b"\x40" + b"\0" * 7 + b"{}")
    with pytest.raises(ValueError, match="cut off inside its header"):
        weights_digest(tmp_path, "sampled")
