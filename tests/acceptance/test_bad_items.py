"""Items that cannot be embedded, and sources without items: they are set aside or named, and no record is lost."""

from __future__ import annotations

from tests.acceptance.conftest import IDS, NAIVE, everything_is_found
from tests.support.project import Project
from tests.support.refusals import refused


def test_records_without_a_label_are_left_out_of_the_sample_and_counted_and_upgraded_like_any_other(project: Project) -> None:
    models = project.models()
    with project.client() as client:
        client.upsert([{"id": id, "item": models.item(id)} for id in range(1, 41)])
    found = project.json("plan", *NAIVE[1:])
    parts = ("trained", "held_out", "evaluated")
    assert (found["unlabelled"], sum(found["prediction"][part] for part in parts)) == (40, 360)
    assert "40 records of the sample have no label and were left out" in project.ask("plan", *NAIVE[1:]).stdout
    project.ask(*NAIVE)
    everything_is_found(project)


def test_one_item_that_cannot_be_embedded_is_set_aside_and_the_others_go_on(project: Project) -> None:
    project.fault(v2={"raise": ["7"], "nan": ["9"]}, missing=[11])
    refused(project, *NAIVE, code=1, saying="3 records are quarantined")
    aside = {each["id"]: each["reason"] for each in project.json("quarantine", "list")}
    assert aside == {
        "7": "ValueError: cannot decode item 7",
        "9": "the embedder gives NaN or infinity for it",
        "11": "the source has no item of this id",
    }
    assert project.json("status")["done"] == 397
    everything_is_found(project)
    refused(project, "cutover", code=1, saying="quarantined")
    assert "3 records are quarantined" in project.json("status")["stopped"]
    project.fault(v2={"raise": ["7"]})
    project.ask("quarantine", "retry")
    assert not project.json("status")["stopped"]
    refused(project, *NAIVE, code=1, saying="1 record is quarantined")
    refused(project, "quarantine", "drop", "77", code=2, saying="No quarantined record is called '77'; quarantined are 7: rmvdb")
    project.ask("quarantine", "drop", "7", "--yes")
    assert not project.json("status")["stopped"]
    project.ask(*NAIVE)
    everything_is_found(project, missing=1)


def test_an_upgrade_that_stops_short_of_its_cut_over_tells_of_quarantined_records_by_its_exit_code(project: Project) -> None:
    project.fault(v2={"raise": ["7"]})
    refused(project, *NAIVE, "--no-cutover", code=1, saying="1 record is quarantined, and findable in the old collection")
    project.fault()
    project.ask("quarantine", "retry")
    project.ask(*NAIVE, "--no-cutover")


def test_a_record_that_was_written_since_its_quarantine_is_not_dropped(project: Project) -> None:
    project.fault(v2={"raise": ["7", "9"]})
    refused(project, *NAIVE, code=1, saying="2 records are quarantined")
    project.fault()
    with project.client() as client:
        client.upsert([{"id": 7, "item": project.models().item(7), "label": 3}])
    said = project.ask("quarantine", "drop", "--yes").stdout
    assert said == "1 record is deleted; 1 record was written since, and left\n"
    project.ask(*NAIVE)
    everything_is_found(project, missing=1)
    with project.client() as client:
        assert [record.id for record in client.get([7, 9])] == [7]


def test_several_bad_items_are_set_aside_where_all_others_are_embedded_already(project: Project) -> None:
    """Only they are asked for then, and all that are asked for fail: that is no broken source, and no broken model."""
    project.fault(v2={"raise": ["7", "9"]}, missing=[11, 12])
    project.ask("simulate", "--from", "v1", "--to", "v2", "--methods", "naive", "--orders", "random")
    refused(project, *NAIVE, code=1, saying="4 records are quarantined")
    project.fault()
    project.ask("quarantine", "retry")
    project.fault(missing=[11, 12])  # now a batch of their own
    refused(project, *NAIVE, code=1, saying="2 records are quarantined")
    project.fault()
    project.ask("quarantine", "retry")
    project.ask(*NAIVE)
    everything_is_found(project)


def test_a_source_that_knows_nothing_stops_the_upgrade(project: Project) -> None:
    project.fault(missing=IDS)
    refused(project, *NAIVE, code=1, saying="has no item for any of 400 records, such as ", process=True)


def test_a_source_that_forgot_everything_since_stops_the_backfill_and_sets_no_record_aside(project: Project) -> None:
    project.ask(*NAIVE, "--sample", "80", "--detach")
    project.fault(missing=IDS)
    refused(project, *NAIVE, code=1, saying="Repair the source (rmvdb gallery show names it), then run the same command again")
    assert project.json("status")["quarantined"] == 0
    project.fault()
    project.ask(*NAIVE)
    everything_is_found(project)
