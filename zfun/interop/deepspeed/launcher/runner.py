"""``python -m zfun.interop.deepspeed``: scripts for DeepSpeed, unmodified, over zfun.

A script, with the flags of the launcher ``deepspeed``, which torchrun starts on this host::

    python -m zfun.interop.deepspeed -n 2 train.py --deepspeed ds_config.json
    python -m zfun.interop.deepspeed --num_gpus 8 --module package.train

On several hosts, the same line on each of them; rank 0 is on the first host of the file::

    python -m zfun.interop.deepspeed --hostfile hosts train.py

Any other command, which starts its ranks itself::

    python -m zfun.interop.deepspeed accelerate launch --config_file ds.yaml train.py
    python -m zfun.interop.deepspeed bash run.sh

``PYTHONPATH`` carries the names to the processes that a command starts, so nothing is patched. The
exit code is that of the first rank that failed, or of the command. As with DeepSpeed's
launcher, each script gets ``--local_rank=N``, unless ``--no_local_rank`` is there; ``LOCAL_RANK``
is always in the environment.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

import torch
import torch.distributed.run as distributed_run
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from zfun.errors import OptionError
from zfun.interop.deepspeed._absent import absent
from zfun.interop.deepspeed._finder import SITE

# accelerate appends variables for the launcher of several hosts to this file.
DEEPSPEED_ENVIRONMENT_NAME = os.environ.get("DS_ENV_FILE", ".deepspeed_env")

_LOCAL = "localhost"
_TORCHRUN = ["-m", "torch.distributed.run"]
# For ssh and for DeepSpeed's own files, of which torchrun needs none: options, then flags.
_UNUSED = "--launcher --launcher_args --ssh_port --comment --account --bind_core_list"
_FLAGS = "--no_ssh --no_ssh_check --force_multi --save_pid --bind_cores_to_rank"
_REFUSED = {
    "--autotuning": "compare stages before a run with zf.planner.plan",
    "--elastic_training": "start torchrun --nnodes MIN:MAX behind python -m zfun.interop.deepspeed",
}


class Start(NamedTuple):
    """A command, and the variables that the environment gains."""

    command: list[str]
    environment: dict[str, str]


def parse_args(args: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line of the launcher."""
    parser = argparse.ArgumentParser(
        prog="python -m zfun.interop.deepspeed",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=__doc__,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("-n", "--num_gpus", "--num_accelerators", type=int, help="ranks on this host")
    add("-H", "--hostfile", help="lines 'host slots=N'")
    add("--num_nodes", type=int, help="the first hosts of the file")
    add("--node_rank", type=int, help="the place of this host, where its name is not in the file")
    add("-i", "--include", default="", help="HOST[:SLOT,...][@HOST...]: the only ones to use")
    add("-e", "--exclude", default="", help="HOST[:SLOT,...][@HOST...]: not to use")
    add("--master_addr", help="the host of rank 0")
    add("--master_port", type=int, help="a port there")
    add("--module", action="store_true", help="the script is a module, as for python -m")
    add("--no_python", action="store_true", help="the script is a program")
    add("--no_local_rank", action="store_true", help="do not pass --local_rank to the script")
    add("--enable_each_rank_log", metavar="FOLDER", help="standard output of each rank as a file")
    for option in _UNUSED.split():
        add(option, help=argparse.SUPPRESS)
    for flag in _FLAGS.split():
        add(flag, action="store_true", help=argparse.SUPPRESS)
    add("--autotuning", nargs="?", help=argparse.SUPPRESS, action=_Refuse)
    add("--elastic_training", nargs=0, help=argparse.SUPPRESS, action=_Refuse)
    add("user_script", help="a script, or a command with its arguments")
    add("user_args", nargs=argparse.REMAINDER)
    return parser.parse_args(args)


class _Refuse(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *rest: object) -> NoReturn:
        flag = self.option_strings[0]
        raise OptionError(
            f"the launcher starts the ranks of a script; got {flag}; {_REFUSED[flag]}"
        )


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Start what :func:`start_of` returns, and end with the exit code of the first that failed."""
    try:
        command, variables = start_of(parse_args(args), os.environ)
    except OptionError as error:
        sys.exit(f"{error}")
    sys.stdout.flush()
    if command[1:3] != _TORCHRUN:
        os.execvpe(command[0], command, {**os.environ, **variables})
    os.environ.update(variables)
    try:
        distributed_run.main(command[3:])
    except ChildFailedError as error:
        code = error.get_first_failure()[1].exitcode
        # A process that a signal ended has a negative code.
        sys.exit(code if code >= 0 else 128 - code)
    sys.exit(0)


def start_of(args: argparse.Namespace, environment: Mapping[str, str]) -> Start:
    """Return the command of a command line, without starting it.

    Raises:
        OptionError: a host or a number that does not fit, or a script that does not exist.
    """
    places = [str(SITE), environment.get("PYTHONPATH", "")]
    variables = {"PYTHONPATH": os.pathsep.join(filter(None, places))}
    script, is_plain = args.user_script, not (args.module or args.no_python)
    if is_plain and not Path(script).is_file():
        return Start([_program(script, args), *args.user_args], variables)
    hosts = _hosts_of(args)
    node = _node_of(list(hosts), args.node_rank)
    slots = list(hosts.values())[node]
    if torch.cuda.is_available() and (args.include or args.exclude):
        seen = environment.get("CUDA_VISIBLE_DEVICES")
        devices = None if seen is None else seen.split(",")
        chosen = [str(slot) if devices is None else devices[slot] for slot in slots]
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(chosen)
    command = [sys.executable, *_TORCHRUN, f"--nproc-per-node={len(slots)}"]
    if len(hosts) > 1 or args.master_addr or args.master_port:
        command += [f"--nnodes={len(hosts)}", f"--node-rank={node}"]
        command += [f"--master-addr={args.master_addr or next(iter(hosts))}"]
        command += [f"--master-port={args.master_port or 29500}"]
    else:
        command += ["--standalone"]
    if args.enable_each_rank_log not in (None, "None"):
        command += ["--redirects=3", f"--log-dir={args.enable_each_rank_log}"]
    if args.module:
        command += ["--module"]
    if args.no_python:
        command += ["--no-python"]
    # torchrun puts the number in.
    rank = [] if args.no_local_rank else ["--local_rank=${local_rank}"]
    return Start([*command, script, *rank, *args.user_args], variables)


def _program(name: str, args: argparse.Namespace) -> str:
    """Return the path of a command; one beside this Python is meant first."""
    found = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    if found is None or name.endswith(".py"):
        raise OptionError(
            f"the launcher takes a script or a command; got {name!r}, which is neither; pass the "
            "path of a script, or --module and the name of a module"
        )
    if args.num_gpus is not None or args.hostfile is not None or args.num_nodes is not None:
        raise OptionError(
            f"a command starts its ranks itself; got a number of ranks or hosts for {name!r}; "
            "pass the number to the command"
        )
    return found


def fetch_hostfile(hostfile_path: str | Path | None) -> dict[str, int] | None:
    """Return the slots of each host of a file, or ``None`` where there is no file.

    Raises:
        OptionError: a line is not ``host slots=N``, or a host stands twice.
    """
    if hostfile_path is None or not Path(hostfile_path).is_file():
        return None
    found: dict[str, int] = {}
    for line in Path(hostfile_path).read_text(encoding="utf-8").splitlines():
        text = line.partition("#")[0].strip()
        if not text:
            continue
        parts = re.fullmatch(r"(\S+)\s+slots=(\d+)", text)
        if parts is None or parts[1] in found:
            raise OptionError(
                f"a line of a hostfile is 'host slots=N', once for each host; got {line!r}; "
                "correct the line"
            )
        found[parts[1]] = int(parts[2])
    return found


def _hosts_of(args: argparse.Namespace) -> dict[str, list[int]]:
    """Return the slots to use on each host."""
    listed = fetch_hostfile(args.hostfile)
    if args.hostfile is not None and listed is None:
        raise OptionError(f"hostfile is a file; got {args.hostfile!r}; pass the path of one")
    chosen, left_out = _slots_of(args.include), _slots_of(args.exclude)
    if chosen and left_out:
        raise OptionError("the launcher takes --include or --exclude; got both; leave one out")
    if listed is None:
        if (args.num_nodes or 1) > 1:
            raise OptionError(
                f"several hosts come from a file; got --num_nodes {args.num_nodes} without one; "
                "pass --hostfile, with lines 'host slots=N'"
            )
        count = max(1, torch.cuda.device_count())
        largest = max([count - 1, *(slot for slots in chosen.values() for slot in slots)])
        listed = {_LOCAL: largest + 1 if args.num_gpus is None else args.num_gpus}
    hosts = {host: list(range(slots)) for host, slots in listed.items()}
    for host, slots in (chosen or left_out).items():
        if not set(slots) <= set(hosts.get(host, ())) or host not in hosts:
            raise OptionError(
                f"--include and --exclude name hosts and slots of the hostfile; got {host!r} with "
                f"{slots or 'all slots'}; the hosts are {hosts}"
            )
    if chosen:
        hosts = {host: chosen[host] or slots for host, slots in hosts.items() if host in chosen}
    for host, slots in left_out.items():
        hosts[host] = [slot for slot in hosts[host] if slots and slot not in slots]
    hosts = {host: slots[: args.num_gpus] for host, slots in hosts.items() if slots}
    hosts = dict(list(hosts.items())[: args.num_nodes])
    if not hosts or not all(hosts.values()):
        raise OptionError(
            "the launcher starts at least one rank; got none; choose a host and slots"
        )
    return hosts


def _slots_of(text: str) -> dict[str, list[int]]:
    """Read ``HOST[:SLOT,...][@HOST...]``."""
    found: dict[str, list[int]] = {}
    for part in filter(None, text.split("@")):
        host, _, slots = part.partition(":")
        if slots and not all(slot.isdigit() for slot in slots.split(",")):
            raise OptionError(
                f"slots are numbers, as in 'host:0,2'; got {part!r}; write the numbers"
            )
        found[host] = sorted({int(slot) for slot in slots.split(",")} if slots else ())
    return found


def _node_of(hosts: Sequence[str], given: int | None) -> int:
    """Return the place of this host among the hosts."""
    if given is not None and 0 <= given < len(hosts):
        return given
    own = {socket.gethostname(), socket.gethostname().partition(".")[0], _LOCAL, "127.0.0.1"}
    found = [place for place, host in enumerate(hosts) if host in own]
    if given is None and len(hosts) == 1:
        return 0
    if given is not None or len(found) != 1:
        raise OptionError(
            f"the line runs on each host, of which this one is found by its name; got node_rank="
            f"{given} and {socket.gethostname()!r} for the hosts {list(hosts)}; pass --node_rank"
        )
    return found[0]


__getattr__ = absent("launcher", globals())
