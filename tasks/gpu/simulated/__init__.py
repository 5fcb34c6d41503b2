"""A simulated NVIDIA driver below the real `pynvml`, for tests and for machines without GPUs.

Chosen by QWEN_PIPELINE_NVML=sim:PRODUCT[*COUNT] together with QWEN_PIPELINE_NVML_STATE, the file that holds the
node; never otherwise. It fails the way hardware does. Product and driver names say that they are simulated, so
whatever shows them says it too.
"""
