"""The timeline of a start, from lines as vLLM 0.32 writes them."""

from datetime import datetime

from tasks.serving import timeline

LINES = """
W1129 21:57:30.216000 20211 torch/_library/triton.py:53] Triton not available, find_triton_kernels = []
(APIServer pid=20211) INFO 11-29 21:57:30 [api_utils.py:286] non-default args: {'model_tag': '/release'}
(EngineCore pid=20282) INFO 11-29 21:57:55 [core.py:133] Initializing a V1 LLM engine (v0.32.0) with config: model
(Worker pid=20326) INFO 11-29 21:58:16 [cpu_model_runner.py:68] Starting to load model /release...
(Worker pid=20326) INFO 11-29 21:58:17 [default_loader.py:501] Loading weights took 0.82 seconds
(EngineCore pid=20282) INFO 11-29 21:58:22 [core.py:402] init engine (profile, create kv cache, warmup) took 0.50 s
(APIServer pid=20211) INFO 11-29 21:58:28 [entry.py:140] Starting vLLM server on http://127.0.0.1:21000
""".splitlines()


def test_each_event_is_seconds_after_the_process_began() -> None:
    began = datetime(2026, 11, 29, 21, 57, 20).timestamp()
    assert timeline.of_log(LINES, began) == {
        "imported": 10.0,
        "engine process": 35.0,
        "begins to load": 56.0,
        "weights loaded": 57.0,
        "engine ready": 62.0,
        "listens": 68.0,
    }


def test_a_start_across_new_year_counts_on() -> None:
    began = datetime(2026, 12, 31, 23, 59, 50).timestamp()
    line = (
        "(APIServer pid=1) INFO 01-01 00:00:10 [entry.py:140] Starting vLLM server on http://127.0.0.1:21000"
    )
    assert timeline.of_log([line], began) == {"listens": 20.0}


def test_a_log_of_something_else_has_no_timeline() -> None:
    assert timeline.of_log(["this is a stand-in"], 0.0) == {}
