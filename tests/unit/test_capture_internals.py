"""The private names of vLLM that capture touches: this file fails loudly when a vLLM upgrade moves one of them."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from gen.capture import vllm_internals as internals
from gen.capture.config import capture_engine_args
from storage.types import StateSpec

SPEC = StateSpec((2, 15, 27, 30), 576)


def self_names(method: Callable[..., Any]) -> set[str]:
    """Names that a method reads from or writes to `self`."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(method)))
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
    }


def test_the_runner_has_what_is_read() -> None:
    from vllm.v1.worker.gpu_model_runner import ExecuteModelState, GPUModelRunner

    have = self_names(GPUModelRunner.__init__) | set(dir(GPUModelRunner))
    assert set(internals.RUNNER_NAMES) <= have
    assert {"aux_hidden_states", "scheduler_output"} <= set(ExecuteModelState._fields)
    assert {"use_aux_hidden_state_outputs", "execute_model_state"} <= self_names(GPUModelRunner.execute_model)
    # The state must still be there after execute_model and be gone only in sample_tokens.
    assert "execute_model_state" in self_names(GPUModelRunner.sample_tokens)
    assert {"input_ids", "input_batch", "discard_request_mask"} <= self_names(GPUModelRunner._prepare_inputs)


def test_the_scheduler_says_what_is_read() -> None:
    from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput

    def fields(cls: type) -> set[str]:
        return set(cls.__dataclass_fields__)  # type: ignore[attr-defined]

    assert {
        "scheduled_new_reqs",
        "scheduled_cached_reqs",
        "num_scheduled_tokens",
        "total_num_scheduled_tokens",
        "finished_req_ids",
        "preempted_req_ids",
    } <= fields(SchedulerOutput)
    assert {"req_ids", "num_computed_tokens", "resumed_req_ids"} <= fields(CachedRequestData)
    assert {"req_id", "prompt_token_ids", "sampling_params", "num_computed_tokens"} <= fields(NewRequestData)


def test_the_worker_is_called_as_it_is_overridden() -> None:
    from vllm.v1.worker.gpu_worker import Worker

    assert list(inspect.signature(Worker.load_model).parameters) == ["self", "load_dummy_weights"]
    assert list(inspect.signature(Worker.execute_model).parameters) == ["self", "scheduler_output"]
    assert list(inspect.signature(Worker.sample_tokens).parameters) == ["self", "grammar_output"]
    assert list(inspect.signature(Worker.initialize_from_config).parameters) == ["self", "kv_cache_config"]
    assert {"model_runner", "use_v2_model_runner"} <= self_names(Worker.__init__) | self_names(Worker.load_model)


def test_the_block_table_is_what_slots_are_read_from() -> None:
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.worker.block_table import BlockTable

    assert {"block_size", "block_table"} <= self_names(BlockTable.__init__)
    # vLLM computes a token's slot as read_slots does: block id times block size and the place in the block.
    assert "self.block_table.np[row_idx, start : start + num_blocks] = block_ids" in inspect.getsource(BlockTable)
    assert {"num_blocks", "kv_cache_groups"} <= set(KVCacheConfig.__dataclass_fields__)


def test_slots_of_a_step_and_of_the_prefix_that_it_starts_behind() -> None:
    blocks = np.array([[7, 3, 0], [5, 6, 2], [4, 0, 0]])
    table = SimpleNamespace(block_size=4, block_table=SimpleNamespace(np=blocks))
    runner = SimpleNamespace(input_batch=SimpleNamespace(block_table=[table]))
    scheduler_output: Any = SimpleNamespace(
        scheduled_new_reqs=[SimpleNamespace(req_id="new")],
        scheduled_cached_reqs=SimpleNamespace(resumed_req_ids={"resumed"}),
    )
    source: Any = None
    step = internals.Step(source, [("decodes", 5, 1), ("resumed", 8, 2), ("new", 0, 3)])
    slots = internals.read_slots(runner, scheduler_output, step)
    assert slots.slots_N.tolist() == [13, 8, 9, 16, 17, 18]
    assert {name: values.tolist() for name, values in slots.prefixes.items()} == {
        "resumed": [20, 21, 22, 23, 24, 25, 26, 27]
    }


