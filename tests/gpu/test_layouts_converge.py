"""Any sequence of layouts over any start, with a fault at any call: applied, as before, or partial and recorded.

The driver is simulated, the ledger's records are kept in memory; all between them is the code that stages run.
GPU_EXAMPLES in the environment of the tests makes it longer.
"""

import os
import shutil
import tempfile
from collections import Counter
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace

import pynvml
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tasks.errors import Busy, InputError, StageError
from tasks.gpu import change, cutting, inventory, nvml, planner
from tasks.gpu.demand import Taken
from tasks.gpu.layouts import spot_of
from tasks.gpu.record import Record
from tasks.gpu.simulated import control
from tests.gpu.node import a_node

EXAMPLES = int(os.environ.get("GPU_EXAMPLES", "25"))
CODES = (pynvml.NVML_ERROR_UNKNOWN, pynvml.NVML_ERROR_IN_USE, pynvml.NVML_ERROR_INSUFFICIENT_RESOURCES)

profiles = st.sampled_from(["1g.10gb", "1g.20gb", "2g.20gb", "3g.40gb", "4g.40gb", "7g.80gb", "1g.10gb+me"])
fitting = st.sampled_from(
    [
        {"1g.10gb": 7},
        {"1g.10gb": 2},
        {"2g.20gb": 3},
        {"2g.20gb": 1, "1g.10gb": 1},
        {"3g.40gb": 1},
        {"3g.40gb": 1, "1g.10gb": 2},
        {"3g.40gb": 1, "2g.20gb": 1, "1g.10gb": 1},
        {"4g.40gb": 1, "1g.20gb": 1},
        {"7g.80gb": 1},
    ]
)
wishes = st.one_of(fitting, st.dictionaries(profiles, st.integers(1, 3), min_size=1, max_size=3))
places = st.lists(st.tuples(profiles, st.integers(0, 6)), max_size=4)
in_any_call = st.tuples(st.just(False), st.integers(1, 220), st.sampled_from(CODES), st.integers(1, 4))
in_a_change = st.tuples(st.just(True), st.integers(1, 10), st.sampled_from(CODES), st.integers(1, 6))
faults = st.one_of(st.none(), in_a_change, in_a_change, in_any_call)


def put_where_it_fits(node, wanted):
    """Somebody's instances; what does not fit is left out."""
    for name, start in wanted:
        known = next(each for each in node.gpu().cut.profiles if each.name == name)
        if any(place.start == start for place in known.placements):
            node.put(0, (name, start))


@pytest.fixture(scope="module")
def folder():
    made = Path(tempfile.mkdtemp())
    yield made
    shutil.rmtree(made)


class Records:
    """What `tasks.gpu.record` keeps in the ledger."""

    def __init__(self):
        self.kept = {}

    def read(self, _ledger, _lease_id):
        return dict(self.kept)

    def write(self, _claim, _lease_id, boot_id, gpus, choices):
        for gpu in gpus:
            old = self.kept.get(gpu.uuid)
            if old is None or old.boot_id != boot_id or old.restored:
                choice = choices[gpu.uuid]
                before, replaced = change.layout_of(gpu), tuple(map(spot_of, choice.destroy))
                self.kept[gpu.uuid] = Record(gpu.uuid, boot_id, before, choice.layout, replaced)

    def put_restored(self, _claim, _lease_id, missing):
        for uuid, lines in missing.items():
            self.kept[uuid] = replace(self.kept[uuid], restored=not lines, missing=tuple(lines))


