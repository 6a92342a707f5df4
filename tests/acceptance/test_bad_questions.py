"""Upgrades that cannot be begun, or not as they are asked for: one sentence names the value and the way out."""

from __future__ import annotations

from tests.acceptance.conftest import NAIVE
from tests.support.project import Project
from tests.support.refusals import refused
from tests.support.waiting import wait_for_words


def test_an_unknown_version_is_named_with_the_nearest_one(project: Project) -> None:
    refused(
        project,
        *("upgrade", "--from", "v1", "--to", "v22"),
        code=2,
        saying="No model version is called 'v22'; did you mean 'v2'?",
        process=True,
    )


def test_a_version_cannot_be_upgraded_to_itself(project: Project) -> None:
    refused(project, "upgrade", "--from", "v1", "--to", "v1", code=2, saying="--from and --to both say 'v1'")


def test_a_gallery_of_another_version_is_named(project: Project) -> None:
    project.ask("model", "add", "v3", "--embedder", "models:v3")
    refused(project, "upgrade", "--from", "v3", "--to", "v2", code=2, saying="holds vectors of 'v1', not of 'v3'; use --from v1")


def test_a_third_version_waits_until_there_are_records_of_the_second(project: Project) -> None:
    project.ask("model", "add", "v3", "--embedder", "models:v3")
    project.ask(*NAIVE, "--detach")
    third = ("upgrade", "--from", "v1", "--to", "v3")
    refused(project, *third, code=1, saying="holds 0 records of v2, and a plan needs 60 or more")
    refused(project, *third, "--method", "naive", code=1, saying="holds 0 records of v2, and a plan needs 1 or more")
    refused(project, "upgrade", "--from", "v2", "--to", "v1", code=2, saying="of 'v1' already; name another version by --to")
    assert project.json("status")["upgrade"] == 1


def test_a_third_version_waits_for_the_end_of_a_roll_back_and_for_clean_up(project: Project) -> None:
    project.ask("model", "add", "v3", "--embedder", "models:v3")
    project.ask(*NAIVE)
    third = ("upgrade", "--from", "v2", "--to", "v3", "--method", "naive")
    refused(project, *third, code=2, saying="is in an upgrade from v1 to v2 (cut over); end it first: rmvdb cleanup")
    project.ask("rollback")
    refused(project, *third, code=2, saying="is in a roll back from v2 to v1 (cut over); end it first: rmvdb cleanup")


def test_a_field_of_labels_that_no_record_has_is_named_before_anything_is_embedded(project: Project) -> None:
    plan = ("plan", "--from", "v1", "--to", "v2", "--labels", "lable")
    refused(project, *plan, code=2, saying="No field of the records is called 'lable'; did you mean 'label'?")
    assert [each for each in project.calls("v2") if each != "probe"] == []


def test_two_commands_do_not_conduct_the_same_upgrade(project: Project) -> None:
    project.fault(v2={"slow": 0.06})
    first = project.start(*NAIVE, "--sample", "70")
    try:
        wait_for_words(first, "backfilling")
        refused(project, *NAIVE, code=2, saying="works on this upgrade; watch it with rmvdb status --watch")
    finally:
        first.terminate()
        first.communicate(timeout=60)


def test_an_upgrade_that_goes_on_is_not_said_to_be_what_it_was_not_begun_as(project: Project) -> None:
    begun = tuple(word for word in NAIVE if word not in ("--labels", "label"))
    project.ask(*begun, "--until", "0.5")
    for option in (("--instant-rollback",), ("--labels", "label"), ("--paper",)):
        refused(
            project, *begun, *option, code=2, saying=f"Upgrade 1 began without {option[0]}; leave {option[0]} out to resume it"
        )
    for option in (("--sample", "70"), ("--seed", "3")):
        refused(
            project,
            *begun,
            *option,
            code=2,
            saying=f"Upgrade 1 began with another value of {option[0]}; leave {option[0]} out to resume it",
        )
    project.ask(*begun, "--until", "0.5", "--seed", "0")
    assert project.json("status")["done"] == 200
    project.ask(*begun)


def test_an_upgrade_that_would_lower_the_quality_is_not_begun(project: Project) -> None:
    project.ask("model", "add", "stranger", "--embedder", "models:stranger")
    models = project.folder / "models.py"  # without v1 queries cannot be embedded by both models until one is enough
    models.write_text(models.read_text().replace("def v1():", "def gone():"))
    worse = (
        "--from",
        "v1",
        "--to",
        "stranger",
        "--labels",
        "label",
        "--method",
        "identity",
        "--order",
        "random",
        "--rescore",
        "0",
    )
    assert project.json("plan", *worse)["prediction"]["verdict"] == "refuse"
    refused(project, "upgrade", *worse, code=1, saying="identity would start below")
    status = project.json("status")
    assert (status["upgrade"], status["epoch"]) == (None, 1)
