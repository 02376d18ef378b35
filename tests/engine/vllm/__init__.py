"""The worker on vLLM, without vLLM: see tests/e2e/test_vllm.py for the real one."""
