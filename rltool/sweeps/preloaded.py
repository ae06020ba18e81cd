"""Imported once by the server that jobs are forked from (:mod:`rltool.sweeps.processes`): what every run needs, and takes long."""
# ruff: noqa: E402, F401

import os

# Ctrl-C and a terminal that closes are for who started the sweep, who asks the jobs to end. It comes before seconds of imports.
os.setsid()

import rltool.algos.dqn
import rltool.algos.ppo
import rltool.algos.sac
import rltool.sweeps.worker
import rltool.training
import rltool.vectorized
