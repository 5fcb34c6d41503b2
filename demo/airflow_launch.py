"""Airflow's command line with less to compute at the start: `python -P demo/airflow_launch.py COMMAND ...`.

Run as a file and with -P, so that neither this folder nor the current one is on Airflow's sys.path.
"""

import gc


def main() -> None:
    # Importing Airflow makes a million objects that stay. Looking for garbage among them again and again is
    # an eighth of the processor time of a start.
    gc.set_threshold(50_000, 20, 50)
    from airflow.__main__ import main as airflow

    airflow()


if __name__ == "__main__":
    main()
