"""The model worker on vLLM, for models with `engine = "vllm"`: vLLM's `AsyncLLM` behind the worker protocol.

`launch.py` is the supervisor's part. Everything else runs under the interpreter of the environment that vLLM is
installed in, which has vLLM and what it depends on, and none of Syringa's other dependencies.
"""
