"""A Slurm cluster of two virtual nodes on this machine, for as long as a test needs it."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.distributed.launch import free_port

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "scontrol", "munged")

CONF = """ClusterName=harts
SlurmctldHost=localhost(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CryptoType=crypto/munge
SlurmctldPort={port}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
SwitchType=switch/none
KillWait=2
{nodes}
PartitionName=cpu Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:4
"""
NODE = (
    "NodeName={name} NodeHostname=localhost NodeAddr=127.0.0.1 Port={port} CPUs={cpus} RealMemory=4000 "
    "State=UNKNOWN"
)


def can_run() -> bool:
    return os.getuid() == 0 and all(shutil.which(program) for program in PROGRAMS)


@contextmanager
def cluster(folder: Path) -> Iterator[dict[str, str]]:
    """The environment in which sbatch and the like reach the cluster."""
    cpus = os.cpu_count() or 1
    for name in ("state", "spool-n1", "spool-n2"):
        (folder / name).mkdir()
    nodes = "\n".join(NODE.format(name=name, port=free_port(), cpus=cpus) for name in ("n1", "n2"))
    conf = folder / "slurm.conf"
    conf.write_text(CONF.format(folder=folder, port=free_port(), nodes=nodes))
    env = os.environ | {"SLURM_CONF": str(conf)}
    started = []
    if subprocess.run(["munge", "-n"], capture_output=True, check=False).returncode:
        Path("/run/munge").mkdir(exist_ok=True)
        shutil.chown("/run/munge", "munge", "munge")
        started.append(subprocess.Popen(["runuser", "-u", "munge", "--", "munged", "--foreground"]))
        time.sleep(1)
    for command in (["slurmctld", "-D", "-c"], ["slurmd", "-D", "-N", "n1"], ["slurmd", "-D", "-N", "n2"]):
        started.append(subprocess.Popen([*command, "-f", str(conf)], env=env, stderr=subprocess.DEVNULL))
    try:
        for _ in range(60):
            time.sleep(0.5)
            found = subprocess.run(
                ["sinfo", "-h", "-o", "%T"], env=env, capture_output=True, text=True, check=False
            )
            if found.stdout.split() == ["idle"]:
                break
        else:
            raise RuntimeError((folder / "slurmctld.log").read_text())
        yield env
    finally:
        for process in reversed(started):
            process.terminate()
        for process in started:
            process.wait(20)
