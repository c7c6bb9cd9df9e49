"""What tests of code around this library can reuse: contracts for implementers, injected faults."""

import sys

# so that an assertion of a contract that fails shows both sides; nothing here needs pytest before
if (pytest := sys.modules.get("pytest")) is not None:
    pytest.register_assert_rewrite("kvplane.testing.storage_contract")
