"""Artifacts and archives that are altered, gone, or on a full disk: nothing is lost."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys

import pytest
from sqlalchemy import delete

from rmvdb.registry.tables import ArtifactPartRow
from tests.acceptance.conftest import IDS, NAIVE, TRAINED, everything_is_found
from tests.support.project import Project
from tests.support.refusals import refused
from tests.support.waiting import wait_for_words, wait_until


def test_a_missing_or_altered_artifact_comes_from_the_registry_and_is_named_if_that_lacks_it_too(planned: Project) -> None:
    project = planned
    project.ask(*TRAINED, "--detach")
    artifact = next((project.folder / ".rmvdb" / "artifacts").glob("*.safetensors"))
    whole = artifact.read_bytes()
    damages = (lambda: artifact.write_bytes(whole[:-1] + b"x"), lambda: artifact.unlink())
    for damage in damages:
        damage()
        project.ask("search", "x")
        assert [file.read_bytes() for file in artifact.parent.glob(f"{artifact.stem}.*")] == [whole]
    with project.opened() as opened, opened.registry.engine.begin() as connection:
        connection.execute(delete(ArtifactPartRow))
    (artifact,) = artifact.parent.glob(f"{artifact.stem}.*")
    for damage in damages:
        damage()
        refused(project, "search", "x", code=1, saying=artifact.stem)
        artifact.write_bytes(whole)
    project.ask(*TRAINED)
    everything_is_found(project)


def test_records_of_an_altered_archive_file_are_archived_again_and_nothing_is_lost(project: Project) -> None:
    project.fault(v2={"slow": 0.01})
    first = project.start(*NAIVE, "--sample", "70")
    wait_for_words(first, "backfilling")
    archive = project.folder / ".rmvdb" / "archive"
    wait_until(lambda: list(archive.rglob("*.parquet")))
    first.kill()
    first.communicate()
    project.fault()
    written = next(archive.rglob("*.parquet"))
    written.write_bytes(written.read_bytes()[:-1] + b"x")
    project.ask(*NAIVE)
    everything_is_found(project)
    project.ask("rollback")
    everything_is_found(project)


def test_a_full_disk_while_archiving_stops_the_upgrade_with_nothing_lost(project: Project) -> None:
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-rm", "true"], check=False).returncode:
        pytest.skip("this kernel gives no mount namespace to mount a small tmpfs in")
    archive = project.folder / ".rmvdb" / "archive"
    archive.mkdir(exist_ok=True)
    project.ask(*NAIVE, "--detach")  # the shared Lite process runs outside the namespace
    rmvdb = f"{sys.executable} -m rmvdb"
    upgrade = f"{rmvdb} {' '.join(NAIVE)}; echo ended with $?"
    script = f"""
        mount -t tmpfs -o size=16k tmpfs {archive} && {upgrade}
        {rmvdb} search x --limit 500 --json
        mount -o remount,size=16m {archive} && {upgrade}
    """
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", script],
        cwd=project.folder,
        env=project.environment,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    told = done.stdout + done.stderr
    assert [line for line in told.splitlines() if line.startswith("ended with")] == ["ended with 1", "ended with 0"], told
    assert "the disk is full" in done.stderr
    assert "Traceback" not in done.stderr
    # In between nothing was missing, and nothing was there twice.
    found = re.findall(r'"id": (\d+)', done.stdout)
    assert sorted(map(int, found)) == IDS
    everything_is_found(project)
