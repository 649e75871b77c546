"""Where a submitted job may write."""

from __future__ import annotations

import pytest

from ray_jobs.generate.config import GenerateConfig
from ray_jobs.submit import check_places
from ray_jobs.train.config import TrainConfig


def generate(uri: str) -> GenerateConfig:
    values = {"verifier": {"model": "embedded"}, "prompts": {"source": "builtin:train"}}
    return GenerateConfig.model_validate({**values, "sampling": {"max_tokens": 8}, "dataset": {"uri": uri}})


@pytest.mark.parametrize("uri", ["/data/set", "~/set", "s3://bucket/set", "file:///data/set"])
def test_places_that_outlive_the_job_are_accepted(uri: str) -> None:
    check_places(generate(uri))


def test_a_relative_place_is_refused_by_its_key() -> None:
    with pytest.raises(ValueError, match=r"dataset\.uri 'runs/set' is relative"):
        check_places(generate("runs/set"))
    sources = {"dataset": {"sources": [{"uri": "/data/set"}]}}
    with pytest.raises(ValueError, match=r"checkpoint\.directory 'runs/train' is relative"):
        check_places(TrainConfig.model_validate({**sources, "checkpoint": {"directory": "runs/train"}}))
