"""How PostgreSQL, which refuses to run as root, runs when we are root."""

import os
import pwd
import subprocess
from collections.abc import Mapping
from pathlib import Path

from tasks.errors import StageFailed

ENVIRONMENT: Mapping[str, str] = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"}
"""All that PostgreSQL's programs need."""


def user() -> pwd.struct_passwd:
    """`nobody`: on every Debian, owns no file, and is not the user of a PostgreSQL of the distribution."""
    return pwd.getpwnam("nobody")


def command(install: Path, home: Path) -> list[str]:
    """What to put before a command so that it does not run as root; empty when we are not root.

    The user may not be able to pass a folder above `install` (PostgreSQL's programs) or `home` (its data), as
    in a checkout below /root. No permission is changed for that. Instead the command keeps the weakest
    capability that is enough: to read and search everywhere, or to pass every permission check (in a
    container that lacks the first, or where a umask closed the programs to others). PostgreSQL's programs
    look for each other with access(2), which forgets capabilities unless `no_setuid_fixup` is set.

    Raises:
        StageFailed: none is enough; the message says what each try met.
    """
    if os.geteuid() != 0:
        return []
    who = user()
    drop = ["setpriv", f"--reuid={who.pw_uid}", f"--regid={who.pw_gid}", "--clear-groups", "--no-new-privs"]
    refusals = []
    for capability in (None, "dac_read_search", "dac_override"):
        prefix = [*drop, *_keeping(capability)]
        refusal = _try(prefix, install, home)
        if refusal is None:
            return prefix
        refusals.append(f"with {capability or 'no capability'}: {refusal}")
    raise StageFailed(
        f"PostgreSQL must not run as root, and the user `{who.pw_name}` cannot be given access to {home}: "
        f"{'; '.join(refusals)}. Put the checkout where other users may pass (below /srv, for example), or "
        f"run as another user than root"
    )


def _keeping(capability: str | None) -> list[str]:
    if capability is None:
        return []
    only = f"-all,+{capability}"
    return [
        f"--inh-caps={only}",
        f"--ambient-caps=+{capability}",
        f"--bounding-set={only}",
        "--securebits=+no_setuid_fixup",
    ]


def _try(prefix: list[str], install: Path, home: Path) -> str | None:
    """None when the user can run the programs, read what they need and reach `home`; else the refusal."""
    probe = '"$0/bin/initdb" --version && cat "$0"/share/*.bki "$0"/share/*.sql && cd "$1"'
    tried = subprocess.run(
        [*prefix, "sh", "-c", probe, str(install), str(home)],
        check=False,
        env=ENVIRONMENT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        cwd="/",
    )
    return None if tried.returncode == 0 else tried.stderr.decode(errors="replace").strip()
