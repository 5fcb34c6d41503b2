"""Ports for workers and registries, out of one range of the node.

Chosen by trying to bind, because no record knows what other programs hold. A worker gets a block: vLLM opens
several ports itself. The last port of a block stays bound by the keeper for as long as the block is in use,
so two keepers that look at the same time never get the same one, and a keeper's death frees its blocks.
"""

import socket
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from tasks.errors import StageFailed


@dataclass(frozen=True)
class Block:
    """Ports that belong to one attempt of one worker, until `release`."""

    first: int
    size: int
    guard: socket.socket

    @property
    def end(self) -> int:
        """One past the last port."""
        return self.first + self.size

    def release(self) -> None:
        """Let others have it."""
        self.guard.close()


def reserve(
    host: str, port_range: tuple[int, int], size: int, unwanted: frozenset[int] = frozenset()
) -> Block:
    """The first block of `size` ports in which every port is free.

    Args:
        unwanted: first ports of blocks to pass over, because a server could not use them a moment ago.

    Raises:
        StageFailed: there is none.
    """
    first, last = port_range
    for start in range(first, last - size + 2, size):
        if start in unwanted:
            continue
        guard = _bound(host, start + size - 1, reuse=False)
        if guard is None:
            continue
        if all(is_free(port) for port in range(start, start + size - 1)):
            return Block(start, size, guard)
        guard.close()
    raise StageFailed(
        f"no block of {size} free ports is left in {first}-{last}: widen the setting port_range, or end what "
        f"holds them (`ss -tlnp`)"
    )


def listen(host: str, port_range: tuple[int, int]) -> socket.socket:
    """A listening socket on the highest free port of the range: blocks are given out from the other end.

    Raises:
        StageFailed: no port is free.
    """
    first, last = port_range
    for port in range(last, first - 1, -1):
        found = _bound(host, port, reuse=True)
        if found is None:
            continue
        with suppress(OSError):
            found.listen(128)
            return found
        found.close()
    raise StageFailed(f"no free port is left in {first}-{last}: widen the setting port_range")


def is_free(port: int) -> bool:
    """Whether nobody listens on `port`, on any address."""
    found = _bound("", port, reuse=True)
    if found is None:
        return False
    found.close()
    return True


def occupied(ports: Iterator[int] | range | list[int]) -> list[int]:
    """Those of `ports` on which somebody listens."""
    return [port for port in ports if not is_free(port)]


def _bound(host: str, port: int, *, reuse: bool) -> socket.socket | None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    found = socket.socket(family, socket.SOCK_STREAM)
    # With it a port whose last connections are in TIME_WAIT counts as free; a guard must not share its port.
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, int(reuse))
    try:
        found.bind((host, port))
    except OSError:
        found.close()
        return None
    return found
