"""The generate job as a user runs it: real Ray, real vLLM, awkward prompts, a killed engine, a second run."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from command_line import finish, headrace, start, write_config, write_rows

from storage import Dataset
from storage.reader import SampleReader

ROWS: list[Any] = [
    {"id": "sum", "messages": [{"role": "user", "content": "What is 17 + 25?"}]},
    {"id": "turns", "turns": ["Name a colour.", "Name another one.", "Which of them is darker?"]},
    '{"id": "cut',
    {"id": "empty", "prompt": "  "},
    {"id": "sum", "prompt": "The id is taken."},
    "",
    {"id": "category", "prompt": "Why is the sky blue?", "category": "science"},
    {"id": "long", "prompt": "word " * 2000},
    {"prompt": "No id at all."},
]


@dataclass(frozen=True)
class Job:
    config: Path
    folder: Path
    dataset: Path

    def run(self, *overrides: str) -> Any:
        return headrace("generate", str(self.config), *overrides, "--json", "--run-dir", "run", cwd=self.folder)


def make_job(folder: Path, verifier_dir: Path, rows: list[Any], capture_mode: str = "one_pass", **sampling: Any) -> Job:
    prompts = write_rows(folder / "prompts.jsonl", rows)
    config = write_config(
        folder / "generate.yaml",
        {
            "verifier": {"model": str(verifier_dir), "max_model_len": 512},
            "prompts": {"source": str(prompts), "max_reject_share": 0.6},
            "sampling": {"max_tokens": 24, "temperature": 0.0, **sampling},
            "capture": {"mode": capture_mode},
            "dataset": {"uri": str(folder / "dataset"), "unit_bytes": 700_000},
            "replicas": {"count": 1, "max_num_seqs": 8, "max_num_batched_tokens": 256, "kv_cache_gib": 1}
            | {"enforce_eager": True, "units_in_flight": 2},
        },
    )
    return Job(config, folder, folder / "dataset")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, verifier_dir: Path) -> tuple[Job, Any]:
    job = make_job(tmp_path_factory.mktemp("generate"), verifier_dir, ROWS, capture_mode="auto", n=2)
    outcome = job.run()
    return job, outcome.json()


def test_every_row_ends_as_a_sample_or_a_reject(finished: tuple[Job, Any]) -> None:
    job, summary = finished
    snapshot = Dataset.open(job.dataset).snapshot()
    samples = snapshot.samples(columns=["row", "turn", "n", "prompt_id", "category"]).to_pylist()
    keys = {(sample["row"], sample["turn"], sample["n"]) for sample in samples}
    answered = [(0, 0), (1, 0), (1, 1), (1, 2), (6, 0), (8, 0)]
    assert keys == {(row, turn, n) for row, turn in answered for n in (0, 1)}
    assert {sample["category"] for sample in samples if sample["row"] == 6} == {"science"}
    rejects = {(reject["row"], reject["n"]): reject["reason"] for reject in snapshot.rejects().to_pylist()}
    reasons = {2: "not_json", 3: "empty_prompt", 4: "duplicate_id", 7: "too_long"}
    assert rejects == {(row, n): reason for row, reason in reasons.items() for n in (0, 1)}
    accounting = snapshot.accounting()
    assert (accounting.expected, accounting.samples, accounting.rejects) == (20, 12, 8)
    assert snapshot.is_complete
    assert summary["num_samples"] == 12
    assert summary["rejects"] == dict.fromkeys(reasons.values(), 2)


def test_states_tokens_and_spans_fit(finished: tuple[Job, Any], verifier_dir: Path) -> None:
    from gen.chat import ChatTokenizer

    job, _ = finished
    snapshot = Dataset.open(job.dataset).snapshot()
    assert snapshot.dataset.identity.states.layer_ids == (2, 15, 27, 30)
    chat = ChatTokenizer.from_directory(verifier_dir)
    samples = {(s["row"], s["turn"], s["n"]): s for s in snapshot.samples().to_pylist()}
    for loaded in SampleReader(snapshot):
        sample = samples[tuple(loaded.key)]
        assert loaded.states_TLH.shape == (len(sample["token_ids"]) - 1, 4, 576)
        assert loaded.loss_mask.sum() == sample["num_output_tokens"]
        assert sample["num_tokens"] == sample["num_prompt_tokens"] + sample["num_output_tokens"]
        assert not loaded.loss_mask[: sample["num_prompt_tokens"]].any()
    first = samples[0, 0, 0]
    assert first["token_ids"][: first["num_prompt_tokens"]] == chat.prompt_ids(ROWS[0]["messages"])
    messages = [{"role": "user", "content": ROWS[1]["turns"][0]}]
    messages += [{"role": "assistant", "content": samples[1, 0, 0]["text"]}]
    messages += [{"role": "user", "content": ROWS[1]["turns"][1]}]
    second = samples[1, 1, 0]
    assert second["token_ids"][: second["num_prompt_tokens"]] == chat.prompt_ids(messages)


def test_running_again_changes_nothing(finished: tuple[Job, Any]) -> None:
    job, summary = finished
    before = sorted(path.name for path in job.dataset.rglob("*") if path.is_file())
    again = job.run().json()
    assert again["num_units"] == 0
    assert again["version"] == summary["version"]
    assert sorted(path.name for path in job.dataset.rglob("*") if path.is_file()) == before


def test_another_configuration_is_refused_by_field(finished: tuple[Job, Any]) -> None:
    job, _ = finished
    outcome = job.run("sampling.temperature=0.5", "sampling.seed=9")
    assert outcome.code == 2
    assert "sampling.temperature" in outcome.stderr
    assert "sampling.seed" in outcome.stderr


def test_too_many_bad_rows_stop_before_a_model_is_loaded(finished: tuple[Job, Any]) -> None:
    job, _ = finished
    started = time.monotonic()
    outcome = job.run("prompts.max_reject_share=0.05", "dataset.uri=other")
    assert outcome.code == 2
    assert "4 of 8 rows (50.0%)" in outcome.stderr
    assert "max_reject_share" in outcome.stderr
    assert not (job.folder / "other").exists()
    assert "loading the verifier" not in outcome.stderr
    assert time.monotonic() - started < 120


def test_extract_mode_stores_given_answers(tmp_path: Path, verifier_dir: Path, finished: tuple[Job, Any]) -> None:
    """States of a generated answer are the same when the conversation is read back as given."""
    job, _ = finished
    generated = Dataset.open(job.dataset).snapshot()
    [sample] = [s for s in generated.samples().to_pylist() if (s["row"], s["turn"], s["n"]) == (6, 0, 0)]
    answer = {"role": "assistant", "content": sample["text"]}
    question = {"role": "user", "content": ROWS[6]["prompt"]}
    extract = make_job(tmp_path, verifier_dir, [{"id": "given", "messages": [question, answer]}])
    summary = extract.run("prompts.mode=extract").json()
    assert summary["num_samples"] == 1
    snapshot = Dataset.open(extract.dataset).snapshot()
    [read_back] = snapshot.samples().to_pylist()
    assert read_back["finish_reason"] == "given"
    assert read_back["num_prompt_tokens"] == sample["num_prompt_tokens"]
    # The generated answer was cut at max_tokens, so the given one has the end-of-turn token behind the same tokens.
    assert read_back["token_ids"][: sample["num_tokens"]] == sample["token_ids"]


def test_a_killed_engine_loses_nothing(tmp_path: Path, verifier_dir: Path) -> None:
    rows = [{"id": f"p{i}", "prompt": f"Count from {i} to {i + 5} in words."} for i in range(24)]
    job = make_job(tmp_path, verifier_dir, rows, max_tokens=48)
    process = start("generate", str(job.config), "--json", "--run-dir", "run", cwd=tmp_path)
    killed = _kill_engine_after_first_commit(process.pid, job.dataset)
    summary = finish(process).json()
    assert killed
    assert summary["num_restarts"] == 1
    snapshot = Dataset.open(job.dataset).snapshot()
    assert snapshot.is_complete
    samples = snapshot.samples(columns=["row"])["row"].to_pylist()
    assert sorted(samples) == list(range(24))
    verify = headrace("verify", str(job.dataset), "--deep", "--json", cwd=tmp_path)
    assert verify.code == 0, verify.stdout


def _kill_engine_after_first_commit(pid: int, dataset: Path) -> bool:
    """SIGKILL the job's engine once a unit is committed and others are not; False when it was too late."""
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline and psutil.pid_exists(pid):
        if any((dataset / "samples").glob("*.parquet")):
            for process in psutil.Process(pid).children(recursive=True):
                if "VLLM::" in " ".join([process.name(), *process.cmdline()]):
                    process.kill()
                    return True
        time.sleep(0.05)
    return False


def test_a_job_whose_samples_do_not_fit_into_memory_stops_before_it_commits_their_loss(
    tmp_path: Path, verifier_dir: Path
) -> None:
    rows = [{"id": f"p{i}", "prompt": "Hello."} for i in range(4)]
    job = make_job(tmp_path, verifier_dir, rows)
    outcome = job.run("capture.host_memory_gib=0.0001", "prompts.max_reject_share=0.1")
    assert outcome.code == 1, outcome.stderr[-3000:]
    assert "samples may not fit into the host memory for their hidden states, 1 may be rejected" in outcome.stderr
    assert "capture.host_memory_gib" in outcome.stderr
    accounting = Dataset.open(job.dataset).snapshot().accounting()
    assert (accounting.samples, accounting.rejects) == (0, 0)
    assert job.run().json()["num_samples"] == 4
