from pathlib import Path

import pytest

from benchmarks.gpu.pack import Item, in_packs


def _items(folder: Path, **sizes: int) -> list[Item]:
    items = []
    for name, size in sizes.items():
        path = folder / name
        path.write_bytes(b"x" * size)
        items.append(Item(name.split("_")[0], path))
    return items


def test_no_pack_is_larger_than_the_limit_and_nothing_is_lost(tmp_path: Path) -> None:
    items = _items(tmp_path, a_1=60, a_2=30, b_1=50, b_2=40, b_3=10)
    packs = in_packs(items, 100)
    assert sorted(item.path.name for pack in packs for item in pack) == ["a_1", "a_2", "b_1", "b_2", "b_3"]
    assert max(sum(item.bytes for item in pack) for pack in packs) <= 100


def test_what_comes_first_is_in_the_first_packs(tmp_path: Path) -> None:
    items = _items(tmp_path, small_1=10, small_2=5, large_1=90, large_2=95)
    packs = in_packs(items, 100)
    assert {item.environment for item in packs[0]} == {"small"}


def test_a_file_that_fits_nowhere_is_named(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="a_1"):
        in_packs(_items(tmp_path, a_1=101), 100)
