"""Times in a spec: how long (`6h`), or until when (`07:00` on the wall, or a full date with its offset).

What is said by the wall's clock is resolved once, when the run first starts, like the dates.
"""

from datetime import datetime, timedelta
from typing import Annotated

from pydantic import AfterValidator, Field

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_DURATION = r"[1-9][0-9]*[smhd]"
_CLOCK = r"([01][0-9]|2[0-3]):[0-5][0-9]"
_DATE = r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}(:[0-9]{2}(\.[0-9]+)?)?(Z|[+-][0-9]{2}:[0-9]{2})"


def _is_real(until: str) -> str:
    if is_moment(until):
        try:
            datetime.fromisoformat(until)
        except ValueError as error:
            raise ValueError(f"there is no such date: {error}") from None
    return until


def is_moment(until: str) -> bool:
    """Whether it means the same whenever it is said."""
    return until[-1] not in _SECONDS and not _is_clock(until)


def _is_clock(until: str) -> bool:
    return len(until) == len("07:00") and until[2] == ":"


Duration = Annotated[str, Field(pattern=rf"^{_DURATION}$", examples=["90m", "6h"])]
Until = Annotated[
    str,
    Field(pattern=rf"^({_DURATION}|{_CLOCK}|{_DATE})$", examples=["6h", "07:00"]),
    AfterValidator(_is_real),
]
"""A time from the run's start, a time of day, or a moment."""


def seconds_of(duration: str) -> int:
    """A duration in seconds."""
    return int(duration[:-1]) * _SECONDS[duration[-1]]


def resolve(until: str, now: datetime) -> str:
    """A time of day becomes the next moment at which the wall of `now`'s zone says so; the rest stays.

    Args:
        now: with the time zone whose wall is meant.
    """
    if not _is_clock(until):
        return until
    hour, minute = map(int, until.split(":"))
    moment = now.replace(hour=hour, minute=minute, second=0, microsecond=0)
    if moment <= now:
        # The next day on the wall, which is not always 24 hours later.
        moment = moment.replace(tzinfo=None) + timedelta(days=1)
        moment = moment.replace(tzinfo=now.tzinfo)
    return moment.isoformat()


def moment_of(until: str, started: datetime) -> datetime:
    """When that is, for a run that started at `started`; a time of day must have been resolved."""
    if until[-1] in _SECONDS:
        return started + timedelta(seconds=seconds_of(until))
    return datetime.fromisoformat(until)
