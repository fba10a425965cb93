"""Lets other processes compile MLX's own kernels before this one needs them.

MLX (0.32.4) compiles a kernel of a quantized product in half a minute, one at a time,
inside the call that needs it, where nothing can interrupt it. A process that computes
the same product of zeros leaves the kernel in MLX's folder. Each has a folder of its
own until it is done, because MLX reads half-written files.
"""

import os
import pickle
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from mlx_marlin.backends import children
from mlx_marlin.backends.children import Job
from mlx_marlin.backends.cuda.compiling import kernel_text

PRIVATE = ".mlx_marlin-"
"""How the folders of processes begin, inside the one that is shared."""
JOB = "job"
"""Name of the file with a process's job, in its folder."""


class Processes:
    """The processes of some jobs."""

    def __init__(self, mlx: str) -> None:
        self._shared = kernel_text.folder(mlx)
        self._processes: dict[Job, children.Process] = {}

    def start(self, jobs: Sequence[Job]) -> None:
        """Starts the jobs that are not done; one that cannot be started has failed."""
        for job in jobs:
            if job in self._processes or self.is_done(job):
                continue
            try:
                self._processes[job] = self._started(job)
            except OSError:
                continue

    def _started(self, job: Job) -> children.Process:
        kernel_text.make(self._shared)
        private = Path(tempfile.mkdtemp(dir=self._shared, prefix=PRIVATE))
        for file in self._shared.iterdir():
            if file.is_file():
                (private / file.name).symlink_to(file)
        (private / JOB).write_bytes(pickle.dumps(job))
        environment = os.environ | {
            kernel_text.ENVIRONMENT: str(private),
            "MLX_MARLIN_GUARD": "0",  # others check kernels
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        }
        command = [sys.executable, "-m", __name__, str(private), str(self._shared)]
        return children.start(command, stdout=subprocess.DEVNULL, env=environment)

    def is_done(self, job: Job) -> bool:
        """Returns whether a job was done, by this or an earlier process."""
        return (self._shared / job.mark).exists()

    def is_running(self, job: Job) -> bool:
        """Returns whether a job's process runs: if not, it is done or has failed."""
        process = self._processes.get(job)
        return process is not None and process.poll() is None


def publish(private: Path, shared: Path, mark: str) -> None:
    """Moves what a process has compiled to MLX's folder, and leaves its mark.

    MLX looks for machine code first, so that comes last.
    """
    own = [each for each in private.iterdir() if not each.is_symlink()]
    for file in sorted(own, key=lambda each: each.suffix == ".ptx"):
        if file.name != JOB and not (shared / file.name).exists():
            file.replace(shared / file.name)
    (shared / mark).touch()


def main(private: Path, shared: Path) -> None:
    """Does the job of a process, in the folder that MLX writes to."""
    import importlib

    os.nice(10)  # it may go on while others generate
    try:
        job: Job = pickle.loads((private / JOB).read_bytes())  # written by `Processes`
        importlib.import_module(job.module).work(job.argument)
        publish(private, shared, job.mark)
    finally:
        shutil.rmtree(private, ignore_errors=True)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
