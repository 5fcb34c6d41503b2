"""What the README tells a newcomer to type reaches the demo as it stands there."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from demo.__main__ import parse
from demo.world import World

REPOSITORY = Path(__file__).resolve().parents[2]
COMMANDS = sorted(set(re.findall(r"make demo(?: [A-Z]+=[\w./-]+)*", (REPOSITORY / "README.md").read_text())))


def arguments_of(command: str) -> list[str]:
    """What make would give to `python -m demo`."""
    shown = subprocess.run(
        ["make", "--dry-run", *shlex.split(command)[1:]],
        cwd=REPOSITORY,
        check=True,
        capture_output=True,
        text=True,
    )
    (line,) = (line for line in shown.stdout.splitlines() if "-m demo " in line)
    words = shlex.split(line)
    return words[words.index("demo") + 1 :]


def test_the_readme_names_the_demo_alone_and_with_each_of_its_choices():
    assert "make demo" in COMMANDS
    assert {word.partition("=")[0] for command in COMMANDS for word in command.split()[2:]} == {
        "KEEP",
        "MODEL",
        "ROWS",
        "SCHEME",
        "SIM",
    }


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_readme_is_one_that_the_demo_accepts(command, tmp_path):
    options = parse(arguments_of(command))
    world = World(tmp_path, options.model, options.scheme, rows=options.rows, sim=options.sim)
    given = dict(word.split("=") for word in command.split()[2:])
    assert world.model == given.get("MODEL", "smollm2-135m")
    assert world.sim == given.get("SIM")
    assert world.scheme == given.get("SCHEME", "awq")
    assert world.rows == (int(given["ROWS"]) if "ROWS" in given else None)
    assert options.keep == ("KEEP" in given)
