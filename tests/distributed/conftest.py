from collections.abc import Iterator

import pytest

from ranks import Job


@pytest.fixture(scope="package")
def two() -> Iterator[Job]:
    with Job(2) as job:
        yield job


@pytest.fixture(scope="package")
def three() -> Iterator[Job]:
    with Job(3) as job:
        yield job
