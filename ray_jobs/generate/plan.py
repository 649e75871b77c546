"""What a generate job will do, found out before any model is loaded: prompts, units, identity, size."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gen.chat import ChatTokenizer
from gen.layers import resolve_layer_ids
from gen.prompts import BadRow, Prompt, RowError, SourceDigest, read_prompts, shuffled
from gen.units import PromptSize, expected_size, plan_units
from gen.verifier import VerifierInfo, describe_verifier
from ray_jobs.generate.config import GenerateConfig
from ray_jobs.generate.spool import PromptSpool
from ray_jobs.progress import stage
from storage import Identity, StateSpec, UnitPlan


@dataclass(frozen=True)
class JobPlan:
    """The result of planning; the spool holds the rows themselves."""

    identity: Identity
    units: list[UnitPlan]
    verifier: VerifierInfo
    verifier_dir: Path
    spool: Path
    order: list[int]  # positions in the spool, in the order of the units
    rejects: Counter[str]  # bad rows by reason

    @property
    def num_prompts(self) -> int:
        return len(self.order) - self.rejects.total()

    @property
    def states(self) -> StateSpec:
        return self.identity.states

    @property
    def expected_samples(self) -> int:
        return sum(unit.expected_samples for unit in self.units)

    @property
    def expected_bytes(self) -> int:
        return sum(unit.expected_bytes for unit in self.units)


def plan_job(config: GenerateConfig, run_dir: Path) -> JobPlan:
    """Read every prompt once, check it, and cut the units. Writes the spool into `run_dir`.

    Raises ValueError when the share of bad rows is above `prompts.max_reject_share`, when there is no prompt at all,
    or when the configuration does not fit the verifier; FileNotFoundError for a missing verifier or source.
    """
    directory = config.verifier.directory()
    verifier = describe_verifier(directory)
    layer_ids = resolve_layer_ids(
        config.capture.layers, verifier.num_layers, convention=config.capture.layer_convention
    )
    chat = ChatTokenizer.from_config(config.verifier, directory)
    source = SourceDigest()
    rejects: Counter[str] = Counter()
    sizes: list[PromptSize] = []
    rows: list[int] = []

    def checked() -> Iterator[Prompt | BadRow]:
        prompts = read_prompts(
            config.prompts.source, split=config.prompts.split, mode=config.prompts.mode, limit=config.prompts.limit
        )
        with stage("reading prompts") as progress:
            for index, row in enumerate(prompts):
                item = row if isinstance(row, BadRow) else _fitting(row, chat, config.sampling.max_tokens)
                source.update(item)
                sizes.append(expected_size(item, n=config.sampling.n, output_tokens=config.sampling.max_tokens))
                rows.append(item.row)
                if isinstance(item, BadRow):
                    rejects[item.reason] += 1
                progress.update(index + 1, note=f"{rejects.total()} bad rows")
                yield item

    run_dir.mkdir(parents=True, exist_ok=True)
    spool = run_dir / "prompts.arrow"
    PromptSpool.write(spool, checked())
    num_rows = len(rows)
    if num_rows == rejects.total():
        raise ValueError(
            f"prompts.source: {config.prompts.source} has no usable prompt ({_listed(rejects) or 'no rows'})"
        )
    share = rejects.total() / num_rows
    if share > config.prompts.max_reject_share:
        raise ValueError(
            f"prompts: {rejects.total()} of {num_rows} rows ({share:.1%}) are rejected ({_listed(rejects)}); "
            f"prompts.max_reject_share allows {config.prompts.max_reject_share:.1%}: mend the source or raise it"
        )
    dtype = verifier.dtype if config.verifier.dtype == "auto" else config.verifier.dtype
    states = StateSpec(layer_ids, verifier.hidden_size, dtype)
    order = list(range(num_rows))
    if config.prompts.shuffle_seed is not None:
        order = shuffled(order, config.prompts.shuffle_seed, key=rows.__getitem__)
    units = plan_units(
        (sizes[position] for position in order),
        row_bytes=states.row_bytes,
        target_bytes=config.dataset.unit_bytes,
        max_prompts=config.dataset.unit_max_prompts,
    )
    identity = Identity(
        mode=config.prompts.mode,
        verifier=verifier.identity(
            name=config.verifier.model,
            revision=config.verifier.revision,
            kv_cache_dtype=config.verifier.kv_cache_dtype,
        ),
        tokenizer=verifier.tokenizer_identity(
            chat_template=config.verifier.chat_template, chat_template_kwargs=config.verifier.chat_template_kwargs
        ),
        states=states,
        codec=config.dataset.codec,
        sampling=config.sampling.model_dump(mode="json"),
        prompts={**source.identity(), "shuffle_seed": config.prompts.shuffle_seed},
    )
    return JobPlan(identity, units, verifier, directory, spool, order, rejects)


def _fitting(prompt: Prompt, chat: ChatTokenizer, max_output_tokens: int) -> Prompt | BadRow:
    """The prompt, or the bad row that it is for this verifier: too long, or refused by its chat template."""
    try:
        if prompt.answered:
            chat.answered(prompt.messages, max_tokens=chat.max_model_len)
        else:
            chat.prompt_ids(prompt.messages, max_tokens=chat.max_model_len - max_output_tokens)
    except RowError as error:
        return BadRow(prompt.row, prompt.prompt_id, error.reason, error.detail)
    return prompt


def _listed(rejects: Counter[str]) -> str:
    return ", ".join(f"{reason} {count}" for reason, count in rejects.most_common())