def test_layers_that_are_cached_in_groups_have_no_arena() -> None:
    group = SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=16))
    one: Any = SimpleNamespace(num_blocks=10, kv_cache_groups=[group])
    assert internals.count_slots(one) == 160
    two: Any = SimpleNamespace(num_blocks=10, kv_cache_groups=[group, group])
    with pytest.raises(ValueError, match=r"capture\.prefix_arena_gib: .* 2 groups"):
        internals.count_slots(two)


def test_a_runner_without_the_names_is_refused_by_name() -> None:
    with pytest.raises(RuntimeError, match="input_ids"):
        internals.check_runner(SimpleNamespace(use_aux_hidden_state_outputs=False, execute_model_state=None))


def engine_config(model: Path, spec: StateSpec, **arguments: Any) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    args = {"enforce_eager": True, "max_model_len": 256, **arguments, **capture_engine_args("one_pass", spec)}
    return EngineArgs(model=str(model), **args).create_engine_config()


@pytest.fixture
def _first_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")


@pytest.mark.usefixtures("_first_runner")
def test_layers_are_part_of_the_compile_cache_key(verifier_dir: Path) -> None:
    """A graph compiled for other layers, taken from vLLM's cache, would return other layers' states without a word."""
    hashes = {
        engine_config(verifier_dir, StateSpec(layers, 576)).compute_hash()
        for layers in ((2, 15, 27, 30), (2, 14, 27, 30), (2, 15, 27))
    }
    assert len(hashes) == 3


@pytest.mark.usefixtures("_first_runner")
def test_what_cannot_be_captured_is_refused_with_the_reason(verifier_dir: Path) -> None:
    config = engine_config(verifier_dir, SPEC)
    options = internals.read_options(config)
    internals.check_supported(config, options)

    def refused(spec: StateSpec) -> str:
        other = engine_config(verifier_dir, spec)
        with pytest.raises(ValueError) as caught:  # noqa: PT011 - the message is what is tested
            internals.check_supported(other, internals.read_options(other))
        return str(caught.value)

    assert "ids are 0 to 30" in refused(StateSpec((2, 31), 576))
    assert "hidden_size 640" in refused(StateSpec((2, 30), 640))
    assert "float16" in refused(StateSpec((2, 30), 576, "float16"))
    config.parallel_config.pipeline_parallel_size = 2
    with pytest.raises(ValueError, match="pipeline_parallel_size=2"):
        internals.check_supported(config, options)


@pytest.mark.usefixtures("_first_runner")
def test_a_model_without_intermediate_states_is_refused(verifier_dir: Path, tmp_path: Path) -> None:
    from transformers import OPTConfig

    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "ffn_dim": 64,
        "vocab_size": 128,
    }
    OPTConfig(**sizes, word_embed_proj_dim=64, architectures=["OPTForCausalLM"]).save_pretrained(tmp_path)
    config = engine_config(tmp_path, StateSpec((2, 4), 64, "float32"), skip_tokenizer_init=True, dtype="float32")
    with pytest.raises(ValueError, match="OPTForCausalLM cannot be captured"):
        internals.check_supported(config, internals.read_options(config))


def test_states_of_another_shape_are_refused() -> None:
    good = [torch.zeros(5, 576, dtype=torch.bfloat16) for _ in SPEC.layer_ids]
    internals.check_states(good, SPEC, 4)
    with pytest.raises(RuntimeError, match="3 layers"):
        internals.check_states(good[:3], SPEC, 4)
    with pytest.raises(RuntimeError, match="layer 2: states of shape"):
        internals.check_states(good, SPEC, 6)
    with pytest.raises(RuntimeError, match="layer 30: states are"):
        internals.check_states([*good[:3], good[3].float()], SPEC, 4)


def test_generators_of_unfinished_prefills_are_not_used() -> None:
    """Otherwise vLLM rewinds them, which a CPU generator cannot (it kills the engine)."""
    generators = {index: torch.Generator() for index in range(3)}
    runner = SimpleNamespace(
        input_batch=SimpleNamespace(num_reqs=3, generators=dict(generators)),
        discard_request_mask=SimpleNamespace(np=torch.tensor([False, True, False, True]).numpy()),
    )
    with internals.seeded_chunks(runner):
        assert set(runner.input_batch.generators) == {0, 2}
    assert runner.input_batch.generators == generators
