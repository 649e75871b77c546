"""Samples become the batch that the speculators library would have made, and packing changes no sample's loss."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_training import HIDDEN, SPEC, make_sample, write_head, write_verifier

from draft.alignment import StateColumns, TrainingBatch, make_batch
from draft.config import DraftConfig
from draft.model import build_training_model
from draft.objective import Objective, forward_batch
from draft.vocab import build_vocab
from storage.types import StateSpec

COLUMNS = StateColumns((0, 1, 2), 3, HIDDEN)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> DraftConfig:
    verifier = write_verifier(tmp_path_factory.mktemp("verifier"))
    return DraftConfig.from_verifier(verifier, draft_vocab_size=48, aux_layer_ids=[1, 2, 4])


@pytest.fixture(scope="module")
def model(config: DraftConfig, tmp_path_factory: pytest.TempPathFactory):
    head = write_head(tmp_path_factory.mktemp("head") / "head.safetensors")
    vocab = build_vocab(np.arange(64), 48, [2])
    return build_training_model(config, head, vocab)


def library_batch(samples, max_len: int) -> dict[str, torch.Tensor]:
    """The same samples through speculators' own shift and collation, which want a row for the last token too."""
    from speculators.models.eagle3.data import shift_batch
    from speculators.train.data import CollateFn

    items = []
    for sample in samples:
        states_TLH = sample.states_torch().float()
        unread = torch.full((1, *states_TLH.shape[1:]), torch.nan)  # the last token's states do not exist
        states_TLH = torch.cat([states_TLH, unread])[: sample.num_tokens - 1]
        num_rows = sample.num_tokens - 1
        items.append(
            {
                "input_ids": torch.from_numpy(sample.token_ids[:num_rows]).long(),
                "hidden_states": states_TLH[:, :-1].flatten(1),
                "verifier_last_hidden_states": states_TLH[:, -1],
                "loss_mask": torch.from_numpy(sample.loss_mask[:num_rows]),
                "lengths": torch.tensor([num_rows]),
                "position_ids": torch.arange(num_rows),
            }
        )
    return CollateFn(max_len, HIDDEN, dtype=torch.float32, preprocess=shift_batch)(items)


def test_batch_equals_the_librarys():
    samples = [make_sample(row, length, 5) for row, length in enumerate((9, 23, 14))]
    theirs = library_batch(samples, max_len=48)
    ours = make_batch(samples, COLUMNS, ttt_steps=3, pad_to=48)
    assert ours.num_rows == sum(sample.num_tokens - 2 for sample in samples)
    for name in ("input_ids", "hidden_states", "verifier_last_hidden_states", "loss_mask", "document_ids"):
        assert torch.equal(ours.inputs()[name], theirs[name]), name
    real = ours.document_ids >= 0
    assert torch.equal(ours.position_ids[real], theirs["position_ids"][real])


def test_rows_are_aligned_as_written():
    sample = make_sample(0, 12, 4)
    batch = make_batch([sample], COLUMNS, ttt_steps=2)
    states_TLH = sample.states_torch().float()
    for i in range(10):
        assert batch.input_ids[0, i] == sample.token_ids[i + 1]
        assert torch.equal(batch.hidden_states[0, i], states_TLH[i, :3].flatten())
        assert torch.equal(batch.verifier_last_hidden_states[0, i], states_TLH[i + 1, 3])
        assert batch.loss_mask[0, i] == sample.loss_mask[i + 1]


def test_target_names_the_token_after_the_input(model):
    """With the norm, argmax of lm_head(norm(target state of row i)) is x[i+2], wherever the draft has that token."""
    sample = make_sample(3, 30, 2)
    batch = make_batch([sample], COLUMNS, ttt_steps=1)
    targets = model.verifier_lm_head(model.verifier_norm(batch.verifier_last_hidden_states)).argmax(-1)[0]
    ids = targets + model.d2t[targets]
    expected = torch.from_numpy(sample.token_ids[2:]).long()
    known = model.t2d[expected]
    assert known.sum() > 10
    assert torch.equal(ids[known], expected[known])


