"""Progress goes to stderr, as lines where it is no terminal, and says when a stage failed."""

from __future__ import annotations

import time

import pytest

from ray_jobs import progress


def test_lines_name_the_stage_its_state_and_its_end(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "LINE_INTERVAL_S", 0.0)
    with progress.stage("generating", 4) as stage:
        stage.update(1, note="units; 12 tokens/s")
    output = capsys.readouterr()
    assert output.out == ""
    lines = output.err.splitlines()
    assert lines[0] == "generating ..."
    assert lines[1] == "generating: 1 of 4 units; 12 tokens/s [0 s]"
    assert lines[2].startswith("generating: done")


def test_a_failed_stage_does_not_claim_to_be_done(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RuntimeError, match="disk"), progress.stage("storing"):
        raise RuntimeError("disk full")
    assert "storing: failed" in capsys.readouterr().err


def test_lines_are_rare(capsys: pytest.CaptureFixture[str]) -> None:
    with progress.stage("reading", None) as stage:
        for index in range(1000):
            stage.update(index)
    assert len(capsys.readouterr().err.splitlines()) == 2


def test_ticking_keeps_a_blocking_call_visible(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "LINE_INTERVAL_S", 0.0)
    with progress.stage("loading") as stage, progress.ticking(stage, interval_s=0.01):
        time.sleep(0.1)
    lines = capsys.readouterr().err.splitlines()
    assert "loading:  [0 s]" in lines
    assert lines[-1] == "loading: done  [0 s]"
