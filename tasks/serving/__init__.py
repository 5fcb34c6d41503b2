"""The pool: vLLM servers that are started, watched, replaced and ended.

`start` and `stop` are the stages. Between them lives the keeper (`keeper`), a process of its own that parents
the workers (`worker`, `server`), answers clients who is ready (`registry`) and holds the line to the ledger
(`line`). `launch` turns the spec into a command line, `diagnosis` a worker's log into a reason, `leftovers`
finds and ends what nobody parents any more.
"""