class Layouts(RuleBasedStateMachine):
    """One GPU, one lease at a time, and other people."""

    def __init__(self, folder, monkeypatch, seen):
        super().__init__()
        self.seen = seen
        self.folder = Path(tempfile.mkdtemp(dir=folder))
        self.records = Records()
        for name in ("read", "write", "put_restored"):
            monkeypatch.setattr(cutting.record, name, getattr(self.records, name))
        self.lease = SimpleNamespace(lease_id=1, devices=())
        self.held = False
        self.partial = False

    @initialize(mig=st.booleans(), there=places)
    def start(self, mig, there):
        self.node = a_node(self.folder, "h100-80*1", mig)
        self.context = SimpleNamespace(claim=SimpleNamespace(ledger=None), settings=self.node.settings)
        if mig:
            put_where_it_fits(self.node, there)
        self.foreign = self.uuids()
        self.origin = None

    def uuids(self):
        return {part.uuid: one for one in self.node.gpu().instances for part in one.compute}

    def in_use(self):
        return {part.uuid for one in self.node.gpu().instances if one.processes for part in one.compute}

    def failing(self, fault):
        """From here on the nth call fails, or the nth that changes something, and as many after it as said."""
        if fault is None:
            self.node.library.fault = None
            return
        only_changes, nth, code, times = fault
        seen = 0

        def decide(name, _):
            nonlocal seen
            if only_changes and not any(word in name for word in ("Create", "Destroy", "Set")):
                return None
            if name in ("nvmlInitWithFlags", "nvmlShutdown"):
                return None
            seen += 1
            return code if nth <= seen < nth + times else None

        self.node.library.fault = decide

    @rule(counts=wishes, replace_foreign=st.booleans(), fault=faults)
    def provision(self, counts, replace_foreign, fault):
        gpu, before, used = self.node.gpu(), self.node.picture(), self.in_use()
        taken = ()
        if not self.held:
            try:
                taken = (Taken(gpu, planner.choose(gpu, counts, replace_foreign)),)
            except (InputError, Busy):
                assert self.node.picture() == before
                return
            self.held, self.origin = True, before
            self.records.kept.clear()
        elif gpu.uuid not in self.records.kept or self.records.kept[gpu.uuid].boot_id != nvml.boot_id(
            self.node.settings
        ):
            return
        self.failing(fault)
        try:
            cutting.cut(self.context, self.lease, taken)
            failed = ""
        except StageError as error:
            failed = str(error)
        finally:
            self.failing(None)
        record = self.records.kept.get(gpu.uuid)
        assert used <= set(self.uuids()), "what is in use stays"
        ended = "applied" if not failed else "as before" if self.node.picture() == before else "partial"
        self.seen[ended] += 1
        if not failed:
            assert record.forward(self.node.gpu()).is_empty, "nothing is left to do after a change"
        elif ended == "partial":
            assert record is not None
            assert record.missing, f"not as before, and not recorded as partial: {failed}"

    @precondition(lambda self: self.held)
    @rule(fault=faults)
    def restore(self, fault):
        used = self.in_use()
        self.failing(fault)
        try:
            _, missing = cutting.bring_back(self.context.claim, self.node.settings, self.lease)
        except StageError as error:
            missing = [str(error)]
        finally:
            self.failing(None)
        assert used <= set(self.uuids())
        self.seen["restored in part" if missing else "restored"] += 1
        if not missing:
            self.held = False
            if self.origin is not None:
                assert self.node.picture() == self.origin, "exactly as it was"
            self.foreign = self.uuids()

    @rule(data=st.data(), what=st.sampled_from(["works", "ends", "ends", "boots"]))
    def others(self, data, what):
        usable = [one for one in self.node.gpu().instances if one.compute]
        if what == "ends":
            control.end_processes(self.node.file)
        elif what == "boots":
            control.reboot(self.node.file)
            self.foreign, self.origin = {}, None
        elif usable:
            control.start_process(self.node.file, 0, data.draw(st.sampled_from(usable)).gi)

    @invariant()
    def nothing_of_others_is_touched(self):
        if not hasattr(self, "node"):
            return
        allowed = [spot for one in self.records.kept.values() for spot in one.replaced]
        there = self.uuids()
        for uuid, instance in self.foreign.items():
            assert uuid in there or any(spot.is_at(instance) for spot in allowed), f"{instance} is gone"

    def teardown(self):
        """Once faults and other people are gone, everything converges."""
        if hasattr(self, "node") and self.held:
            control.end_processes(self.node.file)
            _, missing = cutting.bring_back(self.context.claim, self.node.settings, self.lease)
            assert missing == []
            if self.origin is not None:
                assert self.node.picture() == self.origin
        shutil.rmtree(self.folder, ignore_errors=True)


def test_layouts_converge(folder, monkeypatch):
    seen = Counter()
    run_state_machine_as_test(
        lambda: Layouts(folder, monkeypatch, seen),
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=15,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    # Otherwise nothing was shown.
    assert {"applied", "as before", "restored"} <= set(seen), seen


@settings(max_examples=2 * EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(there=places, counts=wishes)
def test_no_instance_is_destroyed_that_could_stay(folder, there, counts):
    own = Path(tempfile.mkdtemp(dir=folder))
    node = a_node(own, "h100-80*1", mig=True)
    put_where_it_fits(node, there)
    gpu = node.gpu()
    least = fewest_destroyed(gpu, counts)
    try:
        choice = planner.choose(gpu, counts, replace_foreign=True)
    except InputError:
        assert least is None
        return
    assert len(choice.destroy) == least
    assert (
        change.carry_out(change.difference(gpu, choice.layout, choice.destroy).steps(), node.settings).error
        == ""
    )
    (now,) = inventory.read(node.settings).gpus
    assert planner.choose(now, counts).destroy == ()
    shutil.rmtree(own)


def fewest_destroyed(gpu, counts):
    """By trying everything, in another way than the planner does; None: it does not fit at all."""
    known = {each.name: each for each in gpu.cut.profiles}
    wanted = [known[name] for name, count in counts.items() for _ in range(count)]
    for number in range(len(gpu.instances) + 1):
        for gone in combinations(gpu.instances, number):
            staying = [one for one in gpu.instances if one not in gone]
            rest = list(wanted)
            for one in staying:
                same = [each for each in rest if each.profile_id == one.profile_id]
                if same:
                    rest.remove(same[0])
            if fits(staying, rest, known):
                return number
    return None


def fits(staying, made, known):
    names = [one.name for one in staying] + [each.name for each in made]
    return (
        all(names.count(name) <= known[name].most for name in names)
        and sum(known[name].compute_slices for name in names) <= 7
        and have_places(made, {number for one in staying for number in one.placement.slices})
    )


def have_places(made, taken):
    if not made:
        return True
    first, *others = made
    free = (set(place.slices) for place in first.placements if not taken & set(place.slices))
    return any(have_places(others, taken | slices) for slices in free)
