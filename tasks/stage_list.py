"""What a run consists of: its stages in their order, and what each one fences off.

DAG files import this and nothing of what it takes to execute a stage: they are parsed again and again.

    preflight - download - convert ----.
        `------ prepare ---------------+- provision - start - run - reconcile - publish
                                                                `- stop - restore
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Stage:
    """One step of a run."""

    name: str
    module: str
    """Imported when the stage is executed, so that a DAG file pays for none of them."""
    lane: str
    """Stages of one lane of one run never act at once on a node: they share a node lock."""
    fences: frozenset[str]
    """Whose claims end when this stage is claimed: its own, and those of stages that are over by then."""
    says: str
    on_the_node: bool = False
    """Whether it acts on the node of the run spec: on its devices, its disk, its processes."""
    brings_up: bool = False
    """Whether the devices that the run has leased are of no use until it succeeds."""


ON_THE_NODE = frozenset(
    [
        "freeze",
        "preflight",
        "download",
        "convert",
        "provision",
        "start",
        "keep",
        "stop",
        "restore",
    ]
)
"""Tasks of a run that act on its node. Two are no stages: what freezes a run reads folders, texts and releases of the
node; `keep` looks, and provisions and starts again."""

_BRINGS_UP = frozenset(["provision", "start"])


def _stage(name: str, module: str, lane: str, fences: str, says: str) -> Stage:
    all_fences = frozenset([name, *fences.split()])
    return Stage(name, f"tasks.{module}", lane, all_fences, says, name in ON_THE_NODE, name in _BRINGS_UP)


# fmt: off
STAGES = {
    stage.name: stage
    for stage in (
        _stage("preflight", "preflight", "preflight", "",
               "Check node, environments, disk, model and input."),
        _stage("download", "weights.download", "weights", "preflight",
               "Fetch the weights, every file hashed."),
        _stage("convert", "weights.convert", "weights", "download",
               "Make the release: converted, verified, whole."),
        _stage("prepare", "batch.prepare", "batch", "preflight",
               "Read the input: ids, columns, what is answered."),
        _stage("provision", "gpu.provision", "devices", "download convert prepare",
               "Lease devices and lay them out."),
        _stage("start", "serving.start", "devices", "provision",
               "Start the pool of workers and prove their health."),
        _stage("run", "batch.run", "answers", "start",
               "Send the rows that are still to do, by Spark."),
        _stage("reconcile", "batch.reconcile", "answers", "run",
               "Prove: input = answered + failed + not started."),
        _stage("publish", "batch.publish", "answers", "reconcile",
               "Make the answers visible, all at once."),
        _stage("stop", "serving.stop", "devices", "start keeper run",
               "End the pool; verify nothing is left."),
        _stage("restore", "gpu.restore", "devices", "provision stop",
               "Layout as it was before; end the lease."),
    )
}
# fmt: on
