"""What is asked in one run: how long each row's prompt and answer are, and what all prompts begin with.

`256x512x1536` is prompt tokens, answer tokens, rows; `2048x128x768+1500` the same with 1,500 tokens that all
prompts begin with; `mixx4096` are 4,096 rows of `MIX`, in an order that chance chose once.
"""

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass

_EVEN = re.compile(r"(\d+)x(\d+)x(\d+)(?:\+(\d+))?")
_MIXED = re.compile(r"mixx(\d+)")

MIX: Mapping[tuple[int, int], int] = {(192, 96): 70, (512, 256): 22, (2048, 1024): 8}
"""Prompt and answer tokens to how many of a hundred rows: a twelfth of the rows has two fifths of the tokens."""


@dataclass(frozen=True)
class Load:
    """Rows to ask."""

    name: str
    """In the name of its result."""
    lengths: tuple[tuple[int, int], ...]
    """Prompt and answer tokens of each row."""
    shared: int = 0
    """Tokens that all prompts begin with."""

    @property
    def rows(self) -> int:
        """How many."""
        return len(self.lengths)

    @property
    def is_even(self) -> bool:
        """Whether all rows are alike."""
        return len(set(self.lengths)) == 1

    def describe(self) -> dict[str, int | float]:
        """For a result; lengths are means."""
        prompts, answers = (sum(column) / self.rows for column in zip(*self.lengths, strict=True))
        return {
            "rows": self.rows,
            "prompt_tokens": round(prompts, 1),
            "answer_tokens": round(answers, 1),
            "shared_prefix_tokens": self.shared,
        }


def parse(text: str) -> Load:
    """The load that `text` names.

    Raises:
        SystemExit: it names none.
    """
    if even := _EVEN.fullmatch(text):
        prompt, answer, rows, shared = (int(number or 0) for number in even.groups())
        suffix = "-shared" if shared else ""
        return Load(f"{prompt}-{answer}{suffix}", ((prompt, answer),) * rows, shared)
    if mixed := _MIXED.fullmatch(text):
        return Load("mix", mixture(int(mixed[1])))
    raise SystemExit(f"{text!r} is no load; write 256x512x1536, 2048x128x768+1500 or mixx4096")


def mixture(rows: int) -> tuple[tuple[int, int], ...]:
    """So many rows of `MIX`; always the same."""
    lengths = [length for length, percent in MIX.items() for _ in range(round(rows * percent / 100))]
    lengths += [next(iter(MIX))] * (rows - len(lengths))
    random.Random(35).shuffle(lengths)
    return tuple(lengths[:rows])
