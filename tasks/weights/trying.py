"""Load a release in vLLM and let it generate, on this machine's CPU. Runs in the serving environment, as a child:

PYTHON -m tasks.weights.trying JOB.json
"""

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

_ANSWER_TOKENS = 8
_CACHE_BYTES = 128 * 2**20
_ROOM_TOKENS = 64
"""Above the sequences' own length: for the answer, and for a block size that is rounded up."""


@dataclass(frozen=True)
class Job:
    """What to load and what to ask."""

    release: str
    sequences: list[list[int]]
    """Token ids, all of one length."""
    dtype: str
    report: str
    """The file that receives {engine, losses, answer_tokens}."""

    def dumps(self) -> str:
        """As JSON."""
        return json.dumps(asdict(self))


def main() -> None:
    """Read the job named by the first argument and do it."""
    job = Job(**json.loads(Path(sys.argv[1]).read_text()))
    Path(job.report).write_text(json.dumps(try_release(job)))


def try_release(job: Job, **engine_arguments: Any) -> dict[str, object]:
    """What the engine thinks of each sequence, in nats a token, and how many tokens it answered.

    Args:
        engine_arguments: further ones of `vllm.LLM`, for an engine that is not a CPU's.
    """
    import vllm

    longest = max(len(sequence) for sequence in job.sequences) + _ANSWER_TOKENS + _ROOM_TOKENS
    engine = vllm.LLM(
        model=job.release,
        dtype=job.dtype,
        enforce_eager=True,
        max_model_len=longest,
        max_num_seqs=len(job.sequences),
        kv_cache_memory_bytes=_CACHE_BYTES,
        enable_prefix_caching=False,
        trust_remote_code=False,
        limit_mm_per_prompt={"image": 0, "video": 0},
        **engine_arguments,
    )
    wanted = vllm.SamplingParams(max_tokens=_ANSWER_TOKENS, temperature=0.0, prompt_logprobs=0)
    answers = engine.generate([{"prompt_token_ids": sequence} for sequence in job.sequences], wanted)
    losses = []
    for sequence, answer in zip(job.sequences, answers, strict=True):
        seen = answer.prompt_logprobs[1:]
        losses.append(
            -sum(at[token].logprob for token, at in zip(sequence[1:], seen, strict=True)) / len(seen)
        )
    return {
        "engine": f"vllm {vllm.__version__}",
        "losses": losses,
        "answer_tokens": sum(len(answer.outputs[0].token_ids) for answer in answers),
    }


if __name__ == "__main__":
    main()
