from __future__ import annotations

import errno

from tests.security.bystander import Bystander


def test_stack_sampling_continues_on_a_full_disk(bystander: Bystander) -> None:
    """On many hosts any user can fill /tmp."""
    filling = bystander.temporary / "filling"
    try:
        with bystander.under_attack() as watch:
            try:
                with filling.open("wb", buffering=0) as file:
                    while True:
                        file.write(bytes(1 << 16))
            except OSError as error:
                assert error.errno == errno.ENOSPC
            watch.observe()
    finally:
        filling.unlink(missing_ok=True)
