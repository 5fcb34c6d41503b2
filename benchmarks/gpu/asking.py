"""Asks one release as before it is published. `python -m benchmarks.gpu.asking JOB.json` in the serving environment."""

import json
import sys
from pathlib import Path

from benchmarks.gpu.engine import FLAGS, arguments
from tasks.weights.trying import Job, try_release

if __name__ == "__main__":
    job = Job(**json.loads(Path(sys.argv[1]).read_text()))
    Path(job.report).write_text(json.dumps(try_release(job, **arguments(FLAGS))))
