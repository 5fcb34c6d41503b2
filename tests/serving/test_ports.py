"""Blocks of ports."""

import socket
from collections.abc import Iterator

import pytest

from tasks.errors import StageFailed
from tasks.serving import ports

HOST = "127.0.0.1"


@pytest.fixture
def free_range() -> Iterator[tuple[int, int]]:
    """A range of 20 ports, all of them free just now."""
    for first in range(20000, 20900, 20):
        if not ports.occupied(range(first, first + 20)):
            yield first, first + 19
            return
    pytest.fail("no free range of ports on this machine")


def test_blocks_do_not_overlap_and_come_back(free_range: tuple[int, int]) -> None:
    one, two = (ports.reserve(HOST, free_range, 10) for _ in range(2))
    assert {one.first, two.first} == {free_range[0], free_range[0] + 10}
    with pytest.raises(StageFailed, match="widen the setting port_range"):
        ports.reserve(HOST, free_range, 10)
    one.release()
    again = ports.reserve(HOST, free_range, 10)
    assert again.first == one.first
    for block in (two, again):
        block.release()


@pytest.mark.parametrize("offset", [0, 4, 9])
def test_a_block_with_an_occupied_port_is_passed_over(free_range: tuple[int, int], offset: int) -> None:
    with socket.create_server((HOST, free_range[0] + offset)):
        block = ports.reserve(HOST, free_range, 10)
    assert block.first == free_range[0] + 10
    block.release()


def test_an_unwanted_block_is_passed_over(free_range: tuple[int, int]) -> None:
    block = ports.reserve(HOST, free_range, 10, frozenset({free_range[0]}))
    assert block.first == free_range[0] + 10
    block.release()


def test_a_registry_gets_a_port_from_the_other_end(free_range: tuple[int, int]) -> None:
    with ports.listen(HOST, free_range) as one, ports.listen(HOST, free_range) as two:
        assert [one.getsockname()[1], two.getsockname()[1]] == [free_range[1], free_range[1] - 1]
        assert ports.occupied(range(free_range[0], free_range[1] + 1)) == [free_range[1] - 1, free_range[1]]
