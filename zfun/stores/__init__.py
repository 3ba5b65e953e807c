"""Stores: places that keep parts of the state between uses."""

from zfun.stores._base import Crossing, Store, Stored, fetch, resident
from zfun.stores._host import HostStore, host

__all__ = ["Crossing", "HostStore", "Store", "Stored", "fetch", "host", "resident"]
