"""The whole pipeline on one machine without GPUs: `make demo`.

Everything on the path is real (PostgreSQL, Airflow, Spark, vLLM on CPU, the conversion, the hub's client); only
the hub is a local server, because weights cannot be assumed reachable. `__main__` is the place to start.
"""
