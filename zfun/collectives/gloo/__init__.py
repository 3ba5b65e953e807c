"""Groups of processes that exchange messages over gloo or mpi."""
