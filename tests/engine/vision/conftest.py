"""Share the AMX guard and the kernel threads of the model tests."""

from tests.engine.models.conftest import kernel_threads  # noqa: F401
