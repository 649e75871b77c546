"""The driver of a generate job: replicas, leases, commits."""

from __future__ import annotations

import sys
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import ray
from ray.exceptions import OutOfMemoryError, RayError, RayTaskError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from gen.engine import EngineInfo
from gen.isolation import EngineLostError
from gen.outcome import DOES_NOT_FIT
from gen.replica import ReplicaSpec
from ray_jobs.errors import JobError
from ray_jobs.generate.actor import ReplicaActor
from ray_jobs.generate.config import GenerateConfig
from ray_jobs.generate.deaths import Death, Deaths
from ray_jobs.generate.leases import Lease, Leases
from ray_jobs.generate.plan import JobPlan
from ray_jobs.generate.restarts import Restarts
from ray_jobs.generate.room import RoomWait, free_index, has_room, num_bundles, num_devices, replica_bundle
from ray_jobs.generate.spool import PromptSpool
from ray_jobs.generate.summary import GenerateSummary
from ray_jobs.generate.token_budget import TokenBudget
from ray_jobs.progress import Stage, stage
from storage import Dataset, FencedError, UnitFiles, Writer

POLL_S = 0.5
STOP_TIMEOUT_S = 20.0


class CaptureFaultError(JobError):
    """More samples had bad hidden states than chance explains: the capture itself is at fault."""


class DoesNotFitError(JobError):
    """More samples than may be rejected do not fit into the host memory that capture may use."""


class ReplicaLostError(JobError):
    """Replicas died more often than the job may start them again."""


@dataclass
class _Replica:
    index: int
    name: str
    death: Death  # how its death will be called
    actor: Any
    started: float
    token_budget: int | None
    placed: float | None = None  # when the cluster had room for it
    node: str | None = None  # where
    index_on_node: int = 0
    info: EngineInfo | None = None
    loaded: float = 0.0  # when `info` came
    last_result: float = 0.0  # when the newest of its units came, or `loaded`
    excused: bool = False  # it died of a token budget that was lowered for it: no unit's fault

    def lost_s(self, now: float) -> float:
        """Seconds that its death costs: its start, which must be done again, and what it did since its last unit."""
        if self.placed is None:
            return 0.0
        if self.info is None:
            return now - self.placed
        return (self.loaded - self.placed) + (now - self.last_result)


class _Call(NamedTuple):
    """A call to a replica's actor that is under way: its placement, its start, or the unit of a lease."""

    replica: _Replica
    kind: Literal["place", "start", "unit"]
    lease: Lease | None = None


