"""Real texts that lie on the machine once the Airflow environment is installed. None is written here.

| source | text | licence |
|---|---|---|
| python-topics | Python's language reference, as `pydoc_data.topics` holds it | PSF-2.0 |
| python-docstrings | docstrings of Python's standard library | PSF-2.0 |
| airflow-config | the descriptions of Airflow's options, `config_templates/config.yml` | Apache-2.0 |
| airflow-ui | sentences of Airflow's user interface, in some 20 languages | Apache-2.0 |
| readme | what packages say of themselves, in their metadata | that of the package, see READMES |

Keeps: the same environment gives the same texts in the same order; nothing is imported to be read.
"""

import ast
import inspect
import json
import re
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from importlib.metadata import distribution, metadata
from pathlib import Path
from typing import Any

import yaml


@dataclass(frozen=True)
class Text:
    """One text and where it is from."""

    source: str
    name: str  # unique within the source, and stable while the package keeps the text's name
    text: str
    language: str = "en"  # as Airflow names its translations: ISO 639-1, with the script for Chinese


READMES = {
    "aiohttp": "Apache-2.0 and MIT",
    "alembic": "MIT",
    "anyio": "MIT",
    "asgiref": "BSD-3-Clause",
    "attrs": "MIT",
    "charset-normalizer": "MIT",
    "dill": "BSD-3-Clause",
    "fastapi": "MIT",
    "fastapi-cli": "MIT",
    "fasteners": "Apache-2.0",
    "fsspec": "BSD-3-Clause",
    "h11": "MIT",
    "hf-xet": "Apache-2.0",
    "httpcore": "BSD-3-Clause",
    "httpx": "BSD-3-Clause",
    "huggingface-hub": "Apache-2.0",
    "jsonschema": "MIT",
    "libcst": "MIT",
    "msgspec": "BSD-3-Clause",
    "multidict": "Apache-2.0",
    "pandas": "BSD-3-Clause",
    "pendulum": "MIT",
    "platformdirs": "MIT",
    "pluggy": "MIT",
    "psutil": "BSD-3-Clause",
    "pytest": "MIT",
    "python-dotenv": "BSD-3-Clause",
    "python-slugify": "MIT",
    "requests": "Apache-2.0",
    "rich": "MIT",
    "ruff": "MIT",
    "sqlalchemy": "MIT",
    "sqlfluff": "MIT",
    "starlette": "BSD-3-Clause",
    "structlog": "MIT or Apache-2.0",
    "tokenizers": "Apache-2.0",
    "truststore": "MIT",
    "typer": "MIT",
    "universal-pathlib": "MIT",
    "urllib3": "MIT",
    "uvicorn": "BSD-3-Clause",
    "websockets": "BSD-3-Clause",
    "yarl": "Apache-2.0",
}
"""Packages whose description is read, with their licence."""

DOCUMENTED_MODULES = (
    "argparse", "bisect", "calendar", "cmd", "codecs", "configparser", "contextlib", "copy", "csv",
    "dataclasses", "datetime", "decimal", "difflib", "doctest", "enum", "fractions", "functools",
    "gzip", "heapq", "imaplib", "inspect", "ipaddress", "locale", "mailbox", "optparse", "os",
    "pickle", "pprint", "random", "sched", "shlex", "shutil", "smtplib", "socket", "statistics",
    "string", "subprocess", "tarfile", "tempfile", "textwrap", "threading", "trace", "types",
    "typing", "uuid", "weakref", "zipfile",
)  # fmt: skip

EMOJI = re.compile("[\U0001f300-\U0001faff\u2600-\u27bf]")

_PLACEHOLDER = re.compile(r"\{\{|\$t\(")
_PLURAL = re.compile(r"_(zero|one|two|few|many)$")
_MARKDOWN_LINK = re.compile(r"!?\[([^\[\]]*)\](?:\([^()]*\)|\[[^\[\]]*\])")
_NOT_PROSE = re.compile(r"^\s*(<|#|\.\.|\||---|===|```|>>>|\$ |:\w+:)|://|&nbsp;", re.MULTILINE)


