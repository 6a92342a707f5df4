"""A plan and a comparison of plans, for people."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rmvdb.cli.output import duration, echo, print_rows
from rmvdb.learning.method import Method
from rmvdb.text import counted, size

if TYPE_CHECKING:
    from rmvdb.planning.plan import Plan


#: A plan that is older than this many seconds is shown with its age.
SHOWN_FROM = 60.0


def print_plan(plan: Plan) -> None:
    """Print a plan: the predicted curve, the measured numbers, the cost."""
    echo(f"plan: method {plan.method}, order {plan.order}, {counted(round(plan.cost['records']), 'record')}")
    if plan.age > SHOWN_FROM:
        echo(f"this plan was made {duration(plan.age)} ago; --again makes a new one")
    if plan.prediction is not None:
        _print_prediction(plan.prediction)
    _print_cost(plan.cost)
    if plan.skipped:
        echo(f"{counted(plan.skipped, 'record')} of the sample could not be embedded; the backfill will quarantine such records")
    _say_unlabelled(plan.unlabelled)


def _print_prediction(prediction: dict[str, Any]) -> None:
    objective = prediction["objective"]
    print_rows(_moments(prediction), as_json=False)
    low, high = (100 * bound for bound in prediction["start"])
    models = f"old {100 * prediction['old']:.2f}, new {100 * prediction['new']:.2f} {objective}"
    echo(f"held out ({_measured(prediction)}): {models}")
    gain = f"gain {_percent(prediction['gain'])} (naive {_percent(prediction['naive_gain'])})"
    echo(f"M_0 - M_old in [{low:+.2f}, {high:+.2f}], {gain}")
    echo(f"{_trained(prediction)}, calibration {'on' if prediction['calibrated'] else 'off'}")
    echo(f"a query until cut-over: {_query_cost(prediction)}")
    if prediction["choice"]:
        echo(f"method: {prediction['choice']}")
    echo(f"{prediction['verdict']}: {prediction['reason']}")
    for warning in prediction["warnings"]:
        echo(f"note: {warning}")


def _moments(prediction: dict[str, Any]) -> list[dict[str, str]]:
    """Return a row for each t: the metric to choose by, mAP and CMC@1 beside it, and the new model's own neighbours."""
    curve, objective, beside = prediction["curve"], prediction["objective"], prediction["neighbours"]
    columns = {objective: prediction["course"], "mAP": curve["map"], "CMC@1": curve["cmc"]}
    columns |= {"new model's nearest": beside["values"]} if beside else {}
    columns |= {f"naive {objective}": prediction["naive_course"]}
    return [
        {"t": f"{t:.1f}", **{name: f"{100 * values[at]:.2f}" for name, values in columns.items()}}
        for at, t in enumerate(curve["ts"])
    ]


def _query_cost(prediction: dict[str, Any]) -> str:
    words = ["one model embeds it", "both models embed it"][prediction["extractions"] - 1]
    if prediction["rescore"]:
        words += f", and the new one up to {prediction['rescore']} records that it finds"
    return words if prediction["method"] == "fct" else f"{words}, and two collections are searched at once"


def _print_cost(cost: dict[str, float]) -> None:
    unknown_duration = ", in an unknown time"
    time_needed = f", about {duration(cost['seconds'])} to embed" if "seconds" in cost else unknown_duration
    copy = f"{size(cost['copy_bytes'])} of a copy of the old ones, " if "copy_bytes" in cost else ""
    echo(f"cost: {size(cost['vector_bytes'])} of new vectors, {copy}{size(cost['archive_bytes'])} of archive{time_needed}")


def print_comparison(comparison: dict[str, Any]) -> None:
    """Print what `Comparison.to_json` returns: each method's best order, every order of the advised method, and the reason."""
    advice, rows = comparison["recommended"], comparison["rows"]
    objective = comparison["objective"]
    print_rows([_compared(row, objective) for row in rows if row["best"]], as_json=False)
    if len(orders := [row for row in rows if row["name"] == advice["method"]]) > 1:
        echo(f"every order of {advice['method']}:")
        print_rows([_compared(row, objective) for row in orders], as_json=False)
    searched = "queries" if comparison["relevance"] == "answers" else "other records"
    searched = "logged queries" if comparison["by_log"] else searched
    relevance = {"labels": "records of the same label", "answers": "their known answers", "neighbours": "the new model's nearest"}
    echo(
        f"trained on {counted(comparison['trained'], 'record')}{_logged(comparison)}, calibrated on {comparison['held_out']}, "
        f"measured by {comparison['evaluated']} {searched} that search for {relevance[comparison['relevance']]}. "
        "Values are percent, with 95 % intervals over these queries. flips: queries that the old model answers right and this "
        "way wrong. embeds: items that a query embeds. finds itself: records that their own item finds first at t = 0. "
        "+K: rescoring K"
    )
    if comparison["skipped"]:
        echo(f"{counted(comparison['skipped'], 'record')} of the sample could not be embedded")
    _say_unlabelled(comparison["unlabelled"])
    way = f"--method {advice['method']} --order {advice['order']} --rescore {advice['rescore']}"
    echo(f"recommended: {way}: {advice['choice']}")
    echo(f"{advice['verdict']}: {advice['reason']}")
    for warning in advice["warnings"]:
        echo(f"note: {warning}")


def _say_unlabelled(count: int) -> None:
    if count:
        what = counted(count, "record of the sample has no label and was", "records of the sample have no label and were")
        echo(f"{what} left out; the backfill moves such records like any other")


def _measured(prediction: dict[str, Any]) -> str:
    match prediction["relevance"]:
        case "answers":
            return f"{counted(prediction['evaluated'], 'query', 'queries')}, their known answers"
        case "labels":
            return f"{counted(prediction['evaluated'], 'record')}, labels"
    what = ("logged query", "logged queries") if prediction.get("by_log") else ("record", "records")
    return f"{counted(prediction['evaluated'], *what)}, neighbours of the new model"


def _trained(prediction: dict[str, Any]) -> str:
    if not Method(prediction["method"]).trains:
        return "nothing is trained"
    return f"trained on {counted(prediction['trained'], 'record')}{_logged(prediction)}"


def _logged(measured: dict[str, Any]) -> str:
    return f" and {counted(measured['logged'], 'logged query', 'logged queries')}" if measured["logged"] else ""


def _name(row: dict[str, Any]) -> str:
    words = str(row["name"]) if row["switch"] is None else f"{row['name']} from t={row['switch']:g}"
    return f"{words} +{row['rescore']}" if row["rescore"] else words


def _compared(row: dict[str, Any], objective: str) -> dict[str, str | None]:
    curve = row["curve"]
    return {
        "": _name(row),
        "order": row["order"],
        **{f"{objective} t={t:g}": _hundred(row["course"][round(10 * t)]) for t in (0, 0.5, 1)},
        "AUC mAP": f"{_hundred(curve['auc_map'])} ({_hundred(row['auc_map'][0])}–{_hundred(row['auc_map'][1])})",
        "AUC CMC": f"{_hundred(curve['auc_cmc'])} ({_hundred(row['auc_cmc'][0])}–{_hundred(row['auc_cmc'][1])})",
        "finds itself": _hundred(row["self_found"]["values"][0]) if row["self_found"] else None,
        "embeds": str(row["extractions"] + row["rescore"]),
        "gain": _percent(row["gain"]),
        "fall": _hundred(row["fall"]),
        "flips": _hundred(max((each for each in row["negative_flips"] if each is not None), default=None)),
        "verdict": row["verdict"],
    }


def _hundred(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.1f}"


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{round(100 * share)} %"
