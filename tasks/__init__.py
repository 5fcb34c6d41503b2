"""The stages of a batch run, from weights to answers; no Airflow in here.

Read `stage_list.py` first: it names the stages, their order and what each one fences off. `stages.py` executes one.
Each package next to them is one concern, and every stage module in them has the same three functions: `plan`,
`apply`, `verify`.
"""

__version__ = "0.1.0"