def python_topics() -> Iterator[Text]:
    """The chapters of the language reference, whole: from 500 to some 70,000 characters."""
    from pydoc_data.topics import topics

    for name, text in topics.items():
        # The first two lines are the title and its underline, which would give the topic away.
        yield Text("python-topics", name, text.partition("\n\n")[2].strip())


def python_docstrings() -> Iterator[Text]:
    """Docstrings of functions and classes, from the files of the standard library."""
    library = Path(sysconfig.get_path("stdlib"))
    for module in DOCUMENTED_MODULES:
        tree = ast.parse((library / f"{module}.py").read_text(encoding="utf-8"))
        yield from _docstrings(tree, module)


def airflow_config() -> Iterator[Text]:
    """What Airflow says about each of its options, with the default value."""
    path = _airflow() / "config_templates" / "config.yml"
    sections: dict[str, Any] = yaml.load(path.read_text(encoding="utf-8"), Loader=yaml.CSafeLoader)
    for section, content in sections.items():
        for option, about in content["options"].items():
            description, default = about.get("description"), about.get("default")
            if description and default not in (None, ""):
                text = (
                    f"[{section}] {option}: {description.strip()}\nType: {about['type']}. Default: {default}"
                )
                yield Text("airflow-config", f"{section}/{option}", text)


def airflow_ui() -> Iterator[Text]:
    """The longer sentences of Airflow's translations, without those that have gaps to fill."""
    for path in sorted((_airflow() / "ui" / "dist" / "i18n" / "locales").glob("*/*.json")):
        language = path.parent.name
        for key, text in _leaves(json.loads(path.read_text(encoding="utf-8"))):
            if not _PLACEHOLDER.search(text) and not _PLURAL.search(key):
                yield Text("airflow-ui", f"{language}/{path.stem}/{key}", text.strip(), language)


def readmes() -> Iterator[Text]:
    """The paragraphs of prose in the packages' descriptions, links replaced by their words."""
    for package in READMES:
        description = str(metadata(package).json.get("description", ""))
        paragraphs = re.split(r"\n\s*\n", description.replace("\r\n", "\n"))
        for number, paragraph in enumerate(paragraphs):
            text = _MARKDOWN_LINK.sub(r"\1", paragraph).strip()
            if _is_prose(text):
                yield Text("readme", f"{package}/{number}", text)


def first_by_hash(texts: Iterable[Text], count: int) -> list[Text]:
    """`count` of the texts, chosen by the hash of their names: the choice hardly moves when some change."""
    return sorted(texts, key=lambda text: sha256(f"{text.source} {text.name}".encode()).digest())[:count]


def excerpt(text: str, limit: int) -> str:
    """The longest beginning of `text` of at most `limit` characters that ends with a paragraph or a word."""
    if len(text) <= limit:
        return text
    head = text[:limit]
    paragraphs, _, _ = head.rpartition("\n\n")
    words, _, _ = head.rpartition(" ")
    return (paragraphs if len(paragraphs) > 0.8 * limit else words).rstrip()


def _airflow() -> Path:
    """The package's folder; importing it to ask would take seconds."""
    return Path(str(distribution("apache-airflow-core").locate_file("airflow")))


def _docstrings(parent: ast.Module | ast.ClassDef, path: str) -> Iterator[Text]:
    for node in parent.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            text = ast.get_docstring(node)
            if text:
                yield Text("python-docstrings", f"{path}.{node.name}", inspect.cleandoc(text))
            if isinstance(node, ast.ClassDef):
                yield from _docstrings(node, f"{path}.{node.name}")


def _leaves(tree: dict[str, Any], path: str = "") -> Iterator[tuple[str, str]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", str(value)


def _is_prose(text: str) -> bool:
    letters = sum(character.isalpha() or character.isspace() for character in text)
    return len(text) >= 80 and letters > 0.8 * len(text) and not _NOT_PROSE.search(text)
