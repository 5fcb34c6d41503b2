"""The ledger: the PostgreSQL schema that records runs, claims, leases, releases, pools and batches.

`connection` opens it and loads the named queries, `migrations` brings the schema up to date, `claims` says who
may write. SQL is under sql/, for people to read.
"""

from tasks.ledger.claims import Claim, take
from tasks.ledger.connection import Ledger
from tasks.ledger.runs import Run, close, load, register

__all__ = ["Claim", "Ledger", "Run", "close", "load", "register", "take"]
