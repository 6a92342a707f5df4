"""A plan and a comparison of plans, for people."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rmvdb.cli.output import duration, echo, print_rows
from rmvdb.learning.method import Method
from rmvdb.text import counted

if TYPE_CHECKING:
    from rmvdb.planning.plan import Plan


def print_plan(plan: Plan) -> None:
    """Print a plan: the predicted curve, the measured numbers, the cost."""
    echo(f"plan: method {plan.method}, order {plan.order}, {counted(round(plan.cost['records']), 'record')}")
    if plan.prediction is not None:
        _print_prediction(plan.prediction)
    _print_cost(plan.cost)
    if plan.skipped:
        echo(f"{counted(plan.skipped, 'record')} of the sample could not be embedded; the backfill will quarantine such records")
    _say_unlabelled(plan.unlabelled)


def _print_prediction(prediction: dict[str, Any]) -> None:
    curve, naive = prediction["curve"], prediction["naive"]
    rows = [
        {"t": f"{t:.1f}", "mAP": f"{100 * a:.2f}", "CMC@1": f"{100 * b:.2f}", "naive mAP": f"{100 * c:.2f}"}
        for t, a, b, c in zip(curve["ts"], curve["map"], curve["cmc"], naive["map"], strict=True)
    ]
    print_rows(rows, as_json=False)
    low, high = (100 * bound for bound in prediction["start"])
    echo(
        f"held out ({_measured(prediction)}): "
        f"old {100 * prediction['map_old']:.2f}, new {100 * prediction['map_new']:.2f} mAP; "
        f"M_0 - M_old in [{low:+.2f}, {high:+.2f}]; gain {_percent(curve['gain'])} (naive {_percent(naive['gain'])}); "
        f"calibration {'on' if prediction['calibrated'] else 'off'}; {_trained(prediction)}"
    )
    if prediction["choice"]:
        echo(f"method: {prediction['choice']}")
    echo(f"{prediction['verdict']}: {prediction['reason']}")


def _print_cost(cost: dict[str, float]) -> None:
    unknown_duration = "; how long it takes is not known"
    time_needed = f", about {duration(cost['seconds'])} to embed" if "seconds" in cost else unknown_duration
    copy = f"{_size(cost['copy_bytes'])} of a copy of the old ones, " if "copy_bytes" in cost else ""
    echo(f"cost: {_size(cost['vector_bytes'])} of new vectors, {copy}{_size(cost['archive_bytes'])} of archive{time_needed}")


def print_comparison(comparison: dict[str, Any]) -> None:
    """Print what `Comparison.to_json` returns: each method's best order, every order of the advised method, and the reason."""
    advice, rows = comparison["recommended"], comparison["rows"]
    print_rows([_compared(row) for row in rows if row["best"]], as_json=False)
    if len(orders := [row for row in rows if row["name"] == advice["method"]]) > 1:
        echo(f"every order of {advice['method']}:")
        print_rows([_compared(row) for row in orders], as_json=False)
    searched = "queries" if comparison["relevance"] == "answers" else "others"
    relevance = {"labels": "records of the same label", "answers": "their known answers", "neighbours": "the new model's nearest"}
    echo(
        f"{counted(comparison['trained'], 'record')}{_logged(comparison)} trained on, {comparison['held_out']} calibrated on; "
        f"{comparison['evaluated']} {searched} searched for {relevance[comparison['relevance']]}; "
        "percent, 95 % intervals over these queries; flips: right by the old model, wrong then"
    )
    if comparison["skipped"]:
        echo(f"{counted(comparison['skipped'], 'record')} of the sample could not be embedded")
    _say_unlabelled(comparison["unlabelled"])
    echo(f"recommended: --method {advice['method']} --order {advice['order']}: {advice['choice']}")
    echo(f"{advice['verdict']}: {advice['reason']}")


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
    return f"{counted(prediction['evaluated'], 'record')}, neighbours of the new model"


def _trained(prediction: dict[str, Any]) -> str:
    if not Method(prediction["method"]).trains:
        return "nothing is trained"
    return f"{counted(prediction['trained'], 'record')}{_logged(prediction)} trained on"


def _logged(measured: dict[str, Any]) -> str:
    return f" and {counted(measured['logged'], 'logged query', 'logged queries')}" if measured["logged"] else ""


def _compared(row: dict[str, Any]) -> dict[str, str | None]:
    curve = row["curve"]
    return {
        "": row["name"] if row["switch"] is None else f"{row['name']} from t={row['switch']:g}",
        "order": row["order"],
        **{f"mAP t={t:g}": _hundred(curve["map"][round(10 * t)]) for t in (0, 0.5, 1)},
        "AUC mAP": f"{_hundred(curve['auc_map'])} ({_hundred(row['auc_map'][0])}–{_hundred(row['auc_map'][1])})",
        "AUC CMC": f"{_hundred(curve['auc_cmc'])} ({_hundred(row['auc_cmc'][0])}–{_hundred(row['auc_cmc'][1])})",
        "CMC@5 t=0": _hundred(curve["cmc5"][0]),
        "recall@10 t=0": _hundred(curve["recall"][0]),
        "gain": _percent(curve["gain"]),
        "fall": _hundred(curve["largest_fall"]),
        "flips": _hundred(max((each for each in row["negative_flips"] if each is not None), default=None)),
        "verdict": row["verdict"],
    }


def _hundred(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.1f}"


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{round(100 * share)} %"


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
