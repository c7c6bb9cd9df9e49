"""One S3 server for all tests of a process."""

import pytest
import s3_server


@pytest.fixture(scope="session")
def s3():
    """Where it listens; the environment of the tests says so too."""
    with s3_server.served() as server, s3_server.environment(server.environment()):
        yield server
