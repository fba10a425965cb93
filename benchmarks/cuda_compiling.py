"""Compiles what a benchmark will need before it times anything, in several processes.

MLX compiles a CUDA kernel at its first use, one after the other, and keeps it in a
folder: ours in 1 to 2 seconds, its own quantized products from 8 rows on likewise.
Here each worker evaluates products of zeros and hands over what MLX put into its own
folder. It has its own because MLX writes there without looking for others, who could
read half a file.
"""

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path
from shutil import copyfile

import mlx.core as mx

FOLDER = "MLX_PTX_CACHE_DIR"
"""Environment variable that names MLX's folder of compiled kernels."""
WORKERS = 12
"""Most processes: each has a CUDA context of its own."""
PRIVATE = ".ahead-"
"""How the folders of workers begin, inside the one that is shared."""

Task = Callable[[], object]
"""What a worker does, for the kernels that it makes MLX compile."""


def compile_ahead(
    tasks: Sequence[Task], say: Callable[[str], None], most: int = WORKERS
) -> None:
    """Runs tasks in other processes and keeps what MLX compiled for them.

    A task that fails is told and left out: what it should have compiled is compiled
    when it is needed.

    Args:
        tasks: Functions that can be pickled, the longest first.
        say: Prints a line.
        most: Processes at a time.
    """
    if not tasks:
        return
    started = time.monotonic()
    shared = shared_folder()
    workers = min(len(tasks), os.cpu_count() or 1, most)
    with (
        tempfile.TemporaryDirectory(dir=shared, prefix=PRIVATE) as private,
        ProcessPoolExecutor(
            workers, get_context("spawn"), _enter, (shared, Path(private))
        ) as pool,
    ):
        pending = [pool.submit(_run, task, shared) for task in tasks]
        for done in as_completed(pending):
            try:
                done.result()
            except (RuntimeError, ValueError, OSError, BrokenProcessPool) as failed:
                say(f"not compiled ahead: {type(failed).__name__}: {failed}")
    seconds = time.monotonic() - started
    say(f"compiled ahead in {seconds:.0f} s: {len(tasks)} tasks, {workers} at a time")


def shared_folder() -> Path:
    """Returns MLX's folder, and makes sure that MLX takes this one.

    Before anything is evaluated: MLX asks once.
    """
    default = Path(tempfile.gettempdir(), "mlx", mx.__version__, "ptx")
    folder = Path(os.environ.setdefault(FOLDER, str(default)))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _enter(shared: Path, private: Path) -> None:
    """Gives a worker a folder of its own, with what has been compiled already."""
    own = Path(tempfile.mkdtemp(dir=private))
    for file in _files(shared):
        to = own / file
        to.parent.mkdir(parents=True, exist_ok=True)
        copyfile(shared / file, to)
    os.environ[FOLDER] = str(own)


def _run(task: Task, shared: Path) -> None:
    try:
        task()
    finally:
        publish(Path(os.environ[FOLDER]), shared)


def publish(own: Path, shared: Path) -> None:
    """Moves what is new to the shared folder, each file as a whole.

    MLX looks for the .ptx first, so that comes last.
    """
    for file in sorted(_files(own), key=lambda each: each.suffix == ".ptx"):
        if not (shared / file).exists():
            (shared / file).parent.mkdir(parents=True, exist_ok=True)
            (own / file).replace(shared / file)


def _files(folder: Path) -> Iterator[Path]:
    """Yields the files of compiled kernels, relative to their folder."""
    apart = {*folder.glob(f"{PRIVATE}*")}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and apart.isdisjoint(path.parents):
            yield path.relative_to(folder)
