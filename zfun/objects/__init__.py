"""The operations on files, on the objects of a store such as S3, through ``fsspec``."""

from zfun.objects._address import Address, located
from zfun.objects._store import Objects, files_of, is_url
