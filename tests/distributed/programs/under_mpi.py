"""A rank under mpirun: runs bodies, and writes the results where the test reads them.

mpirun -n 3 python -m tests.distributed.programs.under_mpi FOLDER MODULE.BODY ...
"""

from __future__ import annotations

import importlib
import pickle
import sys
from pathlib import Path

import torch

import zfun as zf
from zfun.collectives.backends._mpi import MpiMessages

TIMEOUT_S = 40.0


def main(folder: Path, names: list[str]) -> None:
    torch.set_num_threads(1)
    with zf.process_group(timeout_s=TIMEOUT_S, shared_memory=False) as group:
        assert isinstance(group._torch_group, MpiMessages)  # type: ignore[attr-defined]
        for name in names:
            module, _, body = name.rpartition(".")
            result = getattr(importlib.import_module(module), body)(group)
            (folder / f"{name}-{group.rank}").write_bytes(pickle.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
