"""A notifier that writes what it is told into a file; on the PYTHONPATH of the tests' Airflow."""

from pathlib import Path
from typing import Any

from airflow.sdk.bases.notifier import BaseNotifier


class Told(BaseNotifier):
    """Appends a line for each message."""

    template_fields = ("text",)

    def __init__(self, file: str, text: str) -> None:
        super().__init__()
        self.file = file
        self.text = text

    def notify(self, context: Any) -> None:
        """See the module."""
        with Path(self.file).open("a", encoding="utf-8") as file:
            file.write(f"{self.text}\n")
