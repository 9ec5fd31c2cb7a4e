"""Seeded synthetic rollout workloads: the same options always give the same rows.

``workload_spec`` names a workload, ``generate`` makes its trajectories one by one, ``write_rows`` streams
them to a Parquet file of HARTS rows that ``harts ingest`` reads.
"""

from harts_core.trees.synth.row_file import ROW_SCHEMA, SynthSummary, write_rows
from harts_core.trees.synth.samples import generate
from harts_core.trees.synth.spec import KINDS, PRESETS, WorkloadSpec, workload_spec

__all__ = [
    "KINDS",
    "PRESETS",
    "ROW_SCHEMA",
    "SynthSummary",
    "WorkloadSpec",
    "generate",
    "workload_spec",
    "write_rows",
]
