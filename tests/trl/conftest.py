"""TRL's tests, which have an environment of their own: `make test-trl`."""

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """TRL and datasets warn of much that is not ours."""
    config.addinivalue_line("filterwarnings", "ignore")
