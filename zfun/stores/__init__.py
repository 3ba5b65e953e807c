"""Stores: places that keep parts of the state between uses."""

from zfun.stores._base import (
    Crossing,
    Offload,
    Store,
    Stored,
    fetch,
    flush,
    located,
    locating,
    on_disk,
    resident,
    start_read,
)
from zfun.stores._base import stored as stored
from zfun.stores._clean import Cleaned, clean
from zfun.stores._host import HostStore, host
from zfun.stores._nvme import NvmeStore, nvme
from zfun.stores._passes import READ_AHEAD as READ_AHEAD
from zfun.stores._passes import Derived, by_bucket, derived, reading
from zfun.stores._phases import offload_values, reload
from zfun.stores._streams import LateValues as LateValues
from zfun.stores._streams import Ring as Ring
from zfun.stores._streams import has_queues as has_queues
from zfun.stores._streams import hosted as hosted

__all__ = [
    "Cleaned",
    "Crossing",
    "Derived",
    "HostStore",
    "NvmeStore",
    "Offload",
    "Store",
    "Stored",
    "by_bucket",
    "clean",
    "derived",
    "fetch",
    "flush",
    "host",
    "located",
    "locating",
    "nvme",
    "offload_values",
    "on_disk",
    "reading",
    "reload",
    "resident",
    "start_read",
]
