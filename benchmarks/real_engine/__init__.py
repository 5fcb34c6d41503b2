"""The real vLLM on a CPU, asked in four ways."""
