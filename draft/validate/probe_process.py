"""The process behind `draft.validate.probe`: everything here runs vLLM's code. Not imported by anything."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import AutoConfig, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.config.device import DeviceConfig
from vllm.config.load import LoadConfig
from vllm.config.model import ModelConfig
from vllm.config.parallel import ParallelConfig
from vllm.config.speculative import SpeculativeConfig
from vllm.model_executor.models import ModelRegistry
from vllm.version import __version__ as vllm_version

from draft.formats import form_of, from_engine
from draft.jsonfile import read_json_object
from draft.serve import METHOD
from draft.tensorfiles import read_headers, read_tensor
from draft.validate.probe import EngineReport
from draft.verifier import read_verifier
from draft.weights import vllm_name

# What Eagle3LlamaForCausalLM and its layers read out of the configuration.
PARSED_FIELDS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "vocab_size",
    "draft_vocab_size",
    "norm_before_residual",
    "norm_before_fc",
    "fc_norm",
    "norm_output",
    "num_aux_hidden_states",
    "rope_parameters",
)
# How vLLM stacks projections: parameter part -> checkpoint parts in order.
STACKED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
DRAFT_ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
UNTOUCHED_ID = -(2**40)
# Short: nothing is run, and rotary tables are built for this many positions.
MAX_MODEL_LEN = 2048


def register_models(verifier: str) -> None:
    """Give vLLM's registry the classes of the pair.

    Left alone it imports each of them in a process of its own to see what it supports, seven seconds apiece, unless an
    earlier run on this machine has noted it.
    """
    named = read_json_object(Path(verifier) / "config.json").get("architectures") or []
    for name in (*DRAFT_ARCHITECTURES, *named):
        known = ModelRegistry.models.get(name)
        if known is not None:
            ModelRegistry.register_model(name, known.load_model_cls())


def read_configs(verifier: str, draft: str) -> tuple[ModelConfig, ParallelConfig, SpeculativeConfig]:
    """The configurations that `vllm serve VERIFIER --speculative-config {...}` builds."""
    model_config = ModelConfig(
        model=verifier,
        skip_tokenizer_init=True,
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=MAX_MODEL_LEN,
        # The verifier is only described, never built: its quantization may not exist on this machine.
        hf_overrides={"quantization_config": None},
    )
    parallel_config = ParallelConfig()
    speculative_config = SpeculativeConfig(
        method=METHOD,
        model=draft,
        num_speculative_tokens=1,
        target_model_config=model_config,
        target_parallel_config=parallel_config,
    )
    return model_config, parallel_config, speculative_config


def layer_ids(speculative_config: SpeculativeConfig) -> tuple[list[int] | None, list[int] | None]:
    """The layer ids as the model runners V1 and V2 read them; None where a runner would take its defaults."""
    from vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils import get_eagle3_aux_layers_from_config
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    runner: Any = SimpleNamespace(speculative_config=speculative_config)
    v1 = GPUModelRunner._get_eagle3_aux_layers_from_config(runner)
    v2 = get_eagle3_aux_layers_from_config(speculative_config)
    return (list(v1) if v1 else None, list(v2) if v2 else None)


def load_draft(vllm_config: VllmConfig, draft: Path) -> dict[str, Any]:
    """Build the draft and load its weights with vLLM's loader; returns the report's fields on what came of it.

    Stops before vLLM packs weights for its kernels, so that parameters can be compared with the file.
    """
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.utils.torch_utils import set_default_torch_dtype

    speculative_config = vllm_config.speculative_config
    assert speculative_config is not None
    model_config = speculative_config.draft_model_config
    loader = get_model_loader(LoadConfig())
    dtype = model_config.dtype
    assert isinstance(dtype, torch.dtype)
    with set_default_torch_dtype(dtype), torch.device("cpu"):
        model = loader.create_model(vllm_config=vllm_config, model_config=model_config)
    parameters = dict(model.named_parameters())
    for parameter in parameters.values():
        parameter.data.fill_(torch.nan if parameter.is_floating_point() else UNTOUCHED_ID)
    loader.load_weights(model, model_config)
    in_file = {vllm_name(name): header for name, header in read_headers(draft).items()}
    in_file.pop(None, None)  # t2d
    ignored = set(in_file) - {source for name in parameters for source in _sources(name)}
    unfilled, altered = [], []
    for name, parameter in parameters.items():
        data = parameter.data
        sources = [in_file[part] for part in _sources(name) if part in in_file]
        if sources:
            expected = torch.cat([read_tensor(header) for header in sources]).to(data.dtype)
            if not _holds(data, expected, padded="lm_head" in name or "embed_tokens" in name):
                altered.append(f"{name} is {list(data.shape)}, the file holds {list(expected.shape)}")
        elif bool((torch.isnan(data) if data.is_floating_point() else data == UNTOUCHED_ID).any()):
            unfilled.append(name)
    if not getattr(model, "has_own_embed_tokens", False):
        # Without its own embedding the draft gets the verifier's after loading.
        unfilled = [name for name in unfilled if "embed_tokens" not in name]
    # vLLM makes a hidden_norm in every decoder layer and uses the first one's.
    unfilled = [name for name in unfilled if not ("hidden_norm" in name and ".layers.0." not in name)]
    return {
        "unfilled": unfilled,
        "altered": altered,
        "ignored": sorted(ignored),
        "rope_difference": compare_rope(model, Path(vllm_config.model_config.model), draft),
    }


def compare_rope(model: Any, verifier: Path, draft: Path) -> float | None:
    """The largest difference between the rotations that the built draft serves with and those that it trains with.

    None where config.json describes no draft that could be trained, or where vLLM keeps no table of that kind.
    """
    try:
        config = from_engine(read_json_object(draft / "config.json"), read_verifier(verifier))
    except ValueError:
        return None
    served = getattr(model.model.layers[0].self_attn.rotary_emb, "cos_sin_cache", None)
    if served is None:
        return None
    decoder = LlamaConfig(**{key: value for key, value in config.to_flat().items() if key != "rope_scaling"})
    positions = torch.tensor([[0, 1, 2, 17, 300, MAX_MODEL_LEN - 1]])
    cos, sin = LlamaRotaryEmbedding(decoder)(torch.zeros(1, dtype=torch.float32), positions)
    half = config.head_dim // 2
    trained = torch.cat([cos[0, :, :half], sin[0, :, :half]], dim=-1)
    table = served[positions[0]].float()
    return float((table - trained).abs().max()) if table.shape == trained.shape else float("inf")


def _holds(data: torch.Tensor, expected: torch.Tensor, *, padded: bool) -> bool:
    """Whether a parameter holds a tensor of the file; vLLM pads vocabularies with rows of its own."""
    if padded and data.shape[0] > expected.shape[0]:
        data = data[: expected.shape[0]]
    return data.shape == expected.shape and torch.equal(torch.nan_to_num(data), torch.nan_to_num(expected))


def _sources(parameter: str) -> list[str]:
    for stacked, parts in STACKED.items():
        if f".{stacked}." in parameter:
            return [parameter.replace(stacked, part) for part in parts]
    return [parameter]


def read_with_transformers(draft: Path) -> dict[str, str]:
    """What transformers makes of a flat config.json: the report's fields on it."""
    try:
        if form_of(read_json_object(draft / "config.json")) == "nested":
            return {}
        return {"transformers_class": type(AutoConfig.from_pretrained(draft, trust_remote_code=False)).__name__}
    except Exception as error:  # noqa: BLE001 (whatever transformers raises here is the finding)
        return {"transformers_error": _describe(error)}


