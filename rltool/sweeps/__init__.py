"""Sweeps: many runs that end in one answer. A process per job, on this machine or through Slurm or Ray."""
