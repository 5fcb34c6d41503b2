"""Simulated nodes, and stages on them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tasks.gpu import change
from tests.gpu.node import Node, a_node


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """What retries in the real world after a pause retries at once here."""
    monkeypatch.setattr(change, "_IN_USE_PAUSE_S", 0.0)


@pytest.fixture
def make_node(tmp_path: Path) -> Callable[..., Node]:
    """Makes a simulated node: `make_node("h100-80*2", mig=True)`."""

    def make(what: str = "h100-80*2", mig: bool = True, **settings: Any) -> Node:
        return a_node(tmp_path, what, mig, **settings)

    return make


@pytest.fixture
def node(make_node: Callable[..., Node]) -> Node:
    """Two H100 with MIG on."""
    return make_node()
