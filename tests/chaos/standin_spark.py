"""A stand-in for spark-submit: the driver's work without Spark's, whose JVM takes most of what a small run takes."""

import sys

from tasks import settings as deployment
from tasks.batch import spark_driver
from tasks.ledger import Claim, Ledger
from tests.batch.without_spark import answer_without_spark


def main() -> None:
    """As spark-submit is called: its own options and the application, then the driver's arguments."""
    print("this is a stand-in for spark-submit", file=sys.stderr, flush=True)
    options = spark_driver.parser().parse_args(sys.argv[sys.argv.index("--run") :])
    assert options.stage == "run", "this stand-in only answers"
    settings = deployment.current()
    with Ledger(settings.database_url(), settings.sql) as ledger:
        answer_without_spark(Claim(ledger, options.run, options.stage, options.epoch), settings, every_s=1.0)


if __name__ == "__main__":
    main()
