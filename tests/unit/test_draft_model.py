"""The trainable draft is built from configuration, head and vocabulary alone; anything missing or foreign is fatal."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_training import (
    EMBEDDING_VH,
    HIDDEN,
    LM_HEAD_VH,
    NORM_H,
    VOCAB,
    make_sample,
    write_dataset,
    write_head,
    write_verifier,
)

from draft.alignment import StateColumns, make_batch
from draft.config import DraftConfig
from draft.frequencies import count_loss_tokens, count_weighted, loss_tokens
from draft.model import build_training_model, checkpoint_tensors, load_checkpoint_tensors, load_head
from draft.objective import Objective, forward_batch
from draft.vocab import build_vocab
from draft.weights import EMBEDDING

VOCAB_MAP = build_vocab(np.arange(VOCAB), 48, [2])


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> DraftConfig:
    verifier = write_verifier(tmp_path_factory.mktemp("verifier"))
    return DraftConfig.from_verifier(verifier, draft_vocab_size=48, aux_layer_ids=[1, 2, 4])


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_head(tmp_path_factory.mktemp("head") / "head.safetensors")


@pytest.mark.parametrize("tensor", ["embed_tokens.weight", "norm.weight", "lm_head.weight"])
def test_a_head_without_one_of_its_tensors_is_fatal(tmp_path, config, tensor):
    head = write_head(tmp_path / "head.safetensors", leave_out=tensor)
    with pytest.raises(ValueError, match=f"has no {tensor.split('.')[0]}"):
        build_training_model(config, head, VOCAB_MAP)


def test_the_verifiers_parts_are_in_place_and_frozen(config, head):
    model = build_training_model(config, head, VOCAB_MAP)
    kept = torch.from_numpy(VOCAB_MAP.targets)
    assert torch.equal(model.embed_tokens.weight, EMBEDDING_VH)
    assert torch.equal(model.verifier_norm.weight, NORM_H)
    assert torch.equal(model.verifier_lm_head.weight, LM_HEAD_VH[kept])
    assert torch.equal(model.lm_head.weight, LM_HEAD_VH[kept])
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert "fc.weight" in trained
    assert not trained & {"embed_tokens.weight", "verifier_norm.weight", "verifier_lm_head.weight", "lm_head.weight"}
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    with_head = build_training_model(config, head, VOCAB_MAP, train_lm_head=True)
    assert with_head.lm_head.weight.requires_grad


def test_what_a_checkpoint_stores_is_what_the_configuration_says(config, head):
    tensors = checkpoint_tensors(build_training_model(config, head, VOCAB_MAP))
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == config.tensor_shapes()
    assert EMBEDDING not in tensors


def test_checkpoint_round_trip_and_a_foreign_vocabulary(config, head):
    first = build_training_model(config, head, VOCAB_MAP, seed=1)
    second = build_training_model(config, head, VOCAB_MAP, seed=2)
    assert not torch.equal(first.fc.weight, second.fc.weight)
    load_checkpoint_tensors(second, checkpoint_tensors(first))
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    other = build_training_model(config, head, build_vocab(np.arange(VOCAB)[::-1].copy(), 48, [2]))
    with pytest.raises(ValueError, match="another draft vocabulary"):
        load_checkpoint_tensors(other, checkpoint_tensors(first))
    incomplete = checkpoint_tensors(first)
    del incomplete["fc.weight"]
    with pytest.raises(ValueError, match=r"missing \['fc.weight'\]"):
        load_checkpoint_tensors(second, incomplete)


def test_the_seed_decides_the_weights_and_the_callers_generator_is_left_alone(config, head):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first = build_training_model(config, head, VOCAB_MAP, seed=3)
    assert torch.equal(torch.rand(3), expected)
    second = build_training_model(config, head, VOCAB_MAP, seed=3)
    assert torch.equal(first.fc.weight, second.fc.weight)


def test_heads_and_vocabularies_of_other_verifiers_are_refused(config, head):
    with pytest.raises(ValueError, match=r"num_layers is 5 by the draft's configuration and 6"):
        build_training_model(
            config.replace(verifier={**config.verifier.model_dump(), "num_hidden_layers": 5}), head, VOCAB_MAP
        )
    build_training_model(config.replace(rms_norm_eps=9.999999747378752e-06), head, VOCAB_MAP)  # 1e-5 in float32
    with pytest.raises(ValueError, match=r"rms_norm_eps is 1e-06"):
        build_training_model(config.replace(rms_norm_eps=1e-6), head, VOCAB_MAP)
    with pytest.raises(ValueError, match=r"embed_tokens.weight is \[64, 32\].*\[65, 32\]"):
        build_training_model(config.replace(vocab_size=65), head, VOCAB_MAP)
    with pytest.raises(ValueError, match="needs a mapping"):
        build_training_model(config, head, None)
    with pytest.raises(ValueError, match="vocab maps 40 of 64 tokens, the draft has 48"):
        build_training_model(config, head, build_vocab(np.arange(VOCAB), 40))
    whole = load_head(head)
    whole.norm_H[3] = torch.nan
    with pytest.raises(ValueError, match=r"NaN in verifier_norm\.weight"):
        build_training_model(config, whole, VOCAB_MAP)


def test_a_draft_with_the_whole_vocabulary_needs_no_mapping(config, head):
    model = build_training_model(config.replace(draft_vocab_size=VOCAB), head, None)
    assert model.t2d is None
    assert torch.equal(model.verifier_lm_head.weight, LM_HEAD_VH)


def test_it_learns(config, head):
    """Tokens follow a permutation, so a draft that trains at all soon names the next ones."""
    model = build_training_model(config.replace(draft_vocab_size=VOCAB), head, None)
    columns, objective = StateColumns((0, 1, 2), 3, HIDDEN), Objective("kl_div", 3, 0.8)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for step in range(60):
        batch = make_batch([make_sample(4 * step + row, 48, 8) for row in range(4)], columns, ttt_steps=3)
        output = forward_batch(model, batch, objective)
        optimizer.zero_grad()
        output.loss.backward()
        optimizer.step()
    accuracy = output.correct_K / output.total_K
    assert accuracy[0] > 0.7
    assert accuracy[2] > 0.4


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_loss_tokens_are_those_inside_the_spans(data):
    samples = data.draw(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=12), max_size=5))
    spans, expected = [], []
    for tokens in samples:
        cuts = sorted(data.draw(st.sets(st.integers(0, len(tokens)), max_size=4)))
        pairs = list(zip(cuts[::2], cuts[1::2], strict=False))
        spans.append([{"start": start, "end": end} for start, end in pairs])
        expected += [token for start, end in pairs for token in tokens[start:end]]
    batch = pa.record_batch(
        {
            "token_ids": pa.array(samples, pa.list_(pa.int32())),
            "loss_spans": pa.array(spans, pa.list_(pa.struct([("start", pa.int32()), ("end", pa.int32())]))),
        }
    )
    assert loss_tokens(batch).tolist() == expected
    assert loss_tokens(batch.slice(1)).tolist() == [
        token
        for tokens, own in zip(samples[1:], spans[1:], strict=True)
        for s in own
        for token in tokens[s["start"] : s["end"]]
    ]


def test_frequencies_of_a_snapshot(tmp_path):
    lengths = [9, 12, 6, 30, 15]
    dataset = write_dataset(tmp_path / "data", lengths, write_verifier(tmp_path / "verifier"))
    expected = np.zeros(VOCAB, np.int64)
    for row, length in enumerate(lengths):
        sample = make_sample(row, length, length // 3)
        expected += np.bincount(sample.token_ids[sample.loss_mask], minlength=VOCAB)
    assert count_loss_tokens(dataset.snapshot(), VOCAB).tolist() == expected.tolist()
    mixed = count_weighted([(dataset.snapshot(), 1.0), (dataset.snapshot(), 0.5)], VOCAB)
    assert mixed.tolist() == np.ceil(1.5 * expected).tolist()
    with pytest.raises(ValueError, match="another verifier"):
        count_loss_tokens(dataset.snapshot(), 10)
