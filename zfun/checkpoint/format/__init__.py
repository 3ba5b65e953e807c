"""The format of a checkpoint: manifest and payload files, without ranks and without states."""

from zfun.checkpoint.format._manifest import digest_of as digest_of
from zfun.checkpoint.format._plain import decode as decode
