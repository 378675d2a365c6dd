"""A /tmp of its own for a process in a mount namespace of its own, as a container has it."""

from __future__ import annotations

import shlex

from tests.shared_data import ROOT

_ROOT = shlex.quote(str(ROOT))
# For a shell. The checkout may itself lie in /tmp: /mnt holds it meanwhile, and it is put back where it was.
PRIVATE_TMP = " && ".join(
    (
        f"mount --bind {_ROOT} /mnt",
        "mount -t tmpfs none /tmp",
        f"mkdir -p {_ROOT}",
        f"mount --bind /mnt {_ROOT}",
        f"cd {_ROOT}",
    )
)