class Driver:
    """Has the pending units done by replicas, which it starts, replaces and ends, and commits them."""

    def __init__(
        self, config: GenerateConfig, run_dir: Path, plan: JobPlan, dataset: Dataset, pending: list[int], began: float
    ) -> None:
        self._config = config
        self._run_dir = run_dir
        self._plan = plan
        self._dataset = dataset
        self._began = began
        self._num_pending = len(pending)
        replicas = config.replicas
        self._deaths = Deaths(replicas.max_unit_deaths, replicas.max_prompt_deaths, replicas.max_fatal_prompts)
        self._leases = Leases(pending, replicas.max_unit_attempts, self._deaths.must_be_alone)
        self._writer: Writer = dataset.writer()
        self._summary = GenerateSummary(dataset=dataset.uri)
        self._shard_options = {
            "shard_format": config.dataset.shard_format,
            "codec": config.dataset.codec,
            "target_bytes": config.dataset.shard_bytes,
        }

    def run(self) -> None:
        replicas = self._config.replicas
        # vLLM refuses a step that could not hold one token of each request.
        floor = max(replicas.min_batched_tokens, replicas.max_num_seqs)
        self._budget = TokenBudget(self._run_dir, replicas.max_num_batched_tokens, floor)
        self._units = {unit.unit: unit for unit in self._plan.units}
        self._calls: dict[Any, _Call] = {}
        count = min(replicas.count, self._num_pending)
        self._bundle = replica_bundle(replicas)
        self._room = RoomWait(self._bundle, replicas.placement_timeout_s)
        self._group = placement_group([self._bundle] * count, strategy="PACK")
        self._actors: list[_Replica] = []
        self._restarts = Restarts(replicas.max_restarts)
        rejects = Counter(self._dataset.snapshot().rejects()["reason"].to_pylist())
        self._num_does_not_fit = rejects[DOES_NOT_FIT]
        try:
            with stage("loading the verifier", count) as progress:
                self._wait_for_room(count, progress)
                for index in range(count):
                    self._start(index)
                self._wait_for_first(progress)
            with PromptSpool(self._plan.spool) as spool, stage("generating", self._num_pending) as progress:
                self._generate(spool, progress)
        finally:
            self._stop_all()
            remove_placement_group(self._group)

    def _start(self, index: int) -> None:
        replicas = self._config.replicas
        spec = ReplicaSpec(
            name=f"replica-{index}",
            verifier=self._config.verifier,
            sampling=self._config.sampling,
            capture=self._config.capture,
            replicas=replicas.model_copy(update={"max_num_batched_tokens": self._budget.value}),
            states=self._plan.states,
            codec=self._config.dataset.codec,
            cores=None if "GPU" in self._bundle else int(self._bundle["CPU"]) // replicas.tensor_parallel_size,
        )
        actor: Any = (
            ray.remote(ReplicaActor)
            .options(
                max_restarts=0,
                max_task_retries=0,
                max_concurrency=replicas.units_in_flight + 2,
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=index),
                num_gpus=self._bundle.get("GPU", 0),
                num_cpus=self._bundle["CPU"],
            )
            .remote(spec, self._dataset.uri, str(self._log_file(spec.name).resolve()))
        )
        death = self._restarts.start(index)
        replica = _Replica(index, spec.name, death, actor, time.monotonic(), self._budget.value)
        self._actors.append(replica)
        self._calls[actor.node.remote()] = _Call(replica, "place")

    def _log_file(self, name: str) -> Path:
        return self._run_dir / "logs" / f"{name}.log"

    def _wait_for_room(self, count: int, progress: Stage) -> None:
        """Until the cluster has the replicas' resources; an autoscaler may need minutes, a wrong request for ever."""
        since = time.monotonic()
        while not self._group.wait(timeout_seconds=1):
            progress.update(note="waiting for room in the cluster")
            self._room.waiting(f"each of {count} replicas", since, others_work=False)
        progress.update(note="")
        self._room.placed()

    def _check_room(self) -> None:
        """Replicas that replace others wait for room as well, after a node was lost."""
        waiting = [replica for replica in self._actors if replica.placed is None]
        if waiting and has_room(self._group):
            waiting = []  # there is room: their processes are starting
        for replica in waiting:
            self._room.waiting(replica.name, replica.started, others_work=len(waiting) < len(self._actors))
        if not waiting:
            self._room.placed()

    def _wait_for_first(self, progress: Stage) -> None:
        """Replicas that are still loading join later; generation starts with the first one."""
        while not any(replica.info for replica in self._actors):
            self._poll(progress)
            progress.update(sum(replica.info is not None for replica in self._actors))
        self._summary.start_s = time.monotonic() - self._began

    def _generate(self, spool: PromptSpool, progress: Stage) -> None:
        while not self._leases.is_done:
            for replica in self._actors:
                while replica.info and len(self._leases.held_by(replica.name)) < self._config.replicas.units_in_flight:
                    lease = self._leases.lease(replica.name)
                    if lease is None:
                        break
                    unit = self._units[lease.unit]
                    rows = spool.rows(self._plan.order[unit.first : unit.first + unit.num_prompts])
                    isolation = self._deaths.isolation(lease.unit)
                    call = replica.actor.run_unit.remote(
                        lease.unit, lease.attempt, rows, self._shard_options, isolation
                    )
                    self._calls[call] = _Call(replica, "unit", lease)
            self._poll(progress)
            seconds = time.monotonic() - self._began - self._summary.start_s
            self._summary.generate_s = seconds
            tokens = self._summary.num_output_tokens
            progress.update(
                self._summary.num_units,
                note=f"units; {self._summary.num_samples} samples, {tokens} tokens, {tokens / seconds:.0f} tokens/s",
            )

    def _poll(self, progress: Stage) -> None:
        """Take the results that have arrived, waiting a moment for one."""
        ready, _ = ray.wait(list(self._calls), num_returns=1, timeout=POLL_S)
        progress.show()
        for call in ready:
            if call in self._calls:  # those of a replica that was lost are taken together
                self._take(call)
        self._check_room()

    def _take(self, reference: Any) -> None:
        """The result of a call that has ended."""
        call = self._calls.pop(reference)
        replica = call.replica
        try:
            result = ray.get(reference)
        except RayError as error:
            self._failed(call, error)
            return
        match call.kind:
            case "place":
                replica.placed = time.monotonic()
                others = [other.index_on_node for other in self._actors if other.node == result]
                replica.node, replica.index_on_node = result, free_index(others)
                num_on_node = max(num_bundles(self._group, result), len(others) + 1)
                start = replica.actor.start.remote(replica.index_on_node, num_on_node)
                self._calls[start] = _Call(replica, "start")
            case "start":
                replica.info = result
                replica.loaded = replica.last_result = time.monotonic()
            case "unit":
                assert call.lease is not None
                self._commit(replica, call.lease, result)

    def _commit(self, replica: _Replica, lease: Lease, result: dict[str, Any]) -> None:
        assert replica.info is not None
        self._check_fit(result["num_does_not_fit"])
        files = UnitFiles.from_json(result["files"])
        info = {"replica": replica.name, "attempt": str(lease.attempt), **replica.info.as_info()}
        try:
            commit = self._writer.commit([files], info)
        except FencedError as error:
            self._leases.release(lease.unit, f"{replica.name}: {error}")
            return
        self._leases.finish(lease.unit)
        replica.last_result = time.monotonic()
        summary = self._summary
        if commit.accepted:
            self._num_does_not_fit += result["num_does_not_fit"]
            summary.num_units += 1
            summary.num_samples += result["num_samples"]
            summary.num_rejects += result["num_rejects"]
            summary.num_prompt_tokens += result["num_prompt_tokens"]
            summary.num_output_tokens += result["num_output_tokens"]
            if summary.first_commit_s is None:
                summary.first_commit_s = time.monotonic() - self._began
        summary.capture_faults.update(result["capture_faults"])
        summary.num_tightened += result["num_tightened"]
        allowed = max(1.0, self._config.capture.max_fault_share * self._plan.expected_samples)
        if summary.capture_faults.total() > allowed:
            raise CaptureFaultError(
                f"{summary.capture_faults.total()} samples had bad hidden states ({summary.listed_faults()}), "
                f"{allowed:g} are allowed (capture.max_fault_share); see {self._log_file(replica.name)}"
            )

    def _check_fit(self, num_more: int) -> None:
        """Before a commit, which cannot be taken back. Raises DoesNotFitError."""
        found = self._num_does_not_fit + num_more
        allowed = max(1.0, self._config.prompts.max_reject_share * self._plan.expected_samples)
        if found > allowed:
            raise DoesNotFitError(
                f"{found} samples may not fit into the host memory for their hidden states, "
                f"{allowed:g} may be rejected for it (prompts.max_reject_share); raise capture.host_memory_gib or "
                "lower sampling.max_tokens"
            )

    def _failed(self, call: _Call, error: RayError) -> None:
        """A call failed. A replica that died, or whose engine did, is ended and replaced within bounds.

        Raises ValueError when the replica refused the configuration: another start would only refuse it again.
        """
        replica, lease = call.replica, call.lease
        if lease is None and isinstance(error, RayTaskError) and isinstance(error.cause, ValueError):
            raise ValueError(f"{replica.name} cannot start: {error.cause}") from error
        lost = error.cause if isinstance(error, RayTaskError) and isinstance(error.cause, EngineLostError) else None
        cause = (str(lost or error).strip().splitlines() or [type(error).__name__])[-1]
        if lease is not None and lost is None and isinstance(error, RayTaskError):
            self._leases.release(lease.unit, f"{replica.name}: {cause}")
            return
        is_first = replica in self._actors
        try:
            if is_first:
                self._actors.remove(replica)
                # Ray kills a replica as well when its node runs out of memory.
                out_of_memory = isinstance(error, OutOfMemoryError) if lost is None else lost.out_of_memory
                self._count_loss(replica, out_of_memory, cause)
            if lease is not None:
                self._release_lost(replica, lease, lost, cause)
            if not is_first:
                return
            self._take_rest(replica)
        finally:
            if is_first:
                self._end(replica)
        if not self._restarts.allow(replica.index, excused=replica.excused):
            raise ReplicaLostError(
                f"{replica.name} was lost after {self._config.replicas.max_restarts} restarts "
                f"(replicas.max_restarts): {cause}; see {self._log_file(replica.name)}"
            ) from error
        self._summary.num_restarts += 1
        self._start(replica.index)

    def _count_loss(self, replica: _Replica, out_of_memory: bool, cause: str) -> None:
        """What a lost replica has cost, and the smaller token budget when it ran out of memory."""
        lost_s = replica.lost_s(time.monotonic())
        self._summary.lost_s += lost_s
        self._summary.lost_device_s += lost_s * num_devices(self._bundle)
        if out_of_memory:
            self._summary.num_out_of_memory += 1
            used = replica.token_budget or (replica.info.max_num_batched_tokens if replica.info else None)
            if used is not None:
                replica.excused = self._budget.halve(used, cause)

    def _release_lost(self, replica: _Replica, lease: Lease, lost: EngineLostError | None, cause: str) -> None:
        """Release a unit of a lost replica. A node's loss is nobody's fault; an engine's death may be a prompt's."""
        if lost is not None and not replica.excused:
            verdict = self._deaths.died(lease.unit, replica.death, lost)
            if verdict is not None:
                self._restarts.explain(verdict.deaths)
                self._summary.num_fatal_prompts += 1
                print(
                    f"rejected row {verdict.row} ({verdict.fatal.reason}): {verdict.fatal.detail}",
                    file=sys.stderr,
                    flush=True,
                )
        self._leases.release(lease.unit, f"{replica.name}: {cause}", counts=False)

    def _take_rest(self, replica: _Replica) -> None:
        """The results of a lost replica's other calls, which come within seconds: units that it had done already, and
        what was in the engine of the others."""
        references = [reference for reference, call in self._calls.items() if call.replica is replica]
        if references:
            ready, _ = ray.wait(references, num_returns=len(references), timeout=STOP_TIMEOUT_S)
            for reference in ready:
                self._take(reference)

    def _end(self, replica: _Replica) -> None:
        """Stop a replica's engine, then its process; a replica that does not answer is killed."""
        # Asking first lets the engine end its worker processes; the kill below is what counts.
        if replica.placed is not None:
            with suppress(RayError):
                ray.get(replica.actor.stop.remote(), timeout=STOP_TIMEOUT_S)
        ray.kill(replica.actor, no_restart=True)

    def _stop_all(self) -> None:
        for replica in self._actors:
            self._end(replica)

    def summarise(self) -> GenerateSummary:
        snapshot = self._dataset.snapshot()
        shards = [file for file in snapshot.files() if file.kind == "shard"]
        summary = self._summary
        summary.version = snapshot.version
        summary.raw_bytes = sum(file.raw_bytes for file in shards)
        summary.stored_bytes = sum(file.size for file in shards)
        summary.state_rows = sum(file.rows for file in shards)
        summary.num_retries = self._leases.num_retries
        summary.rejects = dict(Counter(snapshot.rejects()["reason"].to_pylist()))
        summary.total_s = time.monotonic() - self._began
        return summary
