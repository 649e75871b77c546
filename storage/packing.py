"""The reader's order and its packs: pure functions over sample keys and lengths.

Everything a training run reads, in which order and on which worker, follows from the sample keys, the lengths, the
seed and the epoch alone: not from files, from compaction, from the order in which units were committed or from the
number of workers. So a run can stop on four workers and go on with two.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Int64 = NDArray[np.int64]

# Open packs that a sample may still join. On lengths of real answers, 32 fill packs to 98 % and more, and a pack is
# never further than 32 packs away from where the shuffled order would have put it.
LOOK_AHEAD_PACKS = 32

# Domains keep the two uses of one seed apart.
_SHUFFLE, _PART = 1, 2

# SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014). numpy's own generators may
# change their streams between releases (NEP 19); an order that a checkpoint points into must not.
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


class SampleTooLongError(ValueError):
    """A sample that no pack can hold, with no permission to truncate it."""


def _mix(state: NDArray[np.uint64], word: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = (state ^ word) + _GOLDEN
    z = (z ^ (z >> np.uint64(30))) * _MIX_1
    z = (z ^ (z >> np.uint64(27))) * _MIX_2
    return z ^ (z >> np.uint64(31))


def key_hash(keys: Int64, *words: int) -> NDArray[np.uint64]:
    """A well-mixed 64-bit number for each row of `keys` [N, K] under the integers `words`; equal on every machine."""
    state = np.zeros(len(keys), np.uint64)
    for word in words:
        state = _mix(state, np.full(len(keys), word & 0xFFFF_FFFF_FFFF_FFFF, np.uint64))
    for column in range(keys.shape[1]):
        state = _mix(state, keys[:, column].astype(np.uint64))
    return state


def _hash_order(keys: Int64, *words: int) -> Int64:
    """Indices that sort `keys` by hash; the key itself breaks ties."""
    columns = [keys[:, column] for column in reversed(range(keys.shape[1]))]
    return np.lexsort([*columns, key_hash(keys, *words)]).astype(np.int64)


def shuffled_order(keys: Int64, seed: int, epoch: int) -> Int64:
    """The order of one epoch.

    Args:
        keys: [N, K] distinct integer keys, in any order.
        seed: of the run.
        epoch: from 0.

    Returns:
        Indices into `keys`, int64 [N]. The sequence of keys they give depends on the set of keys, `seed` and `epoch`
        only, and leaving a key out leaves the others in the same relative order.
    """
    return _hash_order(keys, _SHUFFLE, seed, epoch)


def weighted_selection(keys: Int64, weight: float, seed: int, epoch: int, source: int = 0) -> Int64:
    """Which samples of one source an epoch holds: `round(weight * N)` of them.

    Whole passes hold every sample; the remaining part is a window that moves along a ring of all samples from epoch to
    epoch, so after any number of epochs no sample was used more than once oftener than another.

    Returns:
        Indices into `keys`, one per use (a sample used twice appears twice), in no meaningful order.

    Raises:
        ValueError: for a weight that is not a positive number.
    """
    if not (weight > 0 and np.isfinite(weight)):
        raise ValueError(f"weight {weight} of source {source} must be a positive number; leave the source out instead")
    num_samples = len(keys)
    if num_samples == 0:
        return np.empty(0, np.int64)
    passes, part = divmod(round(weight * num_samples), num_samples)
    selected = np.tile(np.arange(num_samples, dtype=np.int64), passes)
    if part:
        ring = _hash_order(keys, _PART, seed, source)
        window = (epoch * part + np.arange(part, dtype=np.int64)) % num_samples
        selected = np.concatenate([selected, ring[window]])
    return selected


@dataclass(frozen=True)
class PackPlan:
    """All packs of one epoch: pack j holds `samples[bounds[j]:bounds[j + 1]]`."""

    samples: Int64  # indices of the caller's, grouped by pack
    bounds: Int64  # [num_packs + 1]

    @property
    def num_packs(self) -> int:
        return len(self.bounds) - 1

    def pack(self, position: int) -> Int64:
        """The sample indices of pack `position`."""
        return self.samples[self.bounds[position] : self.bounds[position + 1]]


def make_packs(lengths: Sequence[int] | Int64, pack_tokens: int, look_ahead: int = LOOK_AHEAD_PACKS) -> PackPlan:
    """Packs samples, given in reading order, first-fit into at most `look_ahead` open packs.

    A sample joins the oldest open pack with room for it, else it opens a new one; the oldest pack closes when more than
    `look_ahead` are open. Every sample is in exactly one pack and no pack holds more than `pack_tokens` tokens.

    Raises:
        SampleTooLongError: when a length exceeds `pack_tokens` (the message names the index, the caller knows the key).
    """
    if pack_tokens < 1 or look_ahead < 1:
        raise ValueError(f"pack_tokens {pack_tokens} and look_ahead {look_ahead} must be positive")
    closed: list[list[int]] = []
    open_packs: list[list[int]] = []
    rooms: list[int] = []
    for index, length in enumerate(np.asarray(lengths, dtype=np.int64).tolist()):
        if length > pack_tokens:
            raise SampleTooLongError(f"sample at position {index} has {length} tokens, a pack takes {pack_tokens}")
        for slot, room in enumerate(rooms):
            if length <= room:
                open_packs[slot].append(index)
                rooms[slot] = room - length
                break
        else:
            open_packs.append([index])
            rooms.append(pack_tokens - length)
            if len(rooms) > look_ahead:
                closed.append(open_packs.pop(0))
                rooms.pop(0)
    closed += open_packs
    bounds = np.zeros(len(closed) + 1, np.int64)
    np.cumsum([len(pack) for pack in closed], out=bounds[1:])
    flat = np.fromiter((index for pack in closed for index in pack), np.int64, count=int(bounds[-1]))
    return PackPlan(flat, bounds)


def worker_position(position: int, rank: int, world_size: int) -> int:
    """The pack that worker `rank` takes in the round that starts at global pack `position`.

    Pack j belongs to worker j mod world_size. A round is `world_size` consecutive packs from any start, so each worker
    has exactly one of them, also when a run goes on with another number of workers in the middle of an epoch.
    """
    return position + (rank - position) % world_size


def round_positions(position: int, num_packs: int, world_size: int) -> Iterator[int]:
    """Starts of the rounds from `position` to the end of the epoch.

    The last round may be ragged (fewer packs left than workers): the workers left over get an empty pack, so that all
    take the same number of steps and nothing is lost.
    """
    yield from range(position, num_packs, world_size)
