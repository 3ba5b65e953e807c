"""Ranks that cannot meet: the port is taken, or belongs to a program that never answers."""

from __future__ import annotations

import os
import socket
import time
from multiprocessing.connection import Connection

import pytest
import torch

from tests.distributed import fork_server, processes
from zfun.collectives import AllReduce, Collective, Group, process_group
from zfun.errors import PeerLost

pytestmark = [pytest.mark.processes, pytest.mark.timeout(60)]

TIMEOUT_S = 0.5


def _rank(rank: int, port: int, connection: Connection) -> None:
    names = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank}
    names |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
    os.environ.update({name: str(value) for name, value in names.items()})
    torch.set_num_threads(1)
    started = time.monotonic()
    try:
        process_group(timeout_s=TIMEOUT_S)
    except PeerLost as error:
        connection.send((str(error), time.monotonic() - started))
    connection.close()
    # The store of another program answers no destructor either.
    os._exit(0)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_port_that_another_program_has_is_an_error_that_names_the_port(rank: int) -> None:
    """Rank 0 cannot listen there; rank 1 finds a program that does not answer."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ours, theirs = fork_server().Pipe()
        process = fork_server().Process(target=_rank, args=(rank, port, theirs))
        process.start()
        theirs.close()
        try:
            assert ours.poll(30.0)
            text, took_s = ours.recv()
        finally:
            process.join(5.0)
            process.kill()
            process.join()
            ours.close()
    if rank == 0:
        assert "rank 0 cannot use this address: The server socket has failed" in text
        assert f"127.0.0.1:{port}" in text
        assert "choose another MASTER_PORT" in text
    else:
        assert "rank 1 lost rank 0, which did not come within 0.5 s" in text
    assert took_s < TIMEOUT_S + 5.0


def _total(group: Group) -> float:
    x = torch.tensor([1.0 + group.rank])
    return group.start(Collective(AllReduce()), x).wait().item()


def test_two_jobs_of_one_machine_choose_free_ports() -> None:
    with processes(2, timeout_s=50.0) as first, processes(2, timeout_s=50.0) as second:
        assert [first.run(_total), second.run(_total), first.run(_total)] == [[3.0, 3.0]] * 3
