"""mig-parted's configuration files as layouts."""

from pathlib import Path

import pytest

from tasks.errors import InputError
from tasks.gpu import demand, inventory
from tasks.gpu.provision import ask
from tasks.gpu.simulated import control
from tasks.spec import MigPartedLayout

CONFIG = """
version: v1
mig-configs:
  all-disabled:
    - devices: all
      mig-enabled: false
  all-enabled:
    - devices: all
      mig-enabled: true
      mig-devices: {}
  balanced:
    - devices: all
      device-filter: ["0x20B210DE", "0x233010DE"]
      mig-enabled: true
      mig-devices:
        "1g.10gb": 2
        "2g.20gb": 1
        "3g.40gb": 1
    - devices: all
      device-filter: "0x233510DE"
      mig-enabled: true
      mig-devices: {"1g.18gb": 7}
  half:
    - devices: [0]
      mig-enabled: false
    - devices: [1]
      mig-enabled: true
      mig-devices: {"3g.40gb": 2, "1g.10gb": 0}
  twice:
    - devices: all
      mig-enabled: false
    - devices: [1]
      mig-enabled: true
      mig-devices: {"3g.40gb": 2}
  shared:
    - devices: all
      mig-enabled: true
      mig-devices: {"1c.3g.40gb": 2}
  elsewhere:
    - devices: [1, 7]
      mig-enabled: true
      mig-devices: {"3g.40gb": 1}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG)
    return path


def pick(node, file, config):
    there = inventory.read(node.settings)
    return demand.pick(ask(MigPartedLayout(mig_parted=str(file), config=config), there, None), there)


def test_a_configuration_is_placed_as_its_counts_say(node, file):
    taken = pick(node, file, "balanced")
    assert [one.gpu.index for one in taken] == [0, 1]
    # The only way: a 1g cannot begin at the last slice.
    assert [str(step) for step in taken[1].difference.steps()] == [
        *("create 3g.40gb at 4-7", "create 2g.20gb at 0-1", "create 1g.10gb at 2", "create 1g.10gb at 3")
    ]


def test_entries_are_chosen_by_the_kind_of_gpu(make_node, file):
    (one,) = pick(make_node("h200-141*1"), file, "balanced")
    assert [spot.name for spot in one.choice.layout.spots] == ["1g.18gb"] * 7


def test_gpus_without_mig_are_left_alone(node, file):
    assert [one.gpu.index for one in pick(node, file, "half")] == [1]


@pytest.mark.parametrize("sick", [{"remap_failed": True}, {"lost": True}])
def test_a_sick_gpu_is_left_out_here_too(node, file, sick):
    control.put(node.file, 0, **sick)
    assert [one.gpu.index for one in pick(node, file, "balanced")] == [1]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("all-disabled", "makes no MIG device on this node"),
        ("all-enabled", "makes no MIG device on this node"),
        ("twice", "2 entries of 'twice' .* are about GPU 1"),
        ("shared", r"shares GPU instances .*1c\.3g\.40gb"),
        ("elsewhere", "names device 7, and this node has 0, 1"),
        ("none", "has no configuration 'none'; it has all-disabled, all-enabled, balanced"),
    ],
)
def test_what_makes_no_workers_here_is_refused(node, file, config, message):
    with pytest.raises(InputError, match=rf"layout\.config: .*{message}"):
        pick(node, file, config)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("version: v1", "version: v2"), "version: Input should be 'v1'"),
        (
            ("      mig-enabled: false\n", "      mig-enabled: false\n      mig-device: {}\n"),
            "mig-device: Extra",
        ),
        (("mig-configs:", "configs:"), "mig-configs: Field required"),
        (("devices: all", "devices: some"), "devices"),
        (("version: v1", "version: ]"), "is not YAML"),
    ],
)
def test_a_file_that_is_not_of_version_1_is_refused_with_the_field(node, file, change, message):
    file.write_text(CONFIG.replace(*change))
    with pytest.raises(InputError, match=rf"(?s)layout\.mig_parted: .*{message}"):
        pick(node, file, "balanced")


def test_a_file_that_is_not_there_is_named(node, tmp_path):
    with pytest.raises(InputError, match=r"layout\.mig_parted: .*/none\.yaml cannot be read: No such file"):
        pick(node, tmp_path / "none.yaml", "balanced")
