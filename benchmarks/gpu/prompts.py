"""Prompts of an exact number of tokens, no two alike, so that no prefix is shared unless it is meant to be."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tasks.batch.records import Row


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

    def contents(self, rows: int, tokens: int, seed: int, shared: int = 0) -> Iterator[str]:
        """`rows` messages that make prompts of `tokens` tokens; the first `shared` tokens are the same in all.

        Raises:
            SystemExit: the tokenizer counts otherwise than this class expects.
        """
        chance = random.Random(seed)
        wanted = tokens - self._around
        same = self._words(chance, shared) if shared else ""
        for number in range(rows):
            content = (
                f"{same} {self._words(chance, wanted - shared - 1)}" if same else self._words(chance, wanted)
            )
            if number == 0 and self.count(content) != tokens:
                raise SystemExit(f"a prompt has {self.count(content)} tokens and should have {tokens}")
            yield content

    def rows(self, rows: int, tokens: int, seed: int, shared: int = 0) -> list[Row]:
        """The same as rows for the dispatcher."""
        return [
            Row(f"row-{number:07d}", _messages(content), tokens)
            for number, content in enumerate(self.contents(rows, tokens, seed, shared))
        ]

    def _words(self, chance: random.Random, tokens: int) -> str:
        """A text of that many tokens: words of one token, each but the first with the space before it, and a digit."""
        words, odd = divmod(tokens - 1, 2)
        text = " ".join(chance.choices(self._vocabulary, k=words + 1))
        return f"{text}{chance.randrange(10)}" if odd else text


def _messages(content: str) -> Any:
    return json.dumps([{"role": "user", "content": content}])
