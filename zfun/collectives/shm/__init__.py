"""Collectives of the CPU ranks of one host, through symmetric memory.

[Note: collectives through symmetric memory]

Symmetric memory is memory that all ranks of a host have mapped, and of which each rank owns a
piece. Every rank owns one segment: an anonymous file (``_segment``). The rank writes to its own
segment and reads the segments of its peers.

A collective is a record and a read. The k-th collective of a rank on a stream is published as a
record in the rank's segment: a hash and a text of the collective, and the offset of the input
(``_mailbox``). A rank that waits for the collective waits until all peers have published their
k-th record, compares the hashes, and then reads the inputs where they lie.

* An input that ``allocate`` made lies in the segment already and is not copied. A small input is
  copied into the record, any other input into a block of the segment.
* A zero-copy all-gather copies nothing. The result is a *window* (``_symmetric``): a fresh range of
  addresses in which the pieces of the ranks stand one after the other. The window is unmapped
  when its last view dies, so a released bucket no longer counts as memory of this rank.
* A reduction reads the terms of all ranks in rank order, which gives the bits of ``simulate``. An
  all-reduce has one phase, in which every rank adds everything, because a second phase would need
  a thread, or would make ranks depend on the order of each other's waits.

Progress is one word. Each record has a *finished* word, which its owner sets once the owner no
longer reads any input of the collective: when ``wait`` has computed the result, and for a window
when the window is dropped or detached. A block of the segment may be used again, and a buffer may
be written, when the finished words of its readers say so.

Readers are waited for in one place, ``await_readers``, before an update writes to a buffer in
place. The rank first detaches its own windows over the buffer, so that their tensors keep the
old values, and then waits for the finished words of its peers. Neither ``start`` nor
``wait`` waits for a peer to *finish* anything: the segment grows instead. Therefore ranks may
wait for collectives in any order.

The protocol needs no lock, because each word has one writer, and no fence, because x86-64 keeps
the order of stores and of loads. Other processors are refused. Kernels with non-temporal
stores end with a fence of their own.
"""
