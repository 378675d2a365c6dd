"""A training script as users of Slurm write them: the rank comes from Slurm's variables, inside the program."""

from __future__ import annotations

import os
import runpy
from pathlib import Path

os.environ["RANK"] = os.environ["SLURM_PROCID"]
os.environ["LOCAL_RANK"] = os.environ["SLURM_LOCALID"]
os.environ["WORLD_SIZE"] = os.environ["SLURM_NTASKS"]

runpy.run_path(str(Path(__file__).parents[2] / "integration" / "jobs" / "capture_ddp.py"), run_name="__main__")
