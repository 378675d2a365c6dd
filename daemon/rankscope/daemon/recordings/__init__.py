"""Recordings of runs: the records of steps and of NCCL's operations as they are."""
