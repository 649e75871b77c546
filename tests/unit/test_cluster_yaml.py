"""cluster.yaml is checked with Ray's own schema."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

CLUSTER_YAML = Path(__file__).resolve().parents[2] / "cluster.yaml"


def test_cluster_yaml_passes_rays_schema() -> None:
    config = prepare_config(yaml.safe_load(CLUSTER_YAML.read_text()))
    validate_config(config)
    assert config["cluster_name"] == "headrace"
    assert config["max_workers"] == len(config["provider"]["worker_ips"])


def test_schema_check_can_fail() -> None:
    config = yaml.safe_load(CLUSTER_YAML.read_text())
    config["auth"] = "nobody"
    with pytest.raises(Exception, match=r"auth|nobody"):
        validate_config(prepare_config(config))
