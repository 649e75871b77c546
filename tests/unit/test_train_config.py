"""Configuration files: overrides, errors that name the nearest key, contradictions; and the learning rate."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_jobs.config import differing_keys, dump_config, load_config, validate_config
from ray_jobs.train.config import OptimConfig, TrainConfig
from ray_jobs.train.schedule import learning_rate

MINIMAL = "dataset: {uri: data}\ncheckpoint: {directory: run}\n"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "train.yaml"
    path.write_text(MINIMAL)
    return path


def load(path: Path, *overrides: str) -> TrainConfig:
    return load_config(path, overrides, TrainConfig)


def test_overrides_are_yaml_and_the_last_one_wins(file):
    config = load(
        file, "optim.lr=1e-3", "optim.lr=0.5", "workers.count=[1, 4]", "dataset.version=null", "optim.loss=ce"
    )
    assert config.optim.lr == 0.5
    assert config.workers.count == (1, 4)
    assert config.dataset.version is None
    assert config.optim.loss == "ce"


def test_scientific_numbers_without_a_dot_are_numbers(file):
    """YAML 1.1 reads 1e-3 as text; pydantic makes it the number that it looks like."""
    assert load(file, "optim.lr=1e-3").optim.lr == 0.001


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optim.learning_rate=1", "unknown key optim.learning_rate; known here: lr, betas"),
        ("optim.clip_nrom=1", r"unknown key optim.clip_nrom, did you mean optim.clip_norm\?"),
        ("datset.uri=x", r"unknown key datset, did you mean dataset\?"),
        ("dataset.sources=[{url: x}]", r"unknown key dataset.sources.0.url, did you mean dataset.sources.0.uri\?"),
        ("optim.lr=-1", "optim.lr: .*greater than 0"),
        ("workers.count=0", "workers.count"),
        ("workers.count=[4, 2]", r"count \[4, 2\] must be"),
        ("checkpoint.directory=null", "checkpoint.directory"),
        ("optim", "must look like section.key=value"),
        ("dataset.uri.x=1", "uri is a value, not a section"),
        ("optim.lr=[", "the value is not YAML"),
        ("dataset.uri=null", "give either uri or sources"),
        ("draft={config: a.json, vocab_size: 8}", "drop vocab_size"),
    ],
)
def test_errors_name_the_key(file, override, message):
    with pytest.raises(ValueError, match=message):
        load(file, override)


def test_all_problems_are_named_at_once(file):
    with pytest.raises(ValueError, match=r"unknown key foo.*unknown key optim.bar"):
        load(file, "foo=1", "optim.bar=2")


@pytest.mark.parametrize(
    ("text", "message"), [("- 1\n", "must be a mapping"), ("a: [\n", "is not YAML"), ("", "mapping")]
)
def test_files_that_are_no_configuration(tmp_path, text, message):
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        load(path)
    with pytest.raises(FileNotFoundError, match="does not exist"):
        load(tmp_path / "none.yaml")


def test_missing_sections_are_named():
    with pytest.raises(ValueError, match="dataset: Field required"):
        validate_config({"checkpoint": {"directory": "x"}}, TrainConfig, "c")


def test_a_dumped_configuration_loads_equal(file, tmp_path):
    config = load(file, "workers.count=[1, 2]", "dataset.uri=null", "dataset.sources=[{uri: a, weight: 0.5}, {uri: b}]")
    dump_config(config, tmp_path / "deep" / "resolved.yaml")
    assert load(tmp_path / "deep" / "resolved.yaml") == config


def test_differing_keys_are_leaves_outside_of_the_ignored_sections(file):
    first, second = load(file), load(file, "optim.lr=0.1", "workers.cpus=7", "dataset.seed=3")
    assert differing_keys(first, second, ignore=("workers",)) == [
        "dataset.seed: 0, now 3",
        "optim.lr: 0.0001, now 0.1",
    ]


def test_packs_per_step_must_divide_among_all_worker_counts(file):
    assert load(file, "optim.packs_per_step=4", "workers.count=2").optim.packs_per_step == 4
    with pytest.raises(ValueError, match=r"packs_per_step 4 must be a multiple of every .*\[1, 2, 3\]"):
        load(file, "optim.packs_per_step=4", "workers.count=[1, 3]")


def test_sources_and_uri_exclude_each_other(file):
    with pytest.raises(ValueError, match="give either uri or sources"):
        load(file, "dataset.sources=[{uri: x}]")
    config = load(file, "dataset.version=3")
    assert [(source.uri, source.version, source.weight) for source in config.dataset.all_sources] == [("data", 3, 1.0)]


RATES = OptimConfig(lr=2.0, warmup_share=0.1, final_lr_share=0.25)


def test_learning_rate_by_hand():
    assert learning_rate(0.05, RATES) == pytest.approx(1.0)
    assert learning_rate(0.1, RATES) == pytest.approx(2.0)
    assert learning_rate(0.55, RATES) == pytest.approx(2.0 * (0.25 + 0.75 / 2))
    assert learning_rate(1.0, RATES) == pytest.approx(0.5)
    assert learning_rate(0.0, OptimConfig(lr=1.0, warmup_share=0.0)) == 1.0


@settings(deadline=None)
@given(st.floats(0, 0.9), st.floats(0, 1))
def test_learning_rate_rises_then_falls(warmup, final):
    optim = OptimConfig(lr=1.0, warmup_share=warmup, final_lr_share=final)
    rates = [learning_rate(step / 200, optim) for step in range(201)]
    peak = max(range(201), key=rates.__getitem__)
    assert all(a <= b + 1e-12 for a, b in pairwise(rates[: peak + 1]))
    assert all(a + 1e-12 >= b for a, b in pairwise(rates[peak:]))
    assert max(rates) <= 1.0
    assert rates[-1] == pytest.approx(final)
