"""Start groups of processes: rendezvous, the choice of a transport, and `spawn`."""
