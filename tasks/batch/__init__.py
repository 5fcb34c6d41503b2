"""The batch: a table of prompts in, a table of answers out, each row answered once.

`input` finds the prompts, `parts` reads them, `prompts` makes chats of them and counts tokens, `prepared` keeps them
as the batch (`prepared_part` and `ids` make it); `segments` makes finished rows durable, `rows` says what is known
about every row, `in_ledger` what is registered. `engine`, `routing` and `dispatch` ask the workers and do not know
Spark; `submission`, `spark_driver`, `driver`, `prepare_driver` and `spark_task` bring them to Spark. `prepare`, `run`,
`reconcile` and `publish` are the stages.
"""
