"""What training reads: packs of samples in a deterministic shuffled order, over one or several data sets.

The plan of an epoch (which samples, in which order, in which pack) is computed by every worker from metadata alone and
is the same for all; see `storage.packing`. The stream's state is one global place (epoch, position of the next pack),
so that it means the same to any number of workers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from storage.dataset import Dataset
from storage.epoch_plan import EpochPlan, SourceSizes, plan_epoch
from storage.packing import SampleTooLongError, round_positions, worker_position
from storage.prefetch import prefetched
from storage.reader import LoadedSample, SampleReader

STATE_VERSION = 1

# What two data sets must share before one run may read both, as paths into their identity's JSON.
_COMPATIBLE = (
    ("states", "layer_ids"),
    ("states", "hidden_size"),
    ("states", "dtype"),
    ("layer_convention",),
    ("tokenizer", "digest"),
    ("verifier", "weights_digest"),
)


@dataclass(frozen=True)
class Source:
    """One data set of a weighted list. `version` None takes the newest when the stream is made, and pins it."""

    uri: str
    version: int | None = None
    weight: float = 1.0


@dataclass(frozen=True, eq=False)
class Pack:
    """The samples of one training step of one worker. Empty in a ragged last round: see `TrainingStream`."""

    epoch: int
    position: int  # global, in the epoch; at or past the number of packs for an empty one
    samples: list[LoadedSample]

    @property
    def num_tokens(self) -> int:
        return sum(sample.num_tokens for sample in self.samples)


@dataclass
class StreamCounts:
    """What this worker has yielded since the stream was made or its state loaded."""

    packs: int = 0
    empty_packs: int = 0
    samples: int = 0
    tokens: int = 0
    truncated_samples: int = 0
    truncated_tokens: int = 0  # cut off


class TrainingStream:
    """Iterates `Pack`s of worker `rank` of `world_size`, epoch after epoch.

    Pack j of an epoch goes to worker j mod world_size. All workers take the same number of steps: where the last round
    of an epoch has fewer packs than workers, the others get an empty pack, so no sample is dropped or repeated.

    A source of weight w contributes round(w * N) samples per epoch: whole passes, and for the rest a part that moves
    on from epoch to epoch. The order depends on sample keys, `seed` and epoch only.

    `state_dict()` is the place after the last pack that was yielded, however far ahead the stream has read. It is equal
    on all workers that have taken equally many steps, and holds the versions of the sources: `load_state_dict` goes on
    there with any `world_size`.

    Args:
        sources: `Source`s, or (uri, version or None, weight) tuples.
        seed: of the order.
        pack_tokens: the most tokens (not rows) of one pack.
        rank, world_size: of this worker.
        epochs: how many epochs to yield in all; None goes on for ever.
        max_sample_tokens: longer samples are cut to so many tokens, and counted. None refuses samples longer than
            `pack_tokens` before anything is read.
        prefetch_packs: packs read ahead; 0 reads in the caller's thread. Bounds memory.
        threads: that read ahead.

    Raises:
        ValueError: for contradicting arguments, or sources that differ in layers, dtype, tokenizer or weights.
        SampleTooLongError: naming the first sample that fits no pack, and how many do not.
    """

    def __init__(
        self,
        sources: Sequence[Source | tuple[str, int | None, float]],
        *,
        seed: int,
        pack_tokens: int,
        rank: int = 0,
        world_size: int = 1,
        epochs: int | None = 1,
        max_sample_tokens: int | None = None,
        prefetch_packs: int = 2,
        threads: int = 2,
    ) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} must be at least 0 and below world_size {world_size}")
        if max_sample_tokens is not None and not 2 <= max_sample_tokens <= pack_tokens:
            raise ValueError(
                f"max_sample_tokens {max_sample_tokens} must be at least 2 and at most pack_tokens {pack_tokens}"
            )
        if not sources:
            raise ValueError("sources is empty: name at least one data set")
        self.seed = seed
        self.pack_tokens = pack_tokens
        self.rank = rank
        self.world_size = world_size
        self.epochs = epochs
        self.max_sample_tokens = max_sample_tokens
        self._prefetch_packs = prefetch_packs
        self._threads = threads
        self.epoch = 0
        self.position = 0
        self.counts = StreamCounts()
        self._open([source if isinstance(source, Source) else Source(*source) for source in sources])

    def _open(self, sources: Sequence[Source]) -> None:
        snapshots = [Dataset.open(source.uri).snapshot(source.version) for source in sources]
        _check_compatible(sources, [snapshot.dataset.identity.to_json() for snapshot in snapshots])
        self.readers = [SampleReader(snapshot) for snapshot in snapshots]
        self.sources = [
            Source(source.uri, snapshot.version, source.weight)
            for source, snapshot in zip(sources, snapshots, strict=True)
        ]
        self.spec = self.readers[0].spec
        self._plan: tuple[int, EpochPlan] | None = None
        if not any(len(reader) for reader in self.readers):
            raise ValueError(f"no samples in {', '.join(source.uri for source in self.sources)}")
        if self.max_sample_tokens is None:
            self._refuse_long_samples()

    def _refuse_long_samples(self) -> None:
        too_long: list[str] = []
        total = 0
        for source, reader in zip(self.sources, self.readers, strict=True):
            found = np.flatnonzero(reader.locations.num_tokens > self.pack_tokens)
            total += len(found)
            too_long += [
                f"sample {reader.locations.key(index)} of {source.uri} has {reader.locations.num_tokens[index]} tokens"
                for index in found[:1].tolist()
            ]
        if too_long:
            raise SampleTooLongError(
                f"{total} samples are longer than pack_tokens {self.pack_tokens} (first: {too_long[0]}): raise "
                "pack_tokens, or set max_sample_tokens to cut them"
            )

    def plan(self, epoch: int) -> EpochPlan:
        """The packs of `epoch`, the same on every worker; the plan of one epoch is kept."""
        if self._plan is None or self._plan[0] != epoch:
            sizes = [
                SourceSizes(reader.locations.keys, reader.locations.num_tokens, source.weight)
                for source, reader in zip(self.sources, self.readers, strict=True)
            ]
            self._plan = epoch, plan_epoch(sizes, self.seed, epoch, self.pack_tokens, self.max_sample_tokens)
        return self._plan[1]

    def __iter__(self) -> Iterator[Pack]:
        while self.epochs is None or self.epoch < self.epochs:
            epoch, plan = self.epoch, self.plan(self.epoch)
            starts = list(round_positions(self.position, plan.packs.num_packs, self.world_size))
            positions = [worker_position(start, self.rank, self.world_size) for start in starts]
            packs = prefetched(
                self._pack_loader(epoch, plan), positions, depth=self._prefetch_packs, threads=self._threads
            )
            for start, pack in zip(starts, packs, strict=True):
                # Set before the yield: whoever saves a checkpoint after this step has consumed this pack.
                self.position = min(start + self.world_size, plan.packs.num_packs)
                yield self._cut_pack(pack)
            self.epoch, self.position = epoch + 1, 0

    def _pack_loader(self, epoch: int, plan: EpochPlan) -> Callable[[int], Pack]:
        def load(position: int) -> Pack:
            if position >= plan.packs.num_packs:
                return Pack(epoch, position, [])
            members = plan.packs.pack(position)
            samples: list[LoadedSample | None] = [None] * len(members)
            for number, reader in enumerate(self.readers):
                slots = np.flatnonzero(plan.sources[members] == number).tolist()
                for slot, sample in zip(slots, reader.read_at(plan.indices[members[slots]].tolist()), strict=True):
                    samples[slot] = sample
            return Pack(epoch, position, [sample for sample in samples if sample is not None])

        return load

    def _cut_pack(self, pack: Pack) -> Pack:
        """Cuts over-long samples and counts what the caller is about to get."""
        limit = self.max_sample_tokens
        counts = self.counts
        samples = []
        for sample in pack.samples:
            if limit is not None and sample.num_tokens > limit:
                counts.truncated_samples += 1
                counts.truncated_tokens += sample.num_tokens - limit
                sample = sample.truncated(limit)
            counts.tokens += sample.num_tokens
            samples.append(sample)
        counts.samples += len(samples)
        counts.packs += 1
        counts.empty_packs += not samples
        return Pack(pack.epoch, pack.position, samples)

    def state_dict(self) -> dict[str, Any]:
        """JSON-able; equal on all workers after equally many steps."""
        return {
            "state_version": STATE_VERSION,
            "epoch": self.epoch,
            "position": self.position,
            **self._settings(),
            "sources": [asdict(source) for source in self.sources],
            "plan_digest": self.plan(self.epoch).digest,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where `state` was taken, reading the versions that it names.

        Raises:
            ValueError: naming each setting that differs, or when the data no longer give the plan that the place
                (epoch, position) points into.
        """
        if state.get("state_version") != STATE_VERSION:
            raise ValueError(f"stream state has state_version {state.get('state_version')!r}, known: {STATE_VERSION}")
        mine = self._settings() | {"weights": [source.weight for source in self.sources]}
        theirs = state | {"weights": [source["weight"] for source in state["sources"]]}
        differing = [name for name in mine if mine[name] != theirs[name]]
        if differing:
            wrong = "; ".join(f"{name}: state has {theirs[name]}, this run {mine[name]}" for name in differing)
            raise ValueError(f"the stream's place is only valid with the settings it was taken with: {wrong}")
        pinned = [
            Source(source.uri, stored["version"], source.weight)
            for source, stored in zip(self.sources, state["sources"], strict=True)
        ]
        if pinned != self.sources:
            self._open(pinned)
        if self.plan(state["epoch"]).digest != state["plan_digest"]:
            raise ValueError(
                f"epoch {state['epoch']} of {', '.join(source.uri for source in pinned)} no longer holds the samples "
                "it held when the stream's state was taken: going on would repeat some and skip others"
            )
        self.epoch, self.position = state["epoch"], state["position"]
        self.counts = StreamCounts()

    def _settings(self) -> dict[str, Any]:
        return {"seed": self.seed, "pack_tokens": self.pack_tokens, "max_sample_tokens": self.max_sample_tokens}


def _check_compatible(sources: Sequence[Source], identities: Sequence[dict[str, Any]]) -> None:
    """Raises ValueError naming each field in which a source differs from the first one."""
    wrong = []
    for source, identity in zip(sources[1:], identities[1:], strict=True):
        for path in _COMPATIBLE:
            first, other = _at(identities[0], path), _at(identity, path)
            if first != other:
                wrong.append(f"{'.'.join(path)}: {sources[0].uri} has {first!r}, {source.uri} has {other!r}")
    if wrong:
        raise ValueError(f"these data sets cannot be read in one run: {'; '.join(wrong)}")


def _at(value: dict[str, Any], path: Sequence[str]) -> Any:
    for name in path[:-1]:
        value = value[name]
    return value.get(path[-1])
