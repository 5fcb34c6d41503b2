"""One Spark application to submit, in a form that Airflow's operator and the command line share."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class SparkSubmission:
    """What spark-submit is given. Secrets are not in it: `conf` and `arguments` show in Spark's UI."""

    name: str
    binary: Path
    """spark-submit of the Spark environment."""
    application: Path
    arguments: tuple[str, ...]
    conf: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    """The whole environment of spark-submit and what it starts, made from a list."""
    log: Path = Path("/dev/null")
    """Where the output of a submission from the command line goes."""
