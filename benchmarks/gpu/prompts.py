"""Prompts of an exact number of tokens, no two alike, so that no prefix is shared unless it is meant to be."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.gpu.loads import Load
from tasks.batch.records import Row

_PROVEN = 8
"""Prompts at the beginning of a load whose tokens are counted."""


class Prompts:
    """For one tokenizer of `checkpoint`."""

    def __init__(self, model: Path) -> None:
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        self._around = self.count("")
        # One token each, however large the vocabulary is.
        known = self._tokenizer.get_vocab()
        self._vocabulary = sorted(token for token in known if len(token) == 4 and token.isalpha())[:20_000]

    def count(self, content: str) -> int:
        """Tokens of a chat with this one message, as the engine counts them."""
        return len(self.ids(content))

    def ids(self, content: str) -> list[int]:
        """The chat's tokens."""
        text = f"<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n"
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def contents(self, load: Load, seed: int) -> Iterator[str]:
        """The messages that make prompts as long as `load` says.

        Raises:
            SystemExit: the tokenizer counts otherwise than this class expects.
        """
        chance = random.Random(seed)
        same = self._words(chance, load.shared) if load.shared else ""
        for number, (tokens, _) in enumerate(load.lengths):
            wanted = tokens - self._around
            content = (
                f"{same} {self._words(chance, wanted - load.shared - 1)}"
                if same
                else self._words(chance, wanted)
            )
            if number < _PROVEN and self.count(content) != tokens:
                raise SystemExit(f"a prompt has {self.count(content)} tokens and should have {tokens}")
            yield content

    def rows(self, load: Load, seed: int) -> list[Row]:
        """The same as rows for the dispatcher."""
        return [
            Row(
                f"row-{number:07d}",
                _messages(content),
                prompt_tokens,
                answer_tokens,
                None if load.is_even else json.dumps({"max_tokens": answer_tokens}),
            )
            for number, (content, (prompt_tokens, answer_tokens)) in enumerate(
                zip(self.contents(load, seed), load.lengths, strict=True)
            )
        ]

    def _words(self, chance: random.Random, tokens: int) -> str:
        """A text of that many tokens: words of one token, each but the first with the space before it, and a digit."""
        words, odd = divmod(tokens - 1, 2)
        text = " ".join(chance.choices(self._vocabulary, k=words + 1))
        return f"{text}{chance.randrange(10)}" if odd else text


def _messages(content: str) -> Any:
    return json.dumps([{"role": "user", "content": content}])
