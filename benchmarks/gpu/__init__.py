"""Benchmarks of the pipeline's own stages on a machine with one GPU and no network.

    python -m benchmarks.gpu.pack OUT              here: folders of at most 60 MiB, to be carried one by one
    python3 benchmarks/gpu/unpack.py KIT OUT/1 ..  there: environments and a checkout below the folder KIT
    KIT/project/python -m benchmarks.gpu STEP      there: one step, or `sequence FILE` for many

Each step writes one JSON file to KIT/results. What it measures is the project's code: the stages provision,
start and stop, the keeper, the dispatcher, the converter. What is bypassed is said in docs/performance.md.
MIG, clocks and power of the card are read and never set.
"""