@settings(max_examples=15, deadline=None)
@given(
    samples=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 6)), min_size=1, max_size=5),
    ttt_steps=st.integers(1, 4),
)
def test_packed_loss_is_the_sum_of_the_samples_own(model, samples, ttt_steps):
    """Prompts of one token are in, so that the first rows of a sample would count without the mask."""
    loaded = [make_sample(row, 2 + length, min(prompt, 1 + length)) for row, (length, prompt) in enumerate(samples)]
    objective = Objective("kl_div", ttt_steps, 0.8)
    packed = forward_batch(model, make_batch(loaded, COLUMNS, ttt_steps=ttt_steps), objective)
    alone = [forward_batch(model, make_batch([sample], COLUMNS, ttt_steps=ttt_steps), objective) for sample in loaded]
    assert packed.num_loss_tokens == sum(one.num_loss_tokens for one in alone)
    expected = sum(one.loss.item() * one.num_loss_tokens for one in alone)
    assert packed.loss.item() * packed.num_loss_tokens == pytest.approx(expected, rel=1e-4, abs=1e-3)
    assert torch.equal(packed.correct_K, sum(one.correct_K for one in alone))
    assert torch.equal(packed.total_K, sum(one.total_K for one in alone))


def test_without_the_masked_head_samples_would_leak(model):
    """What the mask is for: the library trains the last rows of a sample on the first of the next one."""
    loaded = [make_sample(row, 12, 1) for row in range(3)]
    objective = Objective("kl_div", 3, 0.8)

    def unmasked(samples) -> TrainingBatch:
        batch = make_batch(samples, COLUMNS, ttt_steps=1)
        return replace(batch, loss_mask=torch.ones_like(batch.loss_mask))

    packed = forward_batch(model, unmasked(loaded), objective)
    alone = [forward_batch(model, unmasked([sample]), objective) for sample in loaded]
    assert packed.total_K[2] > sum(one.total_K[2] for one in alone)


@settings(deadline=None)
@given(ttt_steps=st.integers(1, 7), num_prompt=st.integers(1, 20))
def test_head_rows_are_masked(ttt_steps, num_prompt):
    sample = make_sample(0, 20, num_prompt)
    mask = make_batch([sample], COLUMNS, ttt_steps=ttt_steps).loss_mask[0]
    expected = sample.loss_mask[1:-1].copy()
    expected[: ttt_steps - 1] = False
    assert mask.numpy().tolist() == expected.tolist()


def test_a_batch_without_rows_is_padding_and_has_no_gradient(model):
    batch = make_batch([make_sample(0, 2, 1)], COLUMNS, ttt_steps=3)
    assert batch.num_rows == 0
    assert batch.num_loss_tokens == 0
    model.zero_grad()
    forward_batch(model, batch, Objective()).loss.backward()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None, name
            assert not parameter.grad.any(), name


def test_padding_changes_nothing(model):
    samples = [make_sample(row, 15, 4) for row in range(2)]
    plain = forward_batch(model, make_batch(samples, COLUMNS, ttt_steps=3), Objective())
    padded = forward_batch(model, make_batch(samples, COLUMNS, ttt_steps=3, pad_to=64), Objective())
    assert padded.loss.item() == pytest.approx(plain.loss.item(), rel=1e-5)
    assert torch.equal(padded.correct_K, plain.correct_K)


def test_too_many_rows_for_the_padding():
    with pytest.raises(ValueError, match="26 rows, more than pad_to 20"):
        make_batch([make_sample(row, 15, 4) for row in range(2)], COLUMNS, ttt_steps=3, pad_to=20)


def test_columns_follow_the_drafts_order_and_skip_other_layers(config):
    spec = StateSpec((0, 1, 2, 3, 4, 6), HIDDEN)
    assert StateColumns.for_draft(config, spec) == StateColumns((1, 2, 4), 5, HIDDEN)
    assert StateColumns.for_draft(config, SPEC) == COLUMNS


@pytest.mark.parametrize("layer_ids", [(1, 2, 6), (1, 2, 4), (1, 2, 4, 5)])
def test_missing_layers_are_named(config, layer_ids):
    missing = sorted({1, 2, 4, 6} - set(layer_ids))
    with pytest.raises(ValueError, match=rf"without \[{missing[0]}\]"):
        StateColumns.for_draft(config, StateSpec(layer_ids, HIDDEN))


def test_another_hidden_size_is_named(config):
    with pytest.raises(ValueError, match="hidden_size is 32 in the draft and 64 in the data set"):
        StateColumns.for_draft(config, StateSpec((1, 2, 4, 6), 64))


def test_head_file_is_a_path_or_loaded(tmp_path: Path, config):
    from draft.model import load_head

    head = write_head(tmp_path / "head.safetensors")
    vocab = build_vocab(np.arange(64), 48, [2])
    first, second = build_training_model(config, head, vocab), build_training_model(config, load_head(head), vocab)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
