"""Stores: places that keep parts of the state between uses."""

from zfun.stores._base import Crossing, Offload, Store, Stored, fetch, resident
from zfun.stores._host import HostStore, host

__all__ = ["Crossing", "HostStore", "Offload", "Store", "Stored", "fetch", "host", "resident"]