def probe(verifier: str, draft: str) -> EngineReport:
    fields: dict[str, Any] = {"vllm_version": vllm_version}
    fields |= read_with_transformers(Path(draft))  # before vLLM registers configurations of its own
    try:
        register_models(verifier)
        model_config, parallel_config, speculative_config = read_configs(verifier, draft)
        vllm_config = VllmConfig(
            model_config=model_config,
            parallel_config=parallel_config,
            speculative_config=speculative_config,
            device_config=DeviceConfig(device="cpu"),
        )
    except Exception as error:  # noqa: BLE001 (whatever vLLM raises here is the finding)
        return EngineReport(**fields, config_error=_describe(error))
    hf_config = speculative_config.draft_model_config.hf_config
    v1, v2 = layer_ids(speculative_config)
    fields |= {
        "architecture": speculative_config.draft_model_config.architectures[0],
        "parsed": {name: getattr(hf_config, name, None) for name in PARSED_FIELDS},
        "layer_ids_v1": v1,
        "layer_ids_v2": v2,
    }
    try:
        with set_current_vllm_config(vllm_config):
            _initialize_groups()
            loaded = load_draft(vllm_config, Path(draft))
    except Exception as error:  # noqa: BLE001 (whatever vLLM raises here is the finding)
        return EngineReport(**fields, load_error=_describe(error))
    return EngineReport(**fields, **loaded)


def _initialize_groups() -> None:
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.distributed.parallel_state import model_parallel_is_initialized

    if model_parallel_is_initialized():
        return
    with tempfile.TemporaryDirectory(prefix="headrace-probe-") as directory:
        init_distributed_environment(
            world_size=1, rank=0, local_rank=0, distributed_init_method=f"file://{directory}/store", backend="gloo"
        )
        initialize_model_parallel(1, 1)


def _describe(error: BaseException) -> str:
    text = " ".join(str(error).split()) or "no message"
    return f"{type(error).__name__}: {text[:600]}"


def main() -> None:
    pairs, answer_file = json.loads(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    reports = [probe(verifier, draft).to_json() for verifier, draft in pairs]
    answer_file.write_text(json.dumps(reports, default=str))
    os._exit(0)  # taking the interpreter down in good order takes another second


if __name__ == "__main__":
    main()
