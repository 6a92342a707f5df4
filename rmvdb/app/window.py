"""The hours in which a worker may work, from a cron expression."""

from __future__ import annotations

import datetime as dt

from croniter import croniter
from tzlocal import get_localzone

from rmvdb import errors

HOUR = dt.timedelta(hours=1)


class Window:
    """One hour from each firing of a cron expression: `0 1-6 * * *` is 01:00 to 07:00 by this machine's clock on the wall.

    Raises UsageError if the expression cannot be read, or never fires, or if this machine's time zone is not known.
    """

    def __init__(self, expression: str | None) -> None:
        self.expression = expression
        self.zone: dt.tzinfo = dt.UTC
        try:
            if expression:
                self.zone = _zone()
                self._next_firing(expression, after=dt.datetime.now(self.zone))
        except ValueError as exc:
            raise errors.UsageError(
                f"--window {expression!r} is not a cron expression ({exc}); for nights write '0 1-6 * * *' (01:00 to 07:00)"
            ) from exc

    def is_open(self, now: dt.datetime | None = None) -> bool:
        """Return whether a worker may work now."""
        if not self.expression:
            return True
        # In UTC: the hours of a day on which clocks are set are not an hour apart by the clock on the wall.
        now = (now or dt.datetime.now(dt.UTC)).astimezone(dt.UTC)
        return self._next_firing(self.expression, after=(now - HOUR).astimezone(self.zone)).astimezone(dt.UTC) <= now

    @staticmethod
    def _next_firing(expression: str, *, after: dt.datetime) -> dt.datetime:
        if len(fields := expression.split()) != 5:  # croniter also reads seconds and years
            raise ValueError(f"it has {len(fields)} fields, not 5")
        fired: dt.datetime = croniter(expression, after).get_next(dt.datetime)
        return fired


def _zone() -> dt.tzinfo:
    try:
        return get_localzone()
    except (KeyError, ValueError, OSError) as exc:
        raise errors.UsageError(
            f"The time zone of this machine cannot be read, so --window has no clock ({exc}); "
            "set TZ to a name such as Europe/Berlin, or install tzdata"
        ) from exc
