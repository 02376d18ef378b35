import pytest

pytest.register_assert_rewrite("tests.console.axe", "tests.console.browser")
