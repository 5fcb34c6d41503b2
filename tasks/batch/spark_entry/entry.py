"""What spark-submit is given. Alone in its folder, because Spark puts that first on sys.path."""

import sys

from tasks.batch.spark_driver import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
