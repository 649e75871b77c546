"""The room that replicas need in a Ray cluster, and what is said while there is none."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Collection, Mapping
from typing import Literal

import ray
from ray.util.placement_group import PlacementGroup, placement_group_table

from gen.config import ReplicasConfig
from ray_jobs.errors import JobError

# A wait for room is said after so long: an idle cluster places an actor in a second.
SAY_AFTER_S = 30.0


class NoRoomError(JobError):
    """The cluster did not have a replica's resources for as long as the job may wait for them."""


def has_room(group: PlacementGroup) -> bool:
    """Whether every bundle of a placement group lies on a living node."""
    return bool(placement_group_table(group)["state"] == "CREATED")


def replica_bundle(replicas: ReplicasConfig) -> dict[str, float]:
    """The resources of one replica. A bundle lies on one node."""
    ranks = replicas.tensor_parallel_size
    if (replicas.device or _default_device()) == "gpu":
        return {"GPU": ranks, "CPU": 1}
    if replicas.cores is not None:
        return {"CPU": replicas.cores * ranks}
    # One that is larger than every node would be waited for without end.
    share = min(ray.cluster_resources().get("CPU", 0) / replicas.count, _largest_node("CPU"))
    return {"CPU": max(1, int(share))}


def _default_device() -> Literal["cpu", "gpu"]:
    """GPUs where the cluster has some by now, and where PyTorch is built for them: nodes may join later."""
    import torch

    has_gpu = ray.cluster_resources().get("GPU", 0) > 0
    return "gpu" if has_gpu or torch.version.cuda or torch.version.hip else "cpu"


def num_devices(bundle: Mapping[str, float]) -> float:
    """GPUs of a replica, or its cores on CPU."""
    return bundle.get("GPU") or bundle["CPU"]


def num_bundles(group: PlacementGroup, node: str) -> int:
    """How many of a group's replicas lie on a node, by its id in hexadecimal."""
    nodes: dict[int, str] = placement_group_table(group)["bundles_to_node_id"]
    return list(nodes.values()).count(node)


def free_index(taken: Collection[int]) -> int:
    """The lowest index that none of a node's living replicas has: which of the node's cores a new one may take."""
    return next(index for index in itertools.count() if index not in taken)


def _largest_node(resource: str) -> float:
    return max((node["Resources"].get(resource, 0) for node in ray.nodes() if node["Alive"]), default=0)


class RoomWait:
    """Says once that replicas wait for room, and ends a wait that nothing works beside."""

    def __init__(self, bundle: Mapping[str, float], timeout_s: float) -> None:
        self._bundle = bundle
        self._timeout_s = timeout_s
        self._began: float | None = None  # of waiting with nothing working
        self._said = False

    def waiting(self, who: str, since: float, *, others_work: bool) -> None:
        """`who` has waited since then (monotonic seconds); replicas that others work beside may wait as long as those.

        Raises NoRoomError.
        """
        now = time.monotonic()
        if others_work:
            self._began = None
        elif self._began is None:
            self._began = now
        if not self._said and now - since > SAY_AFTER_S:
            self._said = True
            print(self._message(who), file=sys.stderr, flush=True)
        if self._began is not None and now - max(since, self._began) > self._timeout_s:
            raise NoRoomError(
                f"{self._message(who)}; waited {self._timeout_s:g} s (replicas.placement_timeout_s), nothing works"
            )

    def placed(self) -> None:
        """Nobody waits; the next wait is said again."""
        self._began = None
        self._said = False

    def _message(self, who: str) -> str:
        nodes = [node for node in ray.nodes() if node["Alive"]]
        return (
            f"waiting for room in the cluster: {who} needs {_listed(self._bundle, self._bundle)} on one node; "
            f"the cluster has {_listed(ray.cluster_resources(), self._bundle)} on {len(nodes)} nodes "
            f"(the largest: {', '.join(f'{_largest_node(name):g} {name}' for name in self._bundle)}), "
            f"free are {_listed(ray.available_resources(), self._bundle)}"
        )


def _listed(resources: Mapping[str, float], names: Mapping[str, float]) -> str:
    return ", ".join(f"{resources.get(name, 0):g} {name}" for name in names)
